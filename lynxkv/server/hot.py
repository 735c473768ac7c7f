"""Caches that were used lately, kept in memory as they are stored, up to a bound.

A transport writes down what it brings. When a run has ended well all of it has passed its checks, and it serves the
next readers of that cache. What a run was not content with is dropped, and so is what was replaced in its store; what
was being read meanwhile is then not kept either.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from lynxkv.store import Store
from lynxkv.store.transport import Answer, Transport, chunks_of, transport_for

# Where nothing tells that a cache was replaced, its bytes are not believed for longer.
MOST_S = 600.0


@dataclass(kw_only=True)
class _Object:
    """What is known of one object: its bytes where they are `known`, as ranges in order, and its size."""

    data: bytearray = field(default_factory=bytearray)
    known: list[tuple[int, int]] = field(default_factory=list)
    size: int | None = None

    def write(self, start: int, data: bytes | bytearray) -> None:
        """Know these bytes, whatever was known in their place: what is asked for again had failed its check."""
        stop = start + len(data)
        self.data.extend(bytes(max(0, stop - len(self.data))))
        self.data[start:stop] = data
        apart = [place for place in self.known if place[1] < start or stop < place[0]]
        joined = [(start, stop), *(place for place in self.known if place not in apart)]
        self.known = sorted([*apart, (min(joined)[0], max(place[1] for place in joined))])

    def read(self, start: int, stop: int) -> bytes | None:
        """Bytes [start, stop), less only where the object ends; None if they are not all known."""
        stop = stop if self.size is None else min(stop, self.size)
        if any(first <= start and stop <= last for first, last in self.known):
            return bytes(self.data[start:stop])
        return None


class Generation:
    """What a cache was like from one `drop` to the next: readings of one generation may be of the same bytes."""


class RecordingTransport:
    """Another transport, whose bytes are written down, or come from what is `known` by then where they are there."""

    def __init__(
        self, inner: Transport, known: Callable[[], dict[str, _Object]], most_bytes: int, generation: Generation
    ) -> None:
        self._inner, self._known, self._most_bytes = inner, known, most_bytes
        self.generation = generation
        self.is_remote = inner.is_remote
        self.written: dict[str, _Object] = {}
        self.written_bytes = 0

    @property
    def known(self) -> dict[str, _Object]:
        """What is in memory of the cache."""
        return self._known()

    @asynccontextmanager
    async def get(self, name: str, start: int, stop: int) -> AsyncIterator[Answer]:
        """From memory, or from the other transport."""
        own = self.known.get(name)
        data = own.read(start, stop) if own is not None else None
        if own is not None and data is not None:
            yield Answer(chunks=chunks_of(data), size=own.size)
            return
        async with self._inner.get(name, start, stop) as answer:
            yield Answer(chunks=self._writing(name, start, answer), size=answer.size)

    async def size(self, name: str) -> int:
        """From memory, or as the other transport says."""
        own = self.known.get(name)
        return own.size if own is not None and own.size is not None else await self._inner.size(name)

    async def keep(self, name: str) -> None:
        """As the other transport does."""
        await self._inner.keep(name)

    def close(self) -> None:
        """Close the other transport."""
        self._inner.close()

    async def _writing(self, name: str, start: int, answer: Answer) -> AsyncIterator[Any]:
        arrived = bytearray()
        async for chunk in answer.chunks:
            arrived += chunk
            yield chunk
        self.written_bytes += len(arrived)
        if self.written_bytes > self._most_bytes:
            self.written.clear()
            return
        item = self.written.setdefault(name, _Object())
        item.size = item.size if answer.size is None else answer.size
        if arrived:
            item.write(start, arrived)


@dataclass(frozen=True, kw_only=True)
class _Hot:
    objects: dict[str, _Object]
    bytes: int
    kept_at: float


class HotCaches:
    """Up to `limit` bytes of caches, the least lately used dropped first. Used on one event loop, where nothing else is
    said.

    Attributes:
        hits, misses: opened caches that were here, and that were not.
    """

    def __init__(self, limit: int, workers: Executor) -> None:
        self._limit, self._workers = limit, workers
        self._kept: OrderedDict[str, _Hot] = OrderedDict()
        # Of caches that are being read; readings that a `drop` has left behind hold one that is not here.
        self._generations: WeakValueDictionary[str, Generation] = WeakValueDictionary()
        # Caches are opened on other threads, and dropped meanwhile.
        self._lock = threading.RLock()
        self.hits = self.misses = 0

    @property
    def bytes(self) -> int:
        """Bytes of all that is kept."""
        with self._lock:
            return sum(hot.bytes for hot in self._kept.values())

    def reading(self) -> HotReading:
        """The transports for one reading of a cache."""
        return HotReading(self)

    def transport(self, store: Store) -> RecordingTransport:
        """A transport for one reading of the cache at a store; of any thread."""
        url = store.url
        with self._lock:
            generation = self._generations.setdefault(url, Generation())
            hot = self._kept.get(url)
            if hot is not None and time.monotonic() - hot.kept_at > MOST_S:
                del self._kept[url]
                hot = None
            if hot is not None:
                self._kept.move_to_end(url)
            self.hits += hot is not None
            self.misses += hot is None
        # Files of this machine are in its memory already, as far as they fit.
        limit = 0 if store.is_local else self._limit
        inner = transport_for(store, "auto", self._workers)
        return RecordingTransport(inner, partial(self._objects, url), limit, generation)

    def has(self, url: str) -> bool:
        """Whether a cache is kept; of any thread."""
        return url in self._kept

    def keep(self, url: str, transport: RecordingTransport) -> None:
        """Keep what a transport brought, which has all passed its checks, unless the cache was dropped meanwhile."""
        if not transport.written:
            return
        known = transport.known
        objects = {**known, **transport.written}
        for name in known.keys() & transport.written.keys():
            # Readers that are under way have the old one.
            objects[name] = replace(known[name], data=known[name].data[:])
            for start, stop in transport.written[name].known:
                objects[name].write(start, transport.written[name].data[start:stop])
        size = sum(len(item.data) for item in objects.values())
        with self._lock:
            if self._generations.get(url) is not transport.generation:
                return
            self._kept.pop(url, None)
            if size > self._limit:
                return
            self._kept[url] = _Hot(objects=objects, bytes=size, kept_at=time.monotonic())
            while self.bytes > self._limit:
                self._kept.popitem(last=False)

    def drop(self, url: str) -> None:
        """Forget a cache, if it is here, and keep nothing of what is being read of it."""
        with self._lock:
            self._generations.pop(url, None)
            self._kept.pop(url, None)

    def _objects(self, url: str) -> dict[str, _Object]:
        hot = self._kept.get(url)
        return {} if hot is None else hot.objects


class HotReading:
    """The transports for one reading of a cache, and of those that it continues: a function that makes them."""

    def __init__(self, hot: HotCaches) -> None:
        self._hot, self._lock = hot, threading.Lock()
        self._transports: dict[str, RecordingTransport] = {}

    def __call__(self, store: Store) -> RecordingTransport:
        """A transport for one of the caches."""
        transport = self._hot.transport(store)
        with self._lock:
            self._transports[store.url] = transport
        return transport

    def is_here(self) -> bool:
        """Whether all that is read is in memory, or on this machine."""
        return all(self._hot.has(url) or not transport.is_remote for url, transport in self._transports.items())

    def keep(self) -> None:
        """Keep what has been read, which has all passed its checks."""
        for url, transport in self._transports.items():
            self._hot.keep(url, transport)

    def drop(self) -> None:
        """Forget what has been read, for it has not."""
        for url in self._transports:
            self._hot.drop(url)
