"""The head of a shard, read when nobody knows yet how long it is."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from lynxkv.fetch.ranges import Arrival, Fetched
from lynxkv.format.read import FIRST_READ_BYTES, ReadRange

T = TypeVar("T")
Fetch = Callable[[int, int], Awaitable[Fetched]]
"""Fetches the bytes [start, stop) of the shard."""


class Front:
    """The first bytes of a shard, in pieces that are asked for at once, before anybody knows its layout.

    Header and index usually come with the first piece; the others keep link and server busy while those are read.

    Args:
        edges: where pieces start, and where the last one ends.
        submit: asks for one piece of what an `Arrival` is to hold, between these two bytes.
    """

    def __init__(self, edges: Sequence[int], submit: Callable[[Arrival, int, int], Future[None]]) -> None:
        self.stop = edges[-1]
        self._waiting: list[asyncio.Future[None]] = []
        wake = partial(_wake, self._waiting)
        self._arrival = Arrival(0, self.stop, wake)
        self._jobs = [submit(self._arrival, *edge) for edge in itertools.pairwise(edges)]
        for job in self._jobs:
            job.add_done_callback(wake)

    async def copy_into(self, arrival: Arrival) -> None:
        """Put what is here of the bytes that another arrival is to hold there, as it comes.

        Raises:
            As `RangeReader.fetch`.
        """
        at, stop = arrival.start, min(arrival.stop, self.stop)
        while at < stop and (here := min(stop, await self._behind(at))) > at:
            arrival.size = self._arrival.size
            arrival.put(arrival.start, at, self._arrival.between(at, here))
            at = here

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
