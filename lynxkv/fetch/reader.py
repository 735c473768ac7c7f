"""An open cache, or a chain of them: Anchors first, Residuals in the background while others work.

Nothing here decodes; nothing here imports torch.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Iterable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from lynxkv.errors import InputError
from lynxkv.fetch.chain import check_tokens, open_parent, wanted_parents
from lynxkv.fetch.disk_cache import DiskCache
from lynxkv.fetch.options import FetchOptions
from lynxkv.fetch.scheduler import Lane, Scheduler
from lynxkv.fetch.span import SpanReader, lane_of
from lynxkv.fetch.stream import SegmentPayload, SegmentRange, SegmentStream
from lynxkv.format.basis import Basis
from lynxkv.format.content import check_content
from lynxkv.format.document import ANCHOR_NAME
from lynxkv.format.read import ShardHead
from lynxkv.layout import CacheHeader, Extent, cut
from lynxkv.store import Link, Store, Url

U8 = npt.NDArray[np.uint8]


class CacheReader:
    """An open cache, with those that it continues: headers have been read and checked, nothing else.

    Close it, or use it in a `with` block.

    Args:
        tokens: load the first so many only.
        header_only: nothing but headers will be read, so nothing is asked for ahead.
        alone: leave caches that it continues alone: nothing of them is read.

    Attributes:
        header: of the cache that was named; those it continues have their own, in `extent`.
        extent: what is loaded, as one.
    """

    def __init__(
        self,
        url: Url,
        *,
        tokens: int | None = None,
        link: Link | None = None,
        options: FetchOptions | None = None,
        header_only: bool = False,
        alone: bool = False,
    ) -> None:
        self.opened_at = time.perf_counter()
        self.options = options or FetchOptions()
        self._link = link
        self._scheduler = Scheduler(self.options.concurrency, what=Store(url).url)
        self._disk: DiskCache | None = None
        self._opened: list[SpanReader] = []  # the named one first, those it continues after it
        try:
            if self.options.cache_dir is not None and not header_only:
                self._disk = DiskCache(Path(self.options.cache_dir), self.options.cache_max_bytes)
            # Of a token prefix, what comes next is perhaps not wanted.
            self._head = self._span(url, ahead=not header_only and tokens is None)
            self._scheduler.submit(Lane.ANCHOR, self._head.open).result()
            # What of its chain is loaded, first to last.
            self.spans = (
                (self._head,) if alone else self._open_chain(check_tokens(self.header, tokens), not header_only)
            )
        except BaseException:
            self.close()
            raise

    @property
    def url(self) -> str:
        return self._head.url

    @property
    def store(self) -> Store:
        return self._head.store

    @property
    def header(self) -> CacheHeader:
        return self._head.header

    @property
    def anchor_head(self) -> ShardHead:
        """Header and index of the Anchor of the cache that was named."""
        return self._head.anchor_head

    @property
    def extent(self) -> Extent:
        return Extent(spans=tuple(span.part for span in self.spans))

    @property
    def residual_problem(self) -> str | None:
        """Why a Residual could not be fetched, once that is known."""
        return next((span.residual_problem for span in self.spans if span.residual_problem is not None), None)

    @property
    def bytes_anchor(self) -> int:
        """Bytes of all Anchors, headers included; of a token prefix, those that are needed."""
        return sum(span.bytes_anchor for span in self.spans)

    @property
    def bytes_residual(self) -> int:
        """Bytes of all Residuals that lead to full precision; of a token prefix an estimate until they are opened."""
        return sum(span.bytes_residual for span in self.spans)

    @property
    def bytes_exact(self) -> int:
        """Bytes of all Residuals that lead on to the original; as `bytes_residual`."""
        return sum(span.bytes_exact for span in self.spans)

    def stream_anchor(self) -> SegmentStream:
        """What decoding needs of the Anchors, by layer; of each in file order."""
        return self._stream(_merged(span.anchor_ranges() for span in self.spans))

    def start_residual(self, *, exact: bool = False) -> SegmentStream:
        """Start to fetch the Residuals: heads first, then segments, keys before values and exact ones last, if asked
        for; of each in file order.

        Their requests wait for those of the Anchors.

        Raises:
            BindingError: no cache has one.
            StoreError: the reader is closed.
        """
        spans = [span for span in self.spans if span.header.residual is not None]
        if not spans:
            self._head.residual_ref()
        for span in spans:
            span.start_residual()

        async def open_shards() -> list[SegmentRange]:
            return _merged(await asyncio.gather(*(span.residual_ranges(exact=exact) for span in spans)))

        return SegmentStream(self._scheduler.submit(Lane.RESIDUAL, open_shards), self._submit)

    def stream_segments(self, name: str, head: ShardHead, span: SpanReader | None = None) -> SegmentStream:
        """All segments of a shard, whose head has been read, of one of `spans`, or of the cache that was named; as the
        store has them.
        """
        return self._stream((span or self._head).ranges_of(name, head, head.segments, from_disk=False))

    def read(self, name: str, start: int, stop: int) -> bytes:
        """Bytes [start, stop) of a shard of the cache that was named, unchecked.

        Raises:
            CacheNotFoundError, FetchError: the store cannot deliver them.
            StoreError: the reader is closed.
        """
        return bytes(self._head.submit_range(name, start, stop).result().data)

    def size(self, name: str) -> int:
        """The size of a shard as the store has it.

        Raises:
            CacheNotFoundError, FetchError: the store cannot tell.
            StoreError: the reader is closed.
        """
        return self._scheduler.submit(lane_of(name), partial(self._head.ranges_reader(name).size, name)).result()

    def read_residual_head(self, span: SpanReader | None = None) -> ShardHead:
        """Header and index of the Residual of one of `spans`, or of the cache that was named, as the store has them.

        Raises:
            CacheNotFoundError: the object is missing.
            FormatError: it is damaged, or belongs to another encode.
            StoreError: the reader is closed.
        """
        span = span or self._head
        span.residual_ref()
        return self._scheduler.submit(Lane.RESIDUAL, span.residual_head).result()

    def token_ids(self) -> npt.NDArray[np.uint32] | None:
        """The token ids of what is loaded [T], or None if a cache does not store its own."""
        parts: list[npt.NDArray[np.uint32]] = []
        for span in self.spans:
            raw = self._one(span, "token_ids")
            if raw is None:
                return None
            parts.append(raw.view("<u4")[: span.part.stop - span.header.tokens.start])
        return np.concatenate(parts)

    def logits(self) -> npt.NDArray[np.float32] | None:
        """The logits [V] after the last token that is loaded, or None if they are not stored."""
        if self.extent.logits_tokens is None:
            return None
        raw = self._one(self.spans[-1], "logits")
        return None if raw is None else raw.view("<f4")

    def bases(self) -> list[Basis | None]:
        """The basis of each of `spans` that has one: from this user's own, or else from beside it, and then kept.

        Raises:
            CacheNotFoundError: it is in neither place.
            FetchError: the store cannot deliver it.
            FormatError: it is damaged, or does not fit.
        """
        return [span.basis() for span in self.spans]

    def prefix_sha256(self) -> U8 | None:
        """The digests [blocks, 32] of all blocks up to the end of the cache that was named, or None if it has none."""
        raw = self._one(self._head, "prefix")
        return None if raw is None else raw.reshape(-1, 32)

    def close(self) -> None:
        """Stop reading: requests still in flight are cancelled, and streams say that the reader is closed."""
        self._scheduler.close()
        for span in self._opened:
            span.close()
        if self._disk is not None:
            self._disk.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _span(self, url: Url, *, ahead: bool, number: int = 0) -> SpanReader:
        span = SpanReader(url, self._scheduler, self.options, self._link, disk=self._disk, ahead=ahead, number=number)
        self._opened.append(span)
        return span

    def _open_chain(self, stop: int, ahead: bool) -> tuple[SpanReader, ...]:
        """Open the caches that the named one continues, all at once, and cut the last one that is needed."""
        refs = wanted_parents(self.header, stop)
        if refs and not isinstance(self.options.transport, str) and not callable(self.options.transport):
            hint = "give a function that makes a transport for each cache"
            raise InputError(f"{self.url} continues other caches, which its transport does not read", hint=hint)
        parents = [
            self._span(self.store.sibling(ref.name), ahead=ahead, number=number) for number, ref in enumerate(refs)
        ]
        opening = [
            self._scheduler.submit(Lane.ANCHOR, partial(open_parent, span, self.header, span.number))
            for span in parents
        ]
        for opened in opening:
            opened.result()
        for span, ref in zip(parents, refs, strict=True):
            span.part = cut(span.header, min(ref.stop, stop))
        self._head.number = len(parents)
        if stop <= self.header.tokens.start:
            return tuple(parents)
        self._head.part = cut(self.header, stop)
        return (*parents, self._head)

    def _one(self, span: SpanReader, part: str) -> U8 | None:
        """The content of an array of one segment."""
        wanted = [item for item in span.anchor_head.segments if item.plan.part == part]
        for payload in self._stream(span.ranges_of(ANCHOR_NAME, span.anchor_head, wanted)):
            check_content(span.header, payload.segment, payload.raw)
            return payload.raw
        return None

    def _stream(self, wanted: list[SegmentRange]) -> SegmentStream:
        self._scheduler.check_open()
        known: Future[list[SegmentRange]] = Future()
        known.set_result(wanted)
        return SegmentStream(known, self._submit)

    def _submit(self, wanted: SegmentRange) -> Future[list[SegmentPayload]]:
        return next(span for span in self._opened if span.number == wanted.span).submit_segments(wanted)


def open_cache(
    url: Url, *, tokens: int | None = None, link: Link | None = None, options: FetchOptions | None = None
) -> CacheReader:
    """Open the cache at `url`, and those that it continues: reads and checks their headers.

    Args:
        tokens: load the first so many only, and fetch no more than these need.
        link: simulates a slower one.
        options: how to fetch.

    Raises:
        CacheNotFoundError: there is no cache, or one that it continues is missing.
        FetchError: the store cannot be read.
        FormatError: what is there is damaged or not a cache, or another than the one that was continued.
        IdentityError: a cache continues one of another model.
        InputError: the URL does not end in `.lynx`, its scheme is unknown, or so many tokens cannot be loaded.
    """
    return CacheReader(url, tokens=tokens, link=link, options=options)


@asynccontextmanager
async def open_cache_async(
    url: Url, *, tokens: int | None = None, link: Link | None = None, options: FetchOptions | None = None
) -> AsyncIterator[CacheReader]:
    """`open_cache` for event loops: `async with open_cache_async(url) as reader`, then `async for` over its streams.

    Leaving, or being cancelled, ends all requests. What a reader has beside streams blocks; `asyncio.to_thread` helps.

    Raises:
        As `open_cache`.
    """
    opening = asyncio.ensure_future(asyncio.to_thread(open_cache, url, tokens=tokens, link=link, options=options))
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


def _merged(spans: Iterable[list[SegmentRange]]) -> list[SegmentRange]:
    """The ranges of several caches in the order in which a decoder wants them, those of each in their own order."""
    return sorted(itertools.chain.from_iterable(spans), key=_turn)


def _turn(wanted: SegmentRange) -> tuple[int, int, int]:
    """Exact segments after all others, values of a Residual after keys; then by layer, then by span."""
    plan = wanted.segments[0].plan
    stage = 2 * (plan.part == "exact") + (
        plan.part in ("residual", "exact") and plan.tensor is not None and plan.tensor.name == "v"
    )
    return stage, plan.tensor.layer if plan.tensor is not None else -1, wanted.span
