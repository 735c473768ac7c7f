"""An open cache, or a chain of them: Anchors first, Residuals in the background while others work.

Nothing here decodes; nothing here imports torch.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import numpy as np
import numpy.typing as npt

from lynxkv.errors import InputError
from lynxkv.fetch import options as tuned
from lynxkv.fetch.chain import check_tokens, open_parent, wanted_parents
from lynxkv.fetch.disk_cache import DiskCache
from lynxkv.fetch.follow import Following
from lynxkv.fetch.memory import Blocks
from lynxkv.fetch.options import FetchOptions
from lynxkv.fetch.scheduler import Lane, Scheduler
from lynxkv.fetch.span import SpanReader, lane_of
from lynxkv.fetch.stream import SegmentPayload, SegmentRange, SegmentStream
from lynxkv.format.basis import Basis
from lynxkv.format.content import check_content
from lynxkv.format.document import ANCHOR_NAME
from lynxkv.format.read import ShardHead
from lynxkv.layout import CacheHeader, Extent
from lynxkv.store import Link, Store, Url

U8 = npt.NDArray[np.uint8]
T = TypeVar("T")


class CacheReader:
    """An open cache, with those that it continues: headers have been read and checked, nothing else.

    Close it, or use it in a `with` block.

    Args:
        tokens: load the first so many only.
        follow: load a chain while it is being written; what is there already comes at once.
        header_only: nothing but headers will be read, so nothing is asked for ahead.
        alone: leave caches that it continues alone: nothing of them is read.
        at_once: what is opened is loaded at once. Else little is asked for ahead, and it may be kept open for long.

    Attributes:
        spans: the caches that are loaded, first to last; more come while a chain is followed.
    """

    def __init__(
        self,
        url: Url,
        *,
        tokens: int | None = None,
        link: Link | None = None,
        options: FetchOptions | None = None,
        follow: bool = False,
        header_only: bool = False,
        alone: bool = False,
        at_once: bool = True,
    ) -> None:
        self.opened_at = time.perf_counter()
        self.options = options or FetchOptions()
        self._link = link
        self._scheduler = Scheduler(self.options.concurrency, what=Store(url).url)
        self._disk: DiskCache | None = None
        self._blocks = Blocks()
        self._opened: list[SpanReader] = []
        self._chain: tuple[SpanReader, ...] = ()
        self._following: Following | None = None
        self._anchors_known: list[Future[None]] = []
        self.store = Store(url)
        self.url = self.store.url
        try:
            if self.options.cache_dir is not None and not header_only:
                self._disk = DiskCache(Path(self.options.cache_dir), self.options.cache_max_bytes)
            spans_ahead = () if header_only else tuned.SPAN_EDGES
            if follow:
                self._following = self._follow(tokens, ahead=spans_ahead)
            else:
                ahead: Sequence[int] = tuned.FRONT_EDGES if at_once else tuned.SPAN_EDGES
                if header_only or tokens is not None:  # of a token prefix, what comes next is perhaps not wanted
                    ahead = ()
                self._named = self._span(url, 0, ahead=ahead, whole=at_once)
                self._scheduler.submit(Lane.ANCHOR, self._named.open).result()
                stop = check_tokens(self.header, tokens)
                self._chain = (self._named,) if alone else self._open_chain(stop, ahead=spans_ahead)
        except BaseException:
            self.close()
            raise

    @property
    def header(self) -> CacheHeader:
        """Of the cache that was named; while that is being written, of the last span that is there."""
        return self._head.header

    @property
    def anchor_head(self) -> ShardHead:
        """Header and index of the Anchor of the same cache."""
        return self._head.anchor_head

    @property
    def spans(self) -> tuple[SpanReader, ...]:
        return tuple(self._following.spans) if self._following is not None else self._chain

    @property
    def is_growing(self) -> bool:
        """Whether spans of the chain are still to come."""
        return self._following is not None and not self._following.complete

    def wait_for_writer(self) -> None:
        """Wait until all spans of the chain are there.

        Raises:
            WriterStoppedError: nothing new was there for too long.
            FetchError, FormatError, IdentityError: a span cannot be read, or does not continue the others.
        """
        if self._following is not None:
            self._following.wait()

    @property
    def _head(self) -> SpanReader:
        return self._following.spans[-1] if self._following is not None else self._named

    @property
    def extent(self) -> Extent:
        planned = self._following.stop if self._following is not None and self.is_growing else None
        return Extent(spans=tuple(span.part for span in self.spans), planned_stop=planned)

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
        """What decoding needs of the Anchors, by layer, and of each in file order.

        While a chain is followed it comes span by span.
        """
        if not self.is_growing:
            return self._stream(_merged(span.anchor_ranges() for span in self.spans))

        async def wanted(spans: list[SpanReader]) -> list[SegmentRange]:
            return _merged(span.anchor_ranges() for span in spans)

        return self._stream_growing(Lane.ANCHOR, wanted)

    def start_residual(self, *, exact: bool = False) -> SegmentStream:
        """Start to fetch the Residuals: heads first, then segments, keys before values and exact ones last, if asked
        for; of each in file order. Span by span while a chain is followed, after `stream_anchor` only.

        Their requests wait for those of the Anchors.

        Raises:
            BindingError: no cache has one.
            StoreError: the reader is closed.
        """
        if not self.extent.has_residual:
            self._head.residual_ref()

        async def wanted(spans: list[SpanReader]) -> list[SegmentRange]:
            return _merged(await asyncio.gather(*(span.residual_ranges(exact=exact) for span in spans)))

        def start(spans: Sequence[SpanReader]) -> list[SpanReader]:
            having = [span for span in spans if span.header.residual is not None]
            for span in having:
                span.start_residual()
            return having

        if self.is_growing:
            return self._stream_growing(Lane.RESIDUAL, wanted, start)
        return SegmentStream(self._scheduler.submit(Lane.RESIDUAL, partial(wanted, start(self.spans))), self._submit)

    def stream_segments(self, name: str, head: ShardHead, span: SpanReader | None = None) -> SegmentStream:
        """All segments of a shard, whose head has been read, of one of `spans`, or of the cache that was named; as the
        store has them.
        """
        return self._stream((span or self._head).all_ranges(name, head))

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
        work = partial(self._head.ranges_reader(name).size, name)
        return self._scheduler.submit(lane_of(name), work, urgent=True).result()

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
        self.wait_for_writer()
        parts: list[npt.NDArray[np.uint32]] = []
        for span in self.spans:
            raw = self._one(span, "token_ids")
            if raw is None:
                return None
            parts.append(raw.view("<u4")[: span.part.stop - span.header.tokens.start])
        return np.concatenate(parts)

    def stored_token_ids(self) -> npt.NDArray[np.uint32] | None:
        """The token ids that the cache that was named stores itself, of all its own positions."""
        raw = self._one(self._head, "token_ids")
        return None if raw is None else raw.view("<u4")

    def logits(self) -> npt.NDArray[np.float32] | None:
        """The logits [V] after the last token that is loaded, or None if they are not stored."""
        if self.extent.logits_tokens is None:
            return None
        raw = self._one(self.spans[-1], "logits")
        return None if raw is None else raw.view("<f4")

    def bases(self, *, as_stored: bool = False) -> list[Basis | None]:
        """The basis of each of `spans` that has one, from this user's own or those fetched before, or from beside it;
        always the latter if `as_stored`.

        Raises:
            CacheNotFoundError: it is in neither place.
            FetchError: the store cannot deliver it.
            FormatError: it is damaged, or does not fit.
        """
        return [span.basis(as_stored=as_stored) for span in self.spans]

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

    def _span(self, url: Url, number: int, *, ahead: Sequence[int], whole: bool = False) -> SpanReader:
        span = SpanReader(
            url,
            self._scheduler,
            self.options,
            self._link,
            disk=self._disk,
            blocks=self._blocks,
            ahead=ahead,
            whole=whole,
            number=number,
        )
        self._opened.append(span)
        return span

    def _open_chain(self, stop: int, *, ahead: Sequence[int]) -> tuple[SpanReader, ...]:
        """Open the caches that the named one continues, all at once, and cut the last one that is needed."""
        refs = wanted_parents(self.header, stop)
        if refs and not isinstance(self.options.transport, str) and not callable(self.options.transport):
            hint = "give a function that makes a transport for each cache"
            raise InputError(f"{self.url} continues other caches, which its transport does not read", hint=hint)
        parents = [self._span(self.store.sibling(ref.name), number, ahead=ahead) for number, ref in enumerate(refs)]
        opening = [
            self._scheduler.submit(Lane.ANCHOR, partial(open_parent, span, self.header, span.number))
            for span in parents
        ]
        for opened in opening:
            opened.result()
        for span, ref in zip(parents, refs, strict=True):
            span.cut(min(ref.stop, stop))
        self._named.number = len(parents)
        if stop <= self.header.tokens.start:
            return tuple(parents)
        self._named.cut(stop)
        return (*parents, self._named)

    def _follow(self, tokens: int | None, *, ahead: Sequence[int]) -> Following:
        if tokens is not None:
            raise InputError("the first tokens of a chain that is being written cannot be asked for", hint="follow all")
        if not isinstance(self.options.transport, str) and not callable(self.options.transport):
            raise InputError(
                "a chain cannot be followed with a transport that reads one cache", hint="name a transport"
            )
        opens = partial(self._span, ahead=ahead)
        following = Following(self.store, opens, self._drop, self._scheduler, self.options.follow_s)
        following.batch(0).result()
        return following

    def _drop(self, span: SpanReader) -> None:
        span.close()
        self._opened.remove(span)

    def _one(self, span: SpanReader, part: str) -> U8 | None:
        """The content of an array of one segment."""
        wanted = [item for item in span.anchor_head.segments if item.plan.part == part]
        for payload in self._stream(span.ranges_of(ANCHOR_NAME, span.anchor_head, wanted)):
            check_content(span.header, payload.segment, payload.raw)
            return payload.raw
        return None

    def _stream(self, wanted: list[SegmentRange]) -> SegmentStream:
        self._scheduler.check_open()
        known: Future[list[SegmentRange] | None] = Future()
        known.set_result(wanted)
        return SegmentStream(known, self._submit)

    def _stream_growing(
        self,
        lane: Lane,
        wanted: Callable[[list[SpanReader]], Awaitable[list[SegmentRange]]],
        start: Callable[[list[SpanReader]], list[SpanReader]] = list,
    ) -> SegmentStream:
        """A stream of what `wanted` says of the spans that are there, and then of each that comes.

        That of the Residuals knows of a span only after that of the Anchors, and so asks later.
        """
        following, numbers = self._following, itertools.count()
        assert following is not None

        def more() -> Future[list[SegmentRange] | None]:
            number = next(numbers)
            if lane == Lane.ANCHOR and number:
                with suppress(InvalidStateError):  # of another stream of the Anchors it is known already
                    self._anchor_known(number - 1).set_result(None)
            batch, after = following.batch(number), self._anchor_known(number)

            async def next_wanted() -> list[SegmentRange] | None:
                self._scheduler.give_way()  # others may ask while this one waits
                spans = await _told(batch)
                if spans is None:
                    return None
                if lane == Lane.RESIDUAL:
                    await _told(after)
                return await wanted(start(spans))

            return self._scheduler.submit(lane, next_wanted)

        return SegmentStream(more(), self._submit, more)

    def _anchor_known(self, batch: int) -> Future[None]:
        """Done when the stream of the Anchors knows of a batch of spans."""
        while len(self._anchors_known) <= batch:
            self._anchors_known.append(Future())
        return self._anchors_known[batch]

    def _submit(self, wanted: SegmentRange) -> list[Future[list[SegmentPayload]]]:
        spans = (*self.spans, self._head)
        return next(span for span in spans if span.number == wanted.span).submit_segments(wanted)


def open_cache(
    url: Url,
    *,
    tokens: int | None = None,
    follow: bool = False,
    link: Link | None = None,
    options: FetchOptions | None = None,
) -> CacheReader:
    """Open the cache at `url`, and those that it continues: reads and checks their headers.

    Args:
        tokens: load the first so many only, and fetch no more than these need.
        follow: load a chain while it is being written (SPEC 9.5): returns with its first span, and others come. As long
            as `reader.is_growing`, what asks for all of it waits for the writer.
        link: simulates a slower one.
        options: how to fetch.

    Raises:
        WriterStoppedError: nobody writes the chain that is to be followed.
        CacheNotFoundError: there is no cache, or one that it continues is missing.
        FetchError: the store cannot be read.
        FormatError: what is there is damaged or not a cache, or another than the one that was continued.
        IdentityError: a cache continues one of another model.
        InputError: the URL does not end in `.lynx`, its scheme is unknown, or so many tokens cannot be loaded.
    """
    return CacheReader(url, tokens=tokens, follow=follow, link=link, options=options)


@asynccontextmanager
async def open_cache_async(
    url: Url,
    *,
    tokens: int | None = None,
    follow: bool = False,
    link: Link | None = None,
    options: FetchOptions | None = None,
) -> AsyncIterator[CacheReader]:
    """`open_cache` for event loops: `async with open_cache_async(url) as reader`, then `async for` over its streams.

    Leaving, or being cancelled, ends all requests. What a reader has beside streams blocks; `asyncio.to_thread` helps.

    Raises:
        As `open_cache`.
    """
    work = asyncio.to_thread(open_cache, url, tokens=tokens, follow=follow, link=link, options=options)
    async with closing_after(asyncio.ensure_future(work)) as reader:
        yield reader


@asynccontextmanager
async def closing_after(opening: asyncio.Future[CacheReader]) -> AsyncIterator[CacheReader]:
    """The reader that a thread is opening; closed, with all its requests, when this is left, by cancelling too."""
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


async def _told(future: Future[T]) -> T:
    """The result of a future that others wait for, too: cancelling one who waits does not cancel it."""
    waiting = asyncio.wrap_future(future)
    waiting.add_done_callback(lambda done: done.cancelled() or done.exception())
    return await asyncio.shield(waiting)


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
