"""One range, fetched until it is whole: time limits, and retries of what is worth retrying."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any

from lynxkv.errors import FetchError, LynxError
from lynxkv.fetch.memory import new_memory
from lynxkv.fetch.options import MAX_REQUEST_BYTES, FetchOptions
from lynxkv.store import Link
from lynxkv.store.problems import is_lasting, reading
from lynxkv.store.transport import NO_RANGES_HINT, Transport

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0
# What a simulated link hands on at a time.
LINK_PIECE_BYTES = 128 << 10


@dataclass(frozen=True, kw_only=True)
class Fetched:
    """Bytes of a range, fewer than asked for only where the object ends; `size` of the object, if the store said so."""

    data: memoryview
    size: int | None


class Arrival:
    """The bytes [start, stop) of an object while they come in, in one or more parts. For the event loop alone, but for
    reading bytes that are here.

    Args:
        told: called with this arrival whenever more is here; if it kept it, neither would be freed at once.
        within: another arrival that has these bytes, or is to have them: theirs is the same memory.
        memory: gives memory for so many bytes, where it is not that of another.

    Attributes:
        size: of the object, once the store has said so; None if it does not.
    """

    def __init__(
        self,
        start: int,
        stop: int,
        told: Callable[[Arrival], None] = lambda arrival: None,
        within: Arrival | None = None,
        memory: Callable[[int], memoryview] = new_memory,
    ) -> None:
        self.start, self.stop, self.within = start, stop, within
        self.size: int | None = None
        self._told = told
        self._buffer = memory(stop - start) if within is None else within.between(start, stop)
        self._ends = {start: start}  # of what is here of each part, by where the part starts

    @property
    def here(self) -> int:
        """Where, in the object, the first byte is missing."""
        at = self.start
        while (end := self._ends.get(at, at)) > at:
            at = end
        return at

    def between(self, start: int, stop: int) -> memoryview:
        """Bytes [start, stop) of the object; not a copy."""
        return self._buffer[start - self.start : stop - self.start]

    def put(self, part: int, at: int, chunk: Any) -> None:
        """Take the next bytes of the part that starts at `part`; `at` is where they start."""
        end = at + len(chunk)
        self._buffer[at - self.start : end - self.start] = chunk
        self.reach(part, end)

    def reach(self, part: int, end: int) -> None:
        """Of the part that starts at `part`, the bytes before `end` are in the memory now."""
        self._ends[part] = end
        self._told(self)

    def fetched(self) -> Fetched:
        """What has come."""
        return Fetched(data=self.between(self.start, self.here), size=self.size)


class RangeReader:
    """Ranges of one cache's objects.

    Args:
        link: a slower one, to be simulated.
        arrived: called with how many bytes have come, whenever some have.
    """

    def __init__(
        self,
        url: str,
        transport: Transport,
        options: FetchOptions,
        link: Link | None = None,
        arrived: Callable[[int], None] = lambda count: None,
    ) -> None:
        self.url, self.transport, self.options, self.link = url, transport, options, link
        self._arrived = arrived
        # On the clock of event loops; set when the first range is asked for.
        self._deadline: float | None = None

    async def fetch(self, name: str, start: int, stop: int) -> Fetched:
        """Bytes [start, stop) of an object, in requests of at most `MAX_REQUEST_BYTES`.

        Raises:
            CacheNotFoundError: there is no such object.
            FetchError: it cannot be read, or not in time.
        """
        arrival = Arrival(start, stop)
        await self.fill(name, arrival, start, stop)
        return arrival.fetched()

    async def fill(self, name: str, arrival: Arrival, start: int, stop: int) -> None:
        """Fetch the bytes [start, stop) of what `arrival` is to hold; errors as for `fetch`."""
        if self.link is None:
            await self._request_all(name, arrival, start, stop)
            return
        whole = Arrival(start, stop)
        await self._request_all(name, whole, start, stop)
        arrival.size = whole.size
        await self._slowly(self.link, whole.fetched().data, arrival, start)

    async def size(self, name: str) -> int:
        """Size of an object in bytes.

        Raises:
            CacheNotFoundError, FetchError: as for `fetch`.
        """
        failures = 0
        while True:
            try:
                with reading(self.url, name):
                    async with asyncio.timeout(self._limit(self.options.stall_s)):
                        return await self.transport.size(name)
            except FetchError as error:
                failures += 1
                await self._pause(error, failures)

    async def _slowly(self, link: Link, data: memoryview, arrival: Arrival, start: int) -> None:
        """Hand bytes on when a simulated link would have brought them."""
        loop = asyncio.get_running_loop()
        end = loop.time() + link.delay_s(len(data))
        for at in range(0, len(data), LINK_PIECE_BYTES):
            piece = data[at : at + LINK_PIECE_BYTES]
            left_s = (len(data) - at - len(piece)) * 8 / link.bit_per_s
            await asyncio.sleep(end - left_s - loop.time())
            arrival.put(start, start + at, piece)
            self._arrived(len(piece))
        await asyncio.sleep(end - loop.time())

    async def _request_all(self, name: str, arrival: Arrival, start: int, stop: int) -> None:
        edges = [*range(start, stop, MAX_REQUEST_BYTES), stop]
        if len(edges) == 2:
            await self._request(name, arrival, *edges)
        else:
            await all_of(self._request(name, arrival, *edge) for edge in itertools.pairwise(edges))

    async def _request(self, name: str, arrival: Arrival, start: int, stop: int) -> None:
        """One range; an interrupted answer is continued where it ended."""
        at, failures = start, 0
        options = self.options
        loop = asyncio.get_running_loop()
        while True:
            before = at
            try:
                with reading(self.url, name):
                    async with (
                        asyncio.timeout(self._limit(options.request_timeout_s)),
                        asyncio.timeout(options.stall_s) as stall,
                        self.transport.get(name, at, stop) as answer,
                    ):
                        arrival.size = answer.size if arrival.size is None else arrival.size
                        async for chunk in answer.chunks:
                            stall.reschedule(loop.time() + options.stall_s)
                            if at + len(chunk) > stop:
                                raise FetchError(
                                    f"{self.url}/{name}: asked for {stop - before} bytes, got more",
                                    hint=NO_RANGES_HINT,
                                )
                            arrival.put(start, at, chunk)
                            if self.link is None:
                                self._arrived(len(chunk))
                            at += len(chunk)
                failures = 0
                ended = at == before  # where it should not, whoever reads the bytes misses them
            except FetchError as error:
                failures = 1 if at > before else failures + 1
                ended = False
                failure = error
            if at == stop or ended or (arrival.size is not None and at >= arrival.size):
                return
            if failures:
                await self._pause(failure, failures)

    def _limit(self, seconds: float) -> float:
        """`seconds`, or what is left of the deadline.

        Raises:
            FetchError: nothing is left.
        """
        if self.options.deadline_s is None:
            return seconds
        now = asyncio.get_running_loop().time()
        if self._deadline is None:
            self._deadline = now + self.options.deadline_s
        if now >= self._deadline:
            raise self._late()
        return min(seconds, self._deadline - now)

    def _late(self) -> FetchError:
        return FetchError(
            f"{self.url}: not fetched within {self.options.deadline_s:g} s",
            hint="allow more time: deadline_s, or --deadline",
        )

    async def _pause(self, error: FetchError, failures: int) -> None:
        """Wait before trying again, longer each time; raises what cannot or may not be tried again."""
        cause: BaseException = error.__cause__ or error
        if isinstance(cause, LynxError) or is_lasting(cause):
            raise error
        pause = random.uniform(0.5, 1.0) * min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (failures - 1))
        if self._limit(pause) < pause:
            raise self._late() from error
        if failures >= self.options.attempts:
            raise error
        await asyncio.sleep(pause)


async def all_of(requests: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Several requests at once; when one fails, the others are cancelled before that is told."""
    tasks = [asyncio.create_task(request) for request in requests]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
