"""Readers whose Residual arrives when a test says so, and not when a clock does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lynxkv.errors import FetchError
from lynxkv.fetch import CacheReader, SegmentPayload


class ScriptedReader(CacheReader):
    """Reads a real cache, but its Residual arrives in steps.

    Each call of `ready()` delivers the next number of segments in `arrivals`, none after the list has run out; what is
    left comes, one by one, when it is waited for. With `fail_after`, the stream fails after that many segments.
    """

    def __init__(self, url: str, *, arrivals: list[int] | None = None, fail_after: int | None = None) -> None:
        super().__init__(url)
        self.arrivals = arrivals or []
        self.fail_after = fail_after

    def start_residual(self, *, exact: bool = False) -> Any:
        """A stream with the interface of `SegmentStream`."""
        return _ScriptedStream(list(super().start_residual(exact=exact)), self.arrivals, self.fail_after)


class _ScriptedStream:
    def __init__(self, payloads: list[SegmentPayload], arrivals: list[int], fail_after: int | None) -> None:
        self._payloads = payloads
        self._arrivals = list(arrivals)
        self._fail_after = fail_after
        self._next = 0
        self.bytes_done = 0
        self.closed = False

    @property
    def done(self) -> bool:
        return self._next == len(self._payloads)

    @property
    def bytes_in_flight(self) -> int:
        return sum(payload.segment.stored_bytes for payload in self._payloads[self._next :])

    def ready(self) -> list[SegmentPayload]:
        count = self._arrivals.pop(0) if self._arrivals else 0
        return [self._take() for _ in range(min(count, len(self._payloads) - self._next))]

    def wait(self) -> list[SegmentPayload]:
        return [] if self.done else [self._take()]

    def __iter__(self) -> Iterator[SegmentPayload]:
        while not self.done:
            yield self._take()

    def close(self) -> None:
        self.closed = True

    def _take(self) -> SegmentPayload:
        if self._next == self._fail_after:
            raise FetchError("the link is gone", hint="this is a test")
        payload = self._payloads[self._next]
        self._next += 1
        self.bytes_done += payload.segment.stored_bytes
        return payload
