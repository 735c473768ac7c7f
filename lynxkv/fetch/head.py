"""The head of a shard, read when nobody knows yet how long it is."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

from lynxkv.fetch.ranges import Fetched
from lynxkv.format.read import FIRST_READ_BYTES, ReadRange

T = TypeVar("T")
Fetch = Callable[[int, int], Awaitable[Fetched]]
"""Fetches the bytes [start, stop) of the shard."""


class Front:
    """The first bytes of a shard, in pieces that are all asked for at once.

    The first piece usually brings header and index; the others keep the link busy while those are read. Where the
    object ends, pieces are short or empty.
    """

    def __init__(self, pieces: Sequence[Future[Fetched]]) -> None:
        self._pieces = pieces
        self.stop = FIRST_READ_BYTES * len(pieces)

    async def fetch(self, start: int, stop: int) -> Fetched:
        """Bytes [start, stop) of the shard, `stop` being at most `self.stop`."""
        data, size = bytearray(), None
        for number in range(start // FIRST_READ_BYTES, -(-stop // FIRST_READ_BYTES)):
            piece = await asyncio.wrap_future(self._pieces[number])
            at = number * FIRST_READ_BYTES
            data += memoryview(piece.data)[max(0, start - at) : stop - at]
            size = piece.size if size is None else size
        return Fetched(data=data, size=size)


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
