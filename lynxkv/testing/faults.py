"""A transport that fails the way networks and servers do, the same way each time for one seed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

from lynxkv.store.transport import Answer, Transport

Fault = Literal["refused", "missing_answer", "cut", "stall", "corrupt", "overloaded"]
FAULTS: tuple[Fault, ...] = get_args(Fault)


class OverloadedError(OSError):
    """What a server says that has too much to do."""

    status = 503


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request that was made."""

    name: str
    start: int
    stop: int


class FaultyTransport:
    """Another transport, some of whose answers go wrong.

    refused         the connection is reset before anything arrives
    missing_answer  nothing arrives, and nothing ends it
    cut             the answer ends after some of its bytes, without an error
    stall           the same, but it does not end
    corrupt         one bit is wrong
    overloaded      the server answers 503

    Args:
        share: of the requests, by chance.
        faults: what goes wrong, one of these each time.
        only: names of objects whose requests may go wrong start with this.
        skip: so many requests are answered well first.
        limit: so many go wrong at most.
    """

    def __init__(
        self,
        inner: Transport,
        *,
        share: float,
        seed: int = 0,
        faults: tuple[Fault, ...] = FAULTS,
        only: str = "",
        skip: int = 0,
        limit: int | None = None,
    ) -> None:
        self.inner, self.share, self.faults = inner, share, faults
        self.only, self.skip, self.limit = only, skip, limit
        self.is_remote = inner.is_remote
        self.requests: list[Request] = []
        self.injected: list[Fault] = []
        self._random = random.Random(seed)

    @asynccontextmanager
    async def get(self, name: str, start: int, stop: int) -> AsyncIterator[Answer]:
        """The answer of the other transport, or what happens to it."""
        self.requests.append(Request(name=name, start=start, stop=stop))
        fault = self._draw(name)
        if fault == "refused":
            raise ConnectionResetError("connection reset by peer (injected)")
        if fault == "overloaded":
            raise OverloadedError("503 Slow Down (injected)")
        if fault == "missing_answer":
            await asyncio.Event().wait()
        async with self.inner.get(name, start, stop) as answer:
            yield answer if fault is None else Answer(chunks=self._spoil(answer.chunks, fault), size=answer.size)

    async def size(self, name: str) -> int:
        """As the other transport says."""
        return await self.inner.size(name)

    async def keep(self, name: str) -> None:
        """As the other transport does."""
        await self.inner.keep(name)

    def close(self) -> None:
        """Close the other transport."""
        self.inner.close()

    def _draw(self, name: str) -> Fault | None:
        if len(self.requests) <= self.skip or not name.startswith(self.only):
            return None
        if self.limit is not None and len(self.injected) >= self.limit:
            return None
        if self._random.random() >= self.share:
            return None
        self.injected.append(self._random.choice(self.faults))
        return self.injected[-1]

    async def _spoil(self, chunks: AsyncIterator[Any], fault: Fault) -> AsyncIterator[bytes]:
        data = b"".join([bytes(chunk) async for chunk in chunks])
        if fault == "corrupt":
            if data:
                at = self._random.randrange(len(data))
                data = data[:at] + bytes([data[at] ^ 1 << self._random.randrange(8)]) + data[at + 1 :]
            yield data
            return
        yield data[: self._random.randrange(len(data) + 1)]
        if fault == "stall":
            await asyncio.Event().wait()
