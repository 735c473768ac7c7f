"""An open cache: the Anchor first, the Residual in the background while others work.

Nothing here decodes; nothing here imports torch.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import numpy as np
import numpy.typing as npt

from lynxkv.errors import BindingError, CacheNotFoundError, ChecksumError, FetchError, FormatError, TruncatedError
from lynxkv.fetch.disk_cache import DiskCache, ShardCopy
from lynxkv.fetch.head import Front, read_head
from lynxkv.fetch.options import FetchOptions
from lynxkv.fetch.ranges import Fetched, RangeReader
from lynxkv.fetch.scheduler import Lane, Scheduler
from lynxkv.fetch.stream import OpenedShard, SegmentPayload, SegmentRange, SegmentStream
from lynxkv.format.content import check_content
from lynxkv.format.document import ANCHOR_NAME
from lynxkv.format.index import Segment
from lynxkv.format.read import (
    FIRST_READ_BYTES,
    ReadRange,
    ShardHead,
    open_segment,
    read_anchor_head,
    read_residual_head,
)
from lynxkv.layout import CacheHeader, ResidualRef
from lynxkv.store import Link, Store, Url
from lynxkv.store.transport import transport_for

U8 = npt.NDArray[np.uint8]
T = TypeVar("T")

# Pieces of FIRST_READ_BYTES that are asked for when a remote cache is opened, before its layout is known: on a link of
# 200 Mbit/s and 20 ms they cover the round trip that would pass until the first segments can be asked for.
AHEAD = 4


class CacheReader:
    """An open cache: its header has been read and checked, nothing else. Close it, or use it in a `with` block."""

    def __init__(
        self, url: Url, *, link: Link | None = None, options: FetchOptions | None = None, header_only: bool = False
    ) -> None:
        self.opened_at = time.perf_counter()
        self.store = Store(url)
        self.url = self.store.url
        self.options = options or FetchOptions()
        self._header_only = header_only
        # Of shards on other machines, on this one's disk.
        self._disk: DiskCache | None = None
        self._copies: dict[str, ShardCopy] = {}
        self._scheduler = Scheduler(self.options.concurrency, what=self.url)
        transport = transport_for(self.store, self.options.transport, self._scheduler.workers)
        self._ranges = self._residual_ranges = RangeReader(self.url, transport, self.options, link)
        if self.options.residual_url is not None:
            store = Store.of_residuals(self.options.residual_url)
            transport = transport_for(store, self.options.transport, self._scheduler.workers)
            self._residual_ranges = RangeReader(store.url, transport, self.options, link)
        # Why the Residual could not be fetched, once that is known.
        self.residual_problem: str | None = None
        try:
            if self.options.cache_dir is not None and not header_only:
                self._disk = DiskCache(Path(self.options.cache_dir), self.options.cache_max_bytes)
            self._front = self._start_front(ANCHOR_NAME)
            self.header, self.anchor_head = self._scheduler.submit(Lane.ANCHOR, self._anchor_head).result()
        except BaseException:
            self.close()
            raise

    @property
    def bytes_anchor(self) -> int:
        """Size of the Anchor, header included."""
        return self.anchor_head.bytes

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
        return self._stream(ANCHOR_NAME, self.anchor_head, wanted)

    def stream_segments(self, name: str, head: ShardHead) -> SegmentStream:
        """All segments of one shard, whose head has been read, as the store has them."""
        return self._stream(name, head, head.segments, from_disk=False)

    def read(self, name: str, start: int, stop: int) -> bytes:
        """Bytes [start, stop) of a shard, unchecked.

        Raises:
            CacheNotFoundError, FetchError: the store cannot deliver them.
            StoreError: the reader is closed.
        """
        return bytes(self._submit_range(name, start, stop).result().data)

    def size(self, name: str) -> int:
        """The size of a shard as the store has it.

        Raises:
            CacheNotFoundError, FetchError: the store cannot tell.
            StoreError: the reader is closed.
        """
        return self._scheduler.submit(_lane(name), partial(self._ranges_of(name).size, name)).result()

    def start_residual(self, *, exact: bool = False) -> SegmentStream:
        """Start to fetch the Residual: its head first, then its segments in file order, exact ones if asked for.

        Its requests wait for those of the Anchor.

        Raises:
            BindingError: the cache has none.
            StoreError: the reader is closed.
        """
        ref = self._residual()
        head = self._kept_residual_head(ref)
        front = self._start_front(ref.name) if head is None else None

        async def open_shard() -> OpenedShard:
            opened = head or await self._residual_head(ref.name, front)
            return opened, [item for item in opened.segments if exact or item.plan.part != "exact"]

        opened = self._scheduler.submit(Lane.RESIDUAL, open_shard)
        return self._stream_of(ref.name, opened, front)

    def read_residual_head(self) -> ShardHead:
        """Header and index of the Residual, as the store has them.

        Raises:
            CacheNotFoundError: the object is missing.
            FormatError: it is damaged, or belongs to another encode.
            StoreError: the reader is closed.
        """
        ref = self._residual()
        return self._scheduler.submit(Lane.RESIDUAL, partial(self._residual_head, ref.name, None)).result()

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
        """Stop reading: requests still in flight are cancelled, and streams say that the reader is closed."""
        self._scheduler.close()
        self._ranges.transport.close()
        self._residual_ranges.transport.close()
        if self._disk is not None:
            self._disk.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _residual(self) -> ResidualRef:
        if self.header.residual is None:
            raise BindingError(f"{self.url} has no Residual")
        return self.header.residual

    def _one(self, part: str) -> U8 | None:
        """The content of an array of one segment."""
        wanted = [item for item in self.anchor_head.segments if item.plan.part == part]
        for payload in self._stream(ANCHOR_NAME, self.anchor_head, wanted):
            check_content(self.header, payload.segment, payload.raw)
            return payload.raw
        return None

    def _stream(
        self, name: str, head: ShardHead, wanted: Sequence[Segment], *, from_disk: bool = True
    ) -> SegmentStream:
        self._scheduler.check_open()
        opened: Future[OpenedShard] = Future()
        opened.set_result((head, wanted))
        return self._stream_of(name, opened, self._front if name == ANCHOR_NAME else None, from_disk=from_disk)

    def _stream_of(
        self, name: str, opened: Future[OpenedShard], front: Front | None, *, from_disk: bool = True
    ) -> SegmentStream:
        def kept(segment: Segment) -> bool:
            return from_disk and name in self._copies and self._copies[name].holds(segment)

        submit = partial(self._submit_segments, name, front)
        return SegmentStream(opened, submit, concurrency=self.options.concurrency, kept=kept)

    def _start_front(self, name: str) -> Front:
        """Ask for the first bytes of a shard whose head is not known yet."""
        ranges = self._ranges_of(name)
        ahead = ranges.transport.is_remote and not self._header_only
        if ahead and self._disk is not None and self._disk.has(f"{ranges.url}/{name}"):
            ahead = False  # the head will show whether the copy on disk is of the same content; mostly it is
        stop = (AHEAD if ahead else 1) * FIRST_READ_BYTES
        return Front([self._submit_range(name, at, at + FIRST_READ_BYTES) for at in range(0, stop, FIRST_READ_BYTES)])

    async def _anchor_head(self) -> tuple[CacheHeader, ShardHead]:
        parse = partial(read_anchor_head, what=f"{self.url}/{ANCHOR_NAME}")
        header, head = await self._read_head(ANCHOR_NAME, self._front, parse)
        if header.residual is not None:
            await self._residual_ranges.transport.keep(header.residual.name)
        if (copy := await self._scheduler.compute(self._copy, ANCHOR_NAME, head.header_sha256)) is not None:
            copy.expect(head)
        return header, head

    def _kept_residual_head(self, ref: ResidualRef) -> ShardHead | None:
        """The Residual's head from its copy on disk."""
        copy = self._copy(ref.name, ref.header_sha256)
        data = copy.head() if copy is not None else None
        if copy is None or data is None:
            return None
        try:
            head = self._parse_residual(ref.name, lambda start, stop: data[start:stop], ref.bytes)
        except FormatError:
            copy.drop()
            return None
        return head if copy.expect(head) else None

    def _copy(self, name: str, header_sha256: str) -> ShardCopy | None:
        """The copy of a shard on disk, which may be empty; None if this reader, or this store, has none."""
        ranges = self._ranges_of(name)
        if self._disk is None or not ranges.transport.is_remote:
            return None
        if name not in self._copies:
            self._copies[name] = self._disk.copy(f"{ranges.url}/{name}", header_sha256)
        return self._copies[name]

    def _parse_residual(self, name: str, read: ReadRange, size: int) -> ShardHead:
        return read_residual_head(read, size, self.header, what=f"{self._residual_ranges.url}/{name}")

    async def _residual_head(self, name: str, front: Front | None) -> ShardHead:
        raw = bytearray()

        def parse(read: ReadRange, size: int) -> ShardHead:
            head = self._parse_residual(name, read, size)
            raw[:] = read(0, head.header_bytes + head.segments[0].offset)
            return head

        with self._noticing(name):
            try:
                head = await self._read_head(name, front, parse)
                copy = await self._scheduler.compute(self._copy, name, head.header_sha256)
                if copy is not None:
                    copy.expect(head)
                    copy.keep_head(raw)
                return head
            except CacheNotFoundError as error:
                hint = "encode the cache again; if its Residual is elsewhere, say where"
                where = self._residual_ranges.url
                raise CacheNotFoundError(f"{where}: the Residual {name} is missing", hint=hint) from error

    async def _read_head(self, name: str, front: Front | None, parse: Callable[[ReadRange, int], T]) -> T:
        ranges = self._ranges_of(name)
        size = partial(ranges.size, name)
        try:
            return await read_head(partial(self._fetch, name, front), size, parse)
        except FormatError:  # damaged on the way, perhaps
            return await read_head(partial(ranges.fetch, name), size, parse)

    async def _fetch(self, name: str, front: Front | None, start: int, stop: int) -> Fetched:
        """Bytes [start, stop) of a shard, those that have been asked for already from there."""
        ranges = self._ranges_of(name)
        if front is None or start >= front.stop:
            return await ranges.fetch(name, start, stop)
        first = await front.fetch(start, min(stop, front.stop))
        if stop <= front.stop or len(first.data) < front.stop - start:
            return first
        rest = await ranges.fetch(name, front.stop, stop)
        return Fetched(data=first.data + rest.data, size=first.size)

    def _submit_range(self, name: str, start: int, stop: int) -> Future[Fetched]:
        return self._scheduler.submit(_lane(name), partial(self._ranges_of(name).fetch, name, start, stop))

    def _submit_segments(self, name: str, front: Front | None, wanted: SegmentRange) -> Future[list[SegmentPayload]]:
        copy = self._copies.get(name)

        async def fetch_checked() -> list[SegmentPayload]:
            if copy is not None and wanted.kept:
                self._scheduler.give_way()
                try:
                    return await self._scheduler.compute(self._check_copy, copy, name, wanted)
                except (ChecksumError, TruncatedError):
                    copy.forget(wanted.segments)
            with self._noticing(name):
                payloads, data = await self._fetch_checked(name, front, wanted)
            if copy is not None:
                copy.keep(wanted.segments, data)
            return payloads

        return self._scheduler.submit(_lane(name), fetch_checked)

    async def _fetch_checked(
        self, name: str, front: Front | None, wanted: SegmentRange
    ) -> tuple[list[SegmentPayload], bytearray]:
        """What fails a check is fetched once more before giving up, and not from what came ahead."""
        try:
            fetched = await self._fetch(name, front, wanted.start, wanted.stop)
            self._scheduler.give_way()
            return await self._scheduler.compute(self._check, name, wanted, fetched.data), fetched.data
        except (ChecksumError, TruncatedError):
            fetched = await self._ranges_of(name).fetch(name, wanted.start, wanted.stop)
            return await self._scheduler.compute(self._check, name, wanted, fetched.data), fetched.data

    def _check_copy(self, copy: ShardCopy, name: str, wanted: SegmentRange) -> list[SegmentPayload]:
        return self._check(name, wanted, copy.read(wanted.start, wanted.stop))

    def _check(self, name: str, wanted: SegmentRange, fetched: bytes | bytearray) -> list[SegmentPayload]:
        data, first = memoryview(fetched), wanted.segments[0].offset
        what = f"{self._ranges_of(name).url}/{name}"
        return [
            SegmentPayload(
                segment=segment,
                raw=open_segment(segment, data[segment.offset - first : segment.stop - first], what=what),
            )
            for segment in wanted.segments
        ]

    def _ranges_of(self, name: str) -> RangeReader:
        return self._ranges if name == ANCHOR_NAME else self._residual_ranges

    @contextmanager
    def _noticing(self, name: str) -> Iterator[None]:
        """Remember that the Residual could not be fetched."""
        try:
            yield
        except (CacheNotFoundError, FetchError) as error:
            if name != ANCHOR_NAME:
                self.residual_problem = error.message
            raise


