"""One range, fetched until it is whole: time limits, and retries of what is worth retrying."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass
from typing import Any

from lynxkv.errors import FetchError, LynxError
from lynxkv.fetch.options import MAX_REQUEST_BYTES, FetchOptions
from lynxkv.store import Link
from lynxkv.store.problems import is_lasting, reading
from lynxkv.store.transport import NO_RANGES_HINT, Transport

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0


@dataclass(frozen=True, kw_only=True)
class Fetched:
    """Bytes of a range, fewer than asked for only where the object ends; `size` of the object, if the store said so."""

    data: bytearray
    size: int | None


class RangeReader:
    """Ranges of one cache's objects."""

    def __init__(self, url: str, transport: Transport, options: FetchOptions, link: Link | None = None) -> None:
        self.url, self.transport, self.options, self.link = url, transport, options, link
        # On the clock of event loops; set when the first range is asked for.
        self._deadline: float | None = None

    async def fetch(self, name: str, start: int, stop: int) -> Fetched:
        """Bytes [start, stop) of an object, in requests of at most `MAX_REQUEST_BYTES`.

        Raises:
            CacheNotFoundError: there is no such object.
            FetchError: it cannot be read, or not in time.
        """
        edges = [*range(start, stop, MAX_REQUEST_BYTES), stop]
        parts = await _all(self._request(name, *edge) for edge in itertools.pairwise(edges))
        data = parts[0].data if len(parts) == 1 else bytearray().join(part.data for part in parts)
        if self.link is not None:
            await asyncio.sleep(self.link.delay_s(len(data)))
        return Fetched(data=data, size=parts[0].size)

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

    async def _request(self, name: str, start: int, stop: int) -> Fetched:
        """One range; an interrupted answer is continued where it ended."""
        data, size, filled, failures = bytearray(stop - start), None, 0, 0
        options = self.options
        loop = asyncio.get_running_loop()
        while True:
            before = filled
            try:
                with reading(self.url, name):
                    async with (
                        asyncio.timeout(self._limit(options.request_timeout_s)),
                        asyncio.timeout(options.stall_s) as stall,
                        self.transport.get(name, start + filled, stop) as answer,
                    ):
                        size = answer.size if size is None else size
                        async for chunk in answer.chunks:
                            stall.reschedule(loop.time() + options.stall_s)
                            if filled + len(chunk) > len(data):
                                raise FetchError(
                                    f"{self.url}/{name}: asked for {stop - start - before} bytes, got more",
                                    hint=NO_RANGES_HINT,
                                )
                            data[filled : filled + len(chunk)] = chunk
                            filled += len(chunk)
                failures = 0
                ended = filled == before  # where it should not, whoever reads the bytes misses them
            except FetchError as error:
                failures = 1 if filled > before else failures + 1
                ended = False
                failure = error
            if filled == len(data):
                return Fetched(data=data, size=size)
            if ended or (size is not None and start + filled >= size):
                return Fetched(data=data[:filled], size=size)
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
            f"{self.url}: not fetched within {self.options.deadline_s:g} s", hint="allow more time with deadline_s"
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


async def _all(requests: Iterable[Coroutine[Any, Any, Fetched]]) -> list[Fetched]:
    """The answers to several requests; when one fails, the others are cancelled before that is told."""
    tasks = [asyncio.create_task(request) for request in requests]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
