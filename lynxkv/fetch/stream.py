"""The segments of a shard: neighbours are read together, and come out in file order, each checked."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from lynxkv.fetch import options
from lynxkv.fetch.waiting import result_of
from lynxkv.format.index import ZSTD, Segment

U8 = npt.NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True)
class SegmentPayload:
    """A checked segment and its raw bytes; `span` counts the caches that are loaded as one."""

    segment: Segment
    raw: U8
    span: int = 0


@dataclass(frozen=True, kw_only=True)
class SegmentRange:
    """Neighbouring segments of a shard, all `kept` on disk or none; `start` and `stop` count from the beginning of the
    object.
    """

    span: int
    shard: str
    start: int
    stop: int
    segments: tuple[Segment, ...]
    kept: bool

    @cached_property
    def groups(self) -> list[tuple[Segment, ...]]:
        """Its segments, those together that are handed on together."""
        groups, group = [], list[Segment]()
        for segment in self.segments:
            group.append(segment)
            if segment.stop - group[0].offset >= options.GROUP_BYTES:
                groups.append(tuple(group))
                group = []
        return [*groups, tuple(group)] if group else groups


Wanted = Future[list[SegmentRange] | None]
"""Ranges that will be known, None if there are none any more."""


class SegmentStream:
    """Segments in the order of their ranges, fetched ahead.

    `ready()` never blocks, `wait()` and iterating do; all raise what went wrong with the next segment: `FetchError`,
    `CacheNotFoundError`, a `FormatError`, or a `StoreError` if the reader was closed. `async for` works as well, on any
    event loop. `bytes_done` counts stored bytes handed out, of `bytes_total`: None until the ranges are known.

    Args:
        wanted: the ranges.
        submit: asks for one; its groups come one after the other.
        more: what comes after them, where a chain is still being written: called once they are known, and after each
            further batch; None if that was the last.
    """

    def __init__(
        self,
        wanted: Wanted,
        submit: Callable[[SegmentRange], list[Future[list[SegmentPayload]]]],
        more: Callable[[], Wanted | None] = lambda: None,
    ) -> None:
        self._submit, self._more = submit, more
        self._wanted: Wanted | None = wanted
        self._waiting: deque[SegmentRange] = deque()
        self._in_flight: deque[tuple[int, Future[list[SegmentPayload]]]] = deque()  # with what each may take
        self._window = 0
        self._lock = threading.Lock()
        self._missing: int | None = None  # groups that have not arrived; None until they are known
        self._when_ready: list[Callable[[], None]] = []
        self.bytes_done = 0
        self.bytes_total: int | None = None
        self._learn()  # what is known to be wanted is asked for at once

    @property
    def done(self) -> bool:
        """Whether every segment has been handed out."""
        return self._wanted is None and not self._waiting and not self._in_flight

    @property
    def bytes_in_flight(self) -> int:
        """Memory that segments asked for and not handed out yet may take."""
        return self._window

    @property
    def waits_for_more(self) -> bool:
        """Whether all that is known to be wanted has been handed out, and more may come."""
        return self._wanted is not None and not self._waiting and not self._in_flight

    @property
    def pending(self) -> Future[Any] | None:
        """What brings the next segments, or tells of them; None when all have been handed out."""
        return self._in_flight[0][1] if self._in_flight else self._wanted

    def ready(self) -> list[SegmentPayload]:
        """The next segments, as far as they have arrived."""
        out: list[SegmentPayload] = []
        self._learn()
        while self._next_arrived():
            out.extend(self._take())
        return out

    def __iter__(self) -> Iterator[SegmentPayload]:
        while not self.done:
            yield from self._take()

    async def __aiter__(self) -> AsyncIterator[SegmentPayload]:
        while not self.done:
            future = self.pending
            assert future is not None
            # Whoever stops to wait does not take back what has been asked for; closing does.
            await asyncio.shield(asyncio.wrap_future(future))
            for payload in self._take():
                yield payload

    def on_ready(self, callback: Callable[[], None]) -> None:
        """Call back once all segments have arrived and been checked, on a thread of the loader; never if one fails.

        As memory for segments is bounded, the last ones only arrive when most have been taken.
        """
        with self._lock:
            if self._missing != 0 or self._wanted is not None:
                self._when_ready.append(callback)
                return
        callback()

    def wait(self) -> list[SegmentPayload]:
        """The next segments, waiting until there are some; none when all have been handed out."""
        out: list[SegmentPayload] = []
        while not out and not self.done:
            out = self._take()
        return out

    def close(self) -> None:
        """Forget what has not been asked for. What is in flight ends by itself, or when the reader is closed."""
        if self._wanted is not None:
            self._wanted.cancel()
        for _, future in self._in_flight:
            future.cancel()
        self._wanted = None
        self._waiting.clear()
        self._in_flight.clear()
        self._window = 0

    def _next_arrived(self) -> bool:
        return self.pending is not None and self.pending.done()

    def _learn(self) -> None:
        """Take in which ranges are wanted, as far as that is known; errors are for whoever takes what comes next."""
        while self._wanted is not None and self._wanted.done() and not self._wanted.exception():
            wanted = self._wanted.result()
            self._wanted = self._more() if wanted is not None else None
            self._waiting.extend(wanted or ())
            new = wanted or []
            self.bytes_total = (self.bytes_total or 0) + sum(s.stored_bytes for each in new for s in each.segments)
            with self._lock:
                self._missing = (self._missing or 0) + sum(len(each.groups) for each in new)
            self._fill()
        if self._wanted is None and self._missing == 0:
            self._call_back()

    def _take(self) -> list[SegmentPayload]:
        self._learn()
        if not self._in_flight:
            if self._wanted is not None:
                result_of(self._wanted)
            return []
        memory_bytes, future = self._in_flight[0]
        payloads = result_of(future)
        self._in_flight.popleft()
        self._window -= memory_bytes
        self.bytes_done += sum(item.segment.stored_bytes for item in payloads)
        self._fill()
        self._learn()
        return payloads

    def _fill(self) -> None:
        while self._waiting and (self._window < options.WINDOW_BYTES or not self._in_flight):
            wanted = self._waiting[0]
            futures = self._submit(wanted)
            self._waiting.popleft()
            for group, future in zip(wanted.groups, futures, strict=True):
                memory_bytes = sum(map(_memory_bytes, group))
                self._in_flight.append((memory_bytes, future))
                self._window += memory_bytes
                future.add_done_callback(self._arrived)

    def _arrived(self, future: Future[list[SegmentPayload]]) -> None:
        if future.cancelled() or future.exception() is not None:
            return
        with self._lock:
            assert self._missing is not None
            self._missing -= 1
            if self._missing or self._wanted is not None:
                return
        self._call_back()

    def _call_back(self) -> None:
        with self._lock:
            callbacks, self._when_ready = self._when_ready, []
        for callback in callbacks:
            callback()


def ranges(
    segments: Sequence[Segment],
    header_bytes: int,
    concurrency: int,
    kept: Callable[[Segment], bool],
    *,
    span: int,
    shard: str,
) -> Iterator[SegmentRange]:
    """Runs of neighbouring segments of about `RANGE_BYTES`, smaller as fewer bytes are left for all connections.

    A run holds either segments that are `kept` on this machine, or others. Where segments between are not wanted, a run
    ends, unless they take less than a request of its own costs.
    """
    run: list[Segment] = []
    run_kept, run_memory = False, 0
    left = sum(segment.stored_bytes for segment in segments)

    def whole() -> SegmentRange:
        start, stop = header_bytes + run[0].offset, header_bytes + run[-1].stop
        return SegmentRange(span=span, shard=shard, start=start, stop=stop, segments=tuple(run), kept=run_kept)

    for segment in segments:
        here, memory = kept(segment), _memory_bytes(segment)
        if run:
            target = min(options.RANGE_BYTES, max(options.LAST_RANGE_BYTES, left // concurrency))
            apart = here != run_kept or segment.offset - run[-1].stop > options.GAP_BYTES
            if apart or segment.stop - run[0].offset > target or run_memory + memory > options.WINDOW_BYTES:
                yield whole()
                left -= sum(item.stored_bytes for item in run)
                run, run_memory = [], 0
        run_kept = here
        run_memory += memory
        run.append(segment)
    if run:
        yield whole()


def _memory_bytes(segment: Segment) -> int:
    """What a segment takes when it is checked: as it is stored, and beside that what it expands to."""
    return segment.stored_bytes + (segment.raw_bytes if segment.compression == ZSTD else 0)
