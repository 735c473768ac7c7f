"""From a store to checked segments: the Anchor first, the Residual in the background while others work.

Neighbouring segments are read together in ranges of about 1 MiB, several in flight, and come out in file order, each
checked before anybody sees it. Nothing here decodes; nothing here imports torch.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TypeVar

import numpy as np
import numpy.typing as npt

from lynxkv.errors import BindingError, CacheNotFoundError, ChecksumError, FetchError, StoreError, TruncatedError
from lynxkv.format.content import check_content
from lynxkv.format.document import ANCHOR_NAME
from lynxkv.format.index import Segment
from lynxkv.format.read import ShardHead, open_segment, read_anchor_head, read_residual_head
from lynxkv.store import Link, Store, Url

U8 = npt.NDArray[np.uint8]
T = TypeVar("T")

RANGE_BYTES = 1 << 20
CONCURRENCY = 8
WINDOW_BYTES = 64 << 20
ATTEMPTS = 3


@dataclass(frozen=True, kw_only=True)
class SegmentPayload:
    """A checked segment and its raw bytes."""

    segment: Segment
    raw: U8


@dataclass(frozen=True, kw_only=True)
class _Range:
    start: int
    stop: int
    segments: tuple[Segment, ...]

    @property
    def memory_bytes(self) -> int:
        """What it takes while in flight: a small frame may hold much."""
        return sum(map(_memory_bytes, self.segments))


class SegmentStream:
    """The segments of one shard in file order, fetched ahead by a pool.

    `ready()` never blocks, `wait()` and iterating do; all raise what went wrong with the next segment: `FetchError`,
    `CacheNotFoundError`, a `FormatError`, or a `StoreError` if the reader was closed. `bytes_done`
    counts stored bytes handed out.
    """

    def __init__(
        self,
        open_head: Callable[[], tuple[ShardHead, Sequence[Segment]]],
        read: Callable[[int, int], bytes],
        pool: ThreadPoolExecutor,
        *,
        what: str,
    ) -> None:
        self._read = read
        self._pool = pool
        self._what = what
        self._head: Future[tuple[ShardHead, Sequence[Segment]]] | None = pool.submit(open_head)
        self._header_bytes = 0
        self._waiting: deque[_Range] = deque()
        self._in_flight: deque[tuple[_Range, Future[list[SegmentPayload]]]] = deque()
        self._window = 0
        self.bytes_done = 0

    @property
    def done(self) -> bool:
        """Whether every segment has been handed out."""
        return self._head is None and not self._waiting and not self._in_flight

    @property
    def bytes_in_flight(self) -> int:
        """Memory that segments asked for and not handed out yet may take."""
        return self._window

    def ready(self) -> list[SegmentPayload]:
        """The next segments, as far as they have arrived."""
        out: list[SegmentPayload] = []
        while self._next_arrived():
            out.extend(self._take())
        return out

    def __iter__(self) -> Iterator[SegmentPayload]:
        while not self.done:
            yield from self._take()

    def wait(self) -> list[SegmentPayload]:
        """The next segments, waiting until there are some; none when all have been handed out."""
        out: list[SegmentPayload] = []
        while not out and not self.done:
            out = self._take()
        return out

    def close(self) -> None:
        """Forget what has not been asked for. What is in flight ends by itself."""
        if self._head is not None:
            self._head.cancel()
        for _, future in self._in_flight:
            future.cancel()
        self._head = None
        self._waiting.clear()
        self._in_flight.clear()

    def _next_arrived(self) -> bool:
        if self._head is not None:
            return self._head.done()
        return bool(self._in_flight) and self._in_flight[0][1].done()

    def _take(self) -> list[SegmentPayload]:
        if self._head is not None:
            head, segments = self._result(self._head)
            self._head = None
            self._header_bytes = head.header_bytes
            self._waiting = deque(_ranges(segments))
            self._fill()
            return []
        done, future = self._in_flight[0]
        payloads = self._result(future)
        self._in_flight.popleft()
        self._window -= done.memory_bytes
        self.bytes_done += sum(item.segment.stored_bytes for item in payloads)
        self._fill()
        return payloads

    def _fill(self) -> None:
        while self._waiting and (self._window < WINDOW_BYTES or not self._in_flight):
            wanted = self._waiting.popleft()
            self._window += wanted.memory_bytes
            try:
                future = self._pool.submit(self._fetch, wanted)
            except RuntimeError as error:  # the pool has been shut down
                raise _closed(self._what) from error
            self._in_flight.append((wanted, future))

    def _result(self, future: Future[T]) -> T:
        try:
            return future.result()
        except CancelledError as error:
            raise _closed(self._what) from error

    def _fetch(self, wanted: _Range) -> list[SegmentPayload]:
        """Read a range and check its segments; what fails a check is read once more before giving up."""
        try:
            return self._read_checked(wanted)
        except (ChecksumError, TruncatedError):
            return self._read_checked(wanted)

    def _read_checked(self, wanted: _Range) -> list[SegmentPayload]:
        data = memoryview(self._read(self._header_bytes + wanted.start, self._header_bytes + wanted.stop))
        return [
            SegmentPayload(
                segment=segment,
                raw=open_segment(
                    segment,
                    data[segment.offset - wanted.start : segment.stop - wanted.start],
                    what=self._what,
                ),
            )
            for segment in wanted.segments
        ]


class CacheReader:
    """An open cache: its header has been read and checked, nothing else. Close it, or use it in a `with` block."""

    def __init__(self, url: Url, *, link: Link | None = None) -> None:
        self.opened_at = time.perf_counter()
        self.store = Store(url, link=link)
        self.url = self.store.url
        self._what = f"{self.url}/{ANCHOR_NAME}"
        self._anchor_size = _with_retries(lambda: self.store.size(ANCHOR_NAME))
        self.header, self.anchor_head = read_anchor_head(self._reader(ANCHOR_NAME), self._anchor_size, what=self._what)
        self._pool = ThreadPoolExecutor(CONCURRENCY, thread_name_prefix="lynxkv-fetch")

    @property
    def bytes_anchor(self) -> int:
        """Size of the Anchor, header included."""
        return self._anchor_size

    @property
    def bytes_residual(self) -> int:
        """Bytes of the Residual that lead to full precision; 0 if the cache has none."""
        return self.header.residual.bytes - self.header.residual.exact_bytes if self.header.residual else 0

    @property
    def bytes_exact(self) -> int:
        """Bytes of the Residual that lead on to the original; 0 if the cache has none."""
        return self.header.residual.exact_bytes if self.header.residual else 0

    def stream_anchor(self) -> SegmentStream:
        """All segments of the Anchor but the token ids, in file order."""
        wanted = [item for item in self.anchor_head.segments if item.plan.part not in ("token_ids", "prefix", "logits")]
        return self._stream(ANCHOR_NAME, lambda: (self.anchor_head, wanted))

    def stream_segments(self, name: str, head: ShardHead) -> SegmentStream:
        """All segments of one shard, whose head has been read."""
        return self._stream(name, lambda: (head, head.segments))

    def read(self, name: str, start: int, stop: int) -> bytes:
        """Bytes [start, stop) of a shard, unchecked.

        Raises:
            CacheNotFoundError, FetchError: the store cannot deliver them.
            StoreError: the reader is closed.
        """
        self._check_open()
        return _with_retries(lambda: self.store.read(name, start, stop))

    def start_residual(self, *, exact: bool = False) -> SegmentStream:
        """Start to fetch the Residual: its head first, then its segments in file order, exact ones if asked for.

        Raises:
            BindingError: the cache has none.
        """
        if self.header.residual is None:
            raise BindingError(f"{self.url} has no Residual")
        name = self.header.residual.name

        def open_head() -> tuple[ShardHead, Sequence[Segment]]:
            head = self.read_residual_head()
            return head, [item for item in head.segments if exact or item.plan.part != "exact"]

        return self._stream(name, open_head)

    def read_residual_head(self) -> ShardHead:
        """Header and index of the Residual.

        Raises:
            CacheNotFoundError: the object is missing.
            FormatError: it is damaged, or belongs to another encode.
        """
        ref = self.header.residual
        if ref is None:
            raise BindingError(f"{self.url} has no Residual")
        try:
            size = _with_retries(lambda: self.store.size(ref.name))
        except CacheNotFoundError as error:
            raise CacheNotFoundError(
                f"{self.url}: the Residual {ref.name} is missing", hint="encode the cache again"
            ) from error
        return read_residual_head(self._reader(ref.name), size, self.header, what=f"{self.url}/{ref.name}")

    def token_ids(self) -> npt.NDArray[np.uint32] | None:
        """The token ids [T], or None if the cache does not store them."""
        raw = self._one("token_ids")
        return None if raw is None else raw.view("<u4")

    def logits(self) -> npt.NDArray[np.float32] | None:
        """The logits [V] after the last token, or None if the cache does not store them."""
        raw = self._one("logits")
        return None if raw is None else raw.view("<f4")

    def prefix_sha256(self) -> U8 | None:
        """The digests [blocks, 32] of the prefix blocks, or None if the cache has none."""
        raw = self._one("prefix")
        return None if raw is None else raw.reshape(-1, 32)

    def close(self) -> None:
        """Stop reading; waits for nothing."""
        self.store.closing.set()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _one(self, part: str) -> U8 | None:
        """The content of an array of one segment."""
        wanted = [item for item in self.anchor_head.segments if item.plan.part == part]
        for payload in self._stream(ANCHOR_NAME, lambda: (self.anchor_head, wanted)):
            check_content(self.header, payload.segment, payload.raw)
            return payload.raw
        return None

    def _stream(self, name: str, open_head: Callable[[], tuple[ShardHead, Sequence[Segment]]]) -> SegmentStream:
        self._check_open()
        return SegmentStream(open_head, self._reader(name), self._pool, what=f"{self.url}/{name}")

    def _check_open(self) -> None:
        if self.store.closing.is_set():
            raise _closed(self.url)

    def _reader(self, name: str) -> Callable[[int, int], bytes]:
        return lambda start, stop: self.read(name, start, stop)


def open_cache(url: Url, *, link: Link | None = None) -> CacheReader:
    """Open the cache at `url`: reads and checks its header. `link` simulates a slower one.

    Raises:
        CacheNotFoundError: there is no cache.
        FetchError: the store cannot be read.
        FormatError: what is there is damaged or not a cache.
        InputError: the URL does not end in `.lynx`, or its scheme is unknown.
    """
    return CacheReader(url, link=link)


def _closed(what: str) -> StoreError:
    return StoreError(f"{what}: the reader is closed", hint="read inside the `with` block of lynxkv.open")


def _memory_bytes(segment: Segment) -> int:
    return max(segment.stored_bytes, segment.raw_bytes)


def _raw_bytes(run: Sequence[Segment]) -> int:
    return sum(map(_memory_bytes, run))


def _ranges(segments: Sequence[Segment]) -> Iterator[_Range]:
    """Runs of neighbouring segments of about RANGE_BYTES."""
    run: list[Segment] = []
    for segment in segments:
        if run and (segment.stop - run[0].offset > RANGE_BYTES or _raw_bytes(run) + segment.raw_bytes > WINDOW_BYTES):
            yield _Range(start=run[0].offset, stop=run[-1].stop, segments=tuple(run))
            run = []
        run.append(segment)
    if run:
        yield _Range(start=run[0].offset, stop=run[-1].stop, segments=tuple(run))


def _with_retries(action: Callable[[], T]) -> T:
    for attempt in range(ATTEMPTS - 1):
        try:
            return action()
        except FetchError:
            time.sleep(0.1 * 2**attempt)
    return action()
