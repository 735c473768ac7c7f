"""The head of a shard, read when nobody knows yet how long it is."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from lynxkv.fetch.options import MAX_REQUEST_BYTES
from lynxkv.fetch.ranges import Arrival, Fetched
from lynxkv.format.read import FIRST_READ_BYTES, ReadRange

T = TypeVar("T")
Fetch = Callable[[int, int], Awaitable[Fetched]]
"""Fetches the bytes [start, stop) of the shard."""
Submit = Callable[[Arrival, int, int], Future[None]]
"""Asks for one piece of what an `Arrival` is to hold, between these two bytes."""


class Front:
    """The first bytes of a shard, in pieces that are asked for at once, before anybody knows its layout.

    Header and index usually come with the first piece; the others keep link and server busy while those are read.
    Nothing here refers to whoever asks, so that the memory is free as soon as nobody needs it.

    Args:
        edges: where pieces start, and where the last one ends.
        submit: asks for them.
        most: up to this byte more can be asked for later. Memory that nothing is put into is not taken.

    Attributes:
        stop: the first byte that has not been asked for.
        last: where the last bytes of it end that will be wanted; None until that is known.
    """

    def __init__(self, edges: Sequence[int], submit: Submit, *, most: int = 0) -> None:
        self.stop = edges[0]
        self.last: int | None = None
        self._most = most
        self._waiting: list[asyncio.Future[None]] = []
        self._jobs: list[Future[None]] = []
        self._arrival = Arrival(0, max(edges[-1], most), partial(_wake, self._waiting))
        self._ask(edges, submit)

    def ask_for_more(self, stop: int, submit: Submit) -> None:
        """Ask for the bytes before `stop` as well, as far as there is room for them."""
        stop = min(stop, self._most)
        if stop > self.stop:
            self._ask([*range(self.stop, stop, MAX_REQUEST_BYTES), stop], submit)

    def part(self, start: int, stop: int, told: Callable[[Arrival], None]) -> Arrival:
        """An arrival of bytes before `stop` of this front, which take no memory of their own; see `pass_on`."""
        return Arrival(start, stop, told, within=self._arrival)

    async def pass_on(self, arrival: Arrival) -> None:
        """Have another arrival hold what is here of the bytes that it is to hold, as it comes.

        Raises:
            As `RangeReader.fetch`.
        """
        at, stop = arrival.start, min(arrival.stop, self.stop)
        while at < stop and (here := min(stop, await self._behind(at))) > at:
            arrival.size = self._arrival.size
            if arrival.within is self._arrival:
                arrival.reach(arrival.start, here)
            else:
                arrival.put(arrival.start, at, self._arrival.between(at, here))
            at = here

    def _ask(self, edges: Sequence[int], submit: Submit) -> None:
        self.stop = edges[-1]
        for edge in itertools.pairwise(edges):
            self._jobs.append(submit(self._arrival, *edge))
            self._jobs[-1].add_done_callback(partial(_wake, self._waiting))

    async def _behind(self, at: int) -> int:
        """Where the first byte is missing, as soon as it is not the one at `at`; `at` if the object ends there."""
        while self._arrival.here <= at and not all(job.done() for job in self._jobs):
            more = asyncio.get_running_loop().create_future()
            self._waiting.append(more)
            await more
        if self._arrival.here <= at:
            for job in self._jobs:
                job.result()
        return self._arrival.here


def _wake(waiting: list[asyncio.Future[None]], _: object) -> None:
    while waiting:
        if not (future := waiting.pop()).done():
            future.set_result(None)


class _MoreError(Exception):
    """The head is longer than what was read of it."""

    def __init__(self, stop: int) -> None:
        self.stop = stop


async def read_head(fetch: Fetch, size: Callable[[], Awaitable[int]], parse: Callable[[ReadRange, int], T]) -> T:
    """Parse a head with as few requests as it takes: one, where the header is short and the store tells sizes.

    `parse` gets a function that reads ranges and the size of the object; its errors are passed on.
    """
    first = await fetch(0, FIRST_READ_BYTES)
    have = bytes(first.data)
    if len(have) < FIRST_READ_BYTES:
        total = len(have)
    else:
        total = await size() if first.size is None else first.size

    def read(start: int, stop: int) -> bytes:
        if stop > len(have) and len(have) < total:
            raise _MoreError(stop)
        return have[start:stop]

    while True:
        try:
            return parse(read, total)
        except _MoreError as more:
            have += (await fetch(len(have), more.stop)).data