def open_cache(url: Url, *, link: Link | None = None, options: FetchOptions | None = None) -> CacheReader:
    """Open the cache at `url`: reads and checks its header. `link` simulates a slower one.

    Raises:
        CacheNotFoundError: there is no cache.
        FetchError: the store cannot be read.
        FormatError: what is there is damaged or not a cache.
        InputError: the URL does not end in `.lynx`, or its scheme is unknown.
    """
    return CacheReader(url, link=link, options=options)


@asynccontextmanager
async def open_cache_async(
    url: Url, *, link: Link | None = None, options: FetchOptions | None = None
) -> AsyncIterator[CacheReader]:
    """`open_cache` for event loops: `async with open_cache_async(url) as reader`, then `async for` over its streams.

    Leaving, or being cancelled, ends all requests. What a reader has beside streams blocks; `asyncio.to_thread` helps.

    Raises:
        As `open_cache`.
    """
    opening = asyncio.ensure_future(asyncio.to_thread(open_cache, url, link=link, options=options))
    try:
        reader = await asyncio.shield(opening)
    except asyncio.CancelledError:
        opening.add_done_callback(_close_opened)
        raise
    try:
        yield reader
    finally:
        await asyncio.shield(asyncio.to_thread(reader.close))


def _close_opened(opening: asyncio.Future[CacheReader]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()


def _lane(name: str) -> Lane:
    return Lane.ANCHOR if name == ANCHOR_NAME else Lane.RESIDUAL
