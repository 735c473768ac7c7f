"""One cache of what a reader loads: its two shards, their heads, and ranges of them, checked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from itertools import groupby
from typing import TypeVar

from lynxkv.bases import bases_beside, checked_basis, keep_fetched, known_basis
from lynxkv.errors import (
    BindingError,
    CacheNotFoundError,
    ChecksumError,
    FetchError,
    FormatError,
    InputError,
)
from lynxkv.fetch.disk_cache import DiskCache, ShardCopy
from lynxkv.fetch.group import Group, failed_of
from lynxkv.fetch.head import Front, Submit, read_head
from lynxkv.fetch.memory import Blocks
from lynxkv.fetch.options import FRONT_STOP, FetchOptions
from lynxkv.fetch.ranges import Arrival, Fetched, RangeReader, all_of
from lynxkv.fetch.scheduler import Lane, Scheduler
from lynxkv.fetch.stream import SegmentPayload, SegmentRange, ranges
from lynxkv.format.basis import Basis
from lynxkv.format.document import ANCHOR_NAME
from lynxkv.format.index import Segment
from lynxkv.format.read import (
    FIRST_READ_BYTES,
    ReadRange,
    ShardHead,
    read_anchor_head,
    read_residual_head,
)
from lynxkv.layout import CacheHeader, ResidualRef, Span, TransformRef, cut
from lynxkv.store import Link, Store, Url
from lynxkv.store.marks import ANCHOR_TOS, RESIDUAL_TOS
from lynxkv.store.transport import Transport, transport_for

T = TypeVar("T")

# Arrays that no decoding needs.
_ASIDE = ("token_ids", "prefix", "logits")


class SpanReader:
    """A cache whose Anchor is being asked for. After `open` has run, its header has been read and checked.

    Args:
        ahead: the edges of what is asked for before its layout is known.
        whole: all of the Anchor is wanted at once, so that more of it is asked for as soon as its size is known; not if
            it continues others, which are wanted first.

    Attributes:
        number: of the span, from 0; segments and ranges carry it.
        residual_problem: why the Residual could not be fetched, once that is known.
    """

    header: CacheHeader
    anchor_head: ShardHead

    def __init__(
        self,
        url: Url,
        scheduler: Scheduler,
        options: FetchOptions,
        link: Link | None,
        *,
        disk: DiskCache | None,
        blocks: Blocks,
        ahead: Sequence[int],
        whole: bool = False,
        number: int = 0,
    ) -> None:
        first, second = (ANCHOR_TOS, RESIDUAL_TOS) if options.dscp else (None, None)
        self.store = Store(url, tos=first)
        self.url = self.store.url
        self.number = number
        self._scheduler, self._options, self._ahead, self._link = scheduler, options, ahead, link
        # Of shards on other machines, on this one's disk.
        self._disk = disk
        self._blocks = blocks
        self._copies: dict[str, ShardCopy] = {}
        self._ranges = self._residual_ranges = self._reader_of(self.store, link)
        if options.residual_url is not None:
            self._residual_ranges = self._reader_of(Store.of_residuals(options.residual_url, tos=second), link)
        elif second is not None:
            self._residual_ranges = self._reader_of(Store(url, tos=second), link)
        self.residual_problem: str | None = None
        self._fronts = {ANCHOR_NAME: self._start_front(ANCHOR_NAME, ahead, most=FRONT_STOP if whole else 0)}
        # Arrays of an Anchor whose front has gone that no decoding needs.
        self._aside: list[Arrival] = []
        self._kept_head: ShardHead | None = None
        self._part: Span | None = None
        self._basis: Basis | None = None
        self._residual_bytes: tuple[int, int] | None = None  # to full, and from there to exact; once known

    async def open(self) -> None:
        """Read and check the Anchor's head.

        Raises:
            CacheNotFoundError, FetchError, FormatError: it is not there, cannot be read, or is damaged.
        """
        parse = partial(read_anchor_head, what=f"{self.url}/{ANCHOR_NAME}")
        self.header, self.anchor_head = await self._read_head(ANCHOR_NAME, parse)
        if self.header.parent is None and (front := self._fronts.get(ANCHOR_NAME)) is not None:
            front.ask_for_more(self.anchor_head.bytes, self._asking(ANCHOR_NAME))
        if self.header.residual is not None:
            await self._residual_ranges.transport.keep(self.header.residual.name)
        copy = await self._scheduler.block(self._copy, ANCHOR_NAME, self.anchor_head.header_sha256)
        if copy is not None:
            copy.expect(self.anchor_head)

    @property
    def part(self) -> Span:
        """What of the cache is loaded; all of it, unless it was cut."""
        return self._part or Span(header=self.header, stop=self.header.tokens.stop)

    def cut(self, stop: int) -> None:
        """Load the positions before `stop` only.

        Raises:
            InputError: they cannot be loaded by themselves.
        """
        self._part = cut(self.header, stop)

    @property
    def bytes_anchor(self) -> int:
        """Of the Anchor, header included: all of it, or, of a token prefix, what is needed."""
        if self.part.is_whole:
            return self.anchor_head.bytes
        head = self.anchor_head
        return head.header_bytes + head.segments[0].offset + _stored_bytes(self.anchor_segments())

    @property
    def bytes_residual(self) -> int:
        """Of the Residual, up to full precision. Of a token prefix an estimate, until its index has been read."""
        return self._residual_sizes()[0]

    @property
    def bytes_exact(self) -> int:
        """Of the Residual, from full precision to the original; as `bytes_residual`."""
        return self._residual_sizes()[1]

    def residual_ref(self) -> ResidualRef:
        """What the Anchor says of the Residual.

        Raises:
            BindingError: there is none.
        """
        if self.header.residual is None:
            raise BindingError(f"{self.url} has no Residual")
        return self.header.residual

    def anchor_segments(self) -> list[Segment]:
        """Those of the Anchor that decoding needs, in file order."""
        segments = (item for item in self.anchor_head.segments if item.plan.part not in _ASIDE)
        return list(self._needed(segments))

    def anchor_ranges(self) -> list[SegmentRange]:
        """`anchor_segments`, neighbours together."""
        segments = self.anchor_segments()
        self._expect(ANCHOR_NAME, self.anchor_head, segments)
        return self.ranges_of(ANCHOR_NAME, self.anchor_head, segments)

    def all_ranges(self, name: str, head: ShardHead) -> list[SegmentRange]:
        """All segments of a shard, neighbours together, as the store has them."""
        self._expect(name, head, head.segments)
        return self.ranges_of(name, head, head.segments, from_disk=False)

    def start_residual(self) -> None:
        """Ask for the first bytes of the Residual, unless its head is on disk."""
        ref = self.residual_ref()
        self._kept_head = self._kept_residual_head(ref)
        if self._kept_head is None and ref.name not in self._fronts:
            stop = ref.bytes - ref.exact_bytes  # what comes then is perhaps not wanted
            self._fronts[ref.name] = self._start_front(ref.name, sorted({min(edge, stop) for edge in self._ahead}))

    async def residual_ranges(self, *, exact: bool) -> list[SegmentRange]:
        """Read the head of the Residual, and say what of it decoding needs, exact segments last and only if wanted.

        Raises:
            BindingError: there is no Residual, or it is that of another encode.
            CacheNotFoundError, FetchError, FormatError: it is not there, cannot be read, or is damaged.
        """
        name = self.residual_ref().name
        head = self._kept_head or await self.residual_head()
        needed = list(self._needed(head.segments))
        if not self.part.is_whole:
            own = head.header_bytes + head.segments[0].offset
            exact_bytes = _stored_bytes(item for item in needed if item.plan.part == "exact")
            self._residual_bytes = own + _stored_bytes(needed) - exact_bytes, exact_bytes
        wanted = [item for item in needed if exact or item.plan.part != "exact"]
        self._expect(name, head, wanted)
        # Apart, so that keys of several caches can come before their values.
        return [
            each
            for _, segments in groupby(wanted, key=lambda item: (item.plan.part, item.coded[0].name))
            for each in self.ranges_of(name, head, list(segments))
        ]

    async def residual_head(self) -> ShardHead:
        """Header and index of the Residual, as the store has them; raises as `residual_ranges`."""
        name, raw = self.residual_ref().name, bytearray()

        def parse(read: ReadRange, size: int) -> ShardHead:
            head = self._parse_residual(read, size)
            raw[:] = read(0, head.header_bytes + head.segments[0].offset)
            return head

        with self._noticing(name):
            try:
                head = await self._read_head(name, parse)
            except CacheNotFoundError as error:
                hint = "if it is elsewhere, say where: residual_url, or --residual-url; else encode the cache again"
                where = self._residual_ranges.url
                raise CacheNotFoundError(f"{where}: the Residual {name} is missing", hint=hint) from error
        copy = await self._scheduler.block(self._copy, name, head.header_sha256)
        if copy is not None:
            copy.expect(head)
            copy.keep_head(memoryview(raw))
        return head

    def ranges_of(
        self, name: str, head: ShardHead, segments: Sequence[Segment], *, from_disk: bool = True
    ) -> list[SegmentRange]:
        """Segments of a shard, in file order, neighbours together; as the store has them, unless `from_disk`."""

        def kept(segment: Segment) -> bool:
            return from_disk and name in self._copies and self._copies[name].holds(segment)

        concurrency = self._options.concurrency
        return list(ranges(segments, head.header_bytes, concurrency, kept, span=self.number, shard=name))

    def submit_segments(self, wanted: SegmentRange) -> list[Future[list[SegmentPayload]]]:
        """Fetch a range, and check the segments of each of its groups when they are in."""
        what = f"{self.ranges_reader(wanted.shard).url}/{wanted.shard}"
        offset = wanted.start - wanted.segments[0].offset
        groups = [Group(segments, offset, self.number, what) for segments in wanted.groups]

        async def fetch_checked() -> None:
            wanted_still = [group.payloads.set_running_or_notify_cancel() for group in groups]
            if not any(wanted_still):
                return
            with self._noticing(wanted.shard):
                await self._take(wanted, groups)

        def end(job: Future[None]) -> None:
            if (error := job.exception()) is not None:
                for group in groups:
                    group.fail(error)

        front = self._fronts.get(wanted.shard)
        begins = max(wanted.start, front.stop) if front is not None else wanted.start
        size = 0 if wanted.kept else max(0, wanted.stop - begins)  # of its own, apart from what was asked for ahead
        self._scheduler.submit(lane_of(wanted.shard), fetch_checked, size=size).add_done_callback(end)
        return [group.payloads for group in groups]

    def submit_range(self, name: str, start: int, stop: int) -> Future[Fetched]:
        """Fetch bytes [start, stop) of a shard, unchecked."""
        work = partial(self.ranges_reader(name).fetch, name, start, stop)
        return self._scheduler.submit(lane_of(name), work, urgent=True)

    def ranges_reader(self, name: str) -> RangeReader:
        """What reads a shard."""
        return self._ranges if name == ANCHOR_NAME else self._residual_ranges

    def basis(self, *, as_stored: bool = False) -> Basis | None:
        """The basis whose components are coded, or None; as `CacheReader.bases`."""
        ref = self.header.transform
        if ref is not None and self._basis is None:
            basis = None if as_stored else known_basis(ref)
            if basis is None:
                basis = self._fetch_basis(ref)
                with suppress(InputError):  # it is here all the same
                    keep_fetched(basis)
            basis.check_fits(self.header)
            self._basis = basis
        return self._basis

    def close(self) -> None:
        """Nothing more will be read."""
        self._fronts.clear()
        self._aside.clear()
        self._ranges.transport.close()
        self._residual_ranges.transport.close()

    def _reader_of(self, store: Store, link: Link | None) -> RangeReader:
        transport: Transport = transport_for(store, self._options.transport, self._scheduler.workers)
        return RangeReader(store.url, transport, self._options, link, self._scheduler.arrived)

    def _fetch_basis(self, ref: TransformRef) -> Basis:
        reader = self._reader_of(bases_beside(self.store), self._link)

        async def fetch() -> tuple[bytes, int]:
            fetched = await reader.fetch(ref.name, 0, ref.bytes)
            return bytes(fetched.data), await reader.size(ref.name) if fetched.size is None else fetched.size

        try:
            data, size = self._scheduler.submit(Lane.ANCHOR, fetch, urgent=True).result()
        except CacheNotFoundError as error:
            hint = f"copy {ref.name} there from beside the original, or encode the cache again"
            raise CacheNotFoundError(f"{reader.url}: the basis {ref.name} is missing", hint=hint) from error
        finally:
            reader.transport.close()
        what = f"{reader.url}/{ref.name}"
        if size != ref.bytes:
            raise ChecksumError(f"{what}: the basis has {size} bytes, not {ref.bytes}", hint="copy it again")
        return checked_basis(data, ref, what=what)

    def _needed(self, segments: Iterable[Segment]) -> Iterator[Segment]:
        return (segment for segment in segments if _is_needed(self.part, segment))

    def _residual_sizes(self) -> tuple[int, int]:
        ref = self.header.residual
        if ref is None:
            return 0, 0
        if self._residual_bytes is not None:
            return self._residual_bytes
        tokens, loaded = self.header.tokens.count, self.part.stop - self.header.tokens.start
        return (ref.bytes - ref.exact_bytes) * loaded // tokens, ref.exact_bytes * loaded // tokens

    def _start_front(self, name: str, ahead: Sequence[int], *, most: int = 0) -> Front:
        """Ask for the first bytes of a shard whose head is not known yet, with room for those before `most`."""
        reader = self.ranges_reader(name)
        # The head will show whether a copy on disk is of the same content; mostly it is.
        copied = self._disk is not None and self._disk.has(f"{reader.url}/{name}")
        early = bool(ahead) and reader.transport.is_remote and not copied
        if not early:
            return Front((0, FIRST_READ_BYTES), self._asking(name))
        return Front(ahead, self._asking(name), most=most)

    def _asking(self, name: str) -> Submit:
        """What asks for a piece of a shard."""

        def submit(arrival: Arrival, start: int, stop: int) -> Future[None]:
            fill = self.ranges_reader(name).fill
            return self._scheduler.submit(lane_of(name), partial(fill, name, arrival, start, stop), size=stop - start)

        return submit

    def _expect(self, name: str, head: ShardHead, segments: Iterable[Segment]) -> None:
        """Know, before these segments of a shard are asked for, with which one its front can go."""
        front = self._fronts.get(name)
        if front is not None:
            begun = (item for item in segments if head.header_bytes + item.offset < front.stop)
            front.last = max((head.header_bytes + item.stop for item in begun), default=0)

    async def _read_head(self, name: str, parse: Callable[[ReadRange, int], T]) -> T:
        reader = self.ranges_reader(name)
        size = partial(reader.size, name)
        try:
            return await read_head(partial(self._fetch, name), size, parse)
        except FormatError:  # damaged on the way, perhaps
            return await read_head(partial(reader.fetch, name), size, parse)

    async def _fetch(self, name: str, start: int, stop: int) -> Fetched:
        """Bytes [start, stop) of a shard, those that have been asked for already from there."""
        arrival = Arrival(start, stop)
        await self._fill(name, arrival)
        return arrival.fetched()

    async def _fill(self, name: str, arrival: Arrival) -> None:
        reader, front = self.ranges_reader(name), self._fronts.get(name)
        place = arrival.start, arrival.stop
        own = (item for item in self._aside if name == ANCHOR_NAME and (item.start, item.here) == place)
        if (array := next(own, None)) is not None:
            arrival.put(arrival.start, arrival.start, array.fetched().data)
        elif front is None or arrival.start >= front.stop:
            await reader.fill(name, arrival, arrival.start, arrival.stop)
        elif arrival.stop <= front.stop:
            await front.pass_on(arrival)
        else:
            await all_of((front.pass_on(arrival), reader.fill(name, arrival, front.stop, arrival.stop)))

    async def _take(self, wanted: SegmentRange, groups: Sequence[Group]) -> None:
        """Fetch and check the groups of a range, or read them from their copy on disk.

        What fails a check is fetched once more before giving up, and not from what came ahead.
        """
        copy = self._copies.get(wanted.shard)
        if copy is not None and wanted.kept:
            failed = await self._take_kept(groups, copy)
        else:
            failed = await self._take_arriving(wanted, groups, copy)
        for group in failed:
            data = (await self.ranges_reader(wanted.shard).fetch(wanted.shard, group.start, group.stop)).data
            await self._scheduler.compute(group.check, data)
            if copy is not None:
                copy.keep(group.segments, data)
        await self._let_go(wanted)

    async def _let_go(self, wanted: SegmentRange) -> None:
        """Once the last of what came ahead of a shard has been taken, keep no more of it than small arrays that are
        perhaps read later. All ranges before this one have been asked for.
        """
        front = self._fronts.get(wanted.shard)
        if front is None or front.last is None or not wanted.start < front.last <= wanted.stop:
            return
        try:
            for segment in self.anchor_head.segments if wanted.shard == ANCHOR_NAME else ():
                stop = self.anchor_head.header_bytes + segment.stop
                if segment.plan.part in _ASIDE and stop <= front.stop:
                    array = Arrival(stop - segment.stored_bytes, stop)
                    await front.pass_on(array)
                    self._aside.append(array)
        finally:
            self._fronts.pop(wanted.shard, None)

    async def _take_kept(self, groups: Sequence[Group], copy: ShardCopy) -> list[Group]:
        """Those whose copy is damaged are left over."""
        self._scheduler.give_way()
        failed = await failed_of(groups, [self._scheduler.workers.submit(group.check_copy, copy) for group in groups])
        for group in failed:
            copy.forget(group.segments)
        return failed

    async def _take_arriving(
        self, wanted: SegmentRange, groups: Sequence[Group], copy: ShardCopy | None
    ) -> list[Group]:
        """Each group is checked as soon as its last byte is in; those that are damaged or missing are left over."""
        checks: list[Future[None]] = []

        def look(arrival: Arrival) -> None:
            here = arrival.here
            for group in groups[len(checks) :]:
                if group.stop > here:
                    return
                checks.append(self._scheduler.start(group.check, arrival.between(group.start, group.stop)))

        front = self._fronts.get(wanted.shard)
        if front is not None and wanted.stop <= front.stop:
            arrival = front.part(wanted.start, wanted.stop, look)
        else:
            arrival = Arrival(wanted.start, wanted.stop, look, memory=self._blocks.take)
        await self._fill(wanted.shard, arrival)
        self._scheduler.give_way()
        failed = [*await failed_of(groups, checks), *groups[len(checks) :]]
        if copy is not None:
            for group in groups:
                if group not in failed:
                    copy.keep(group.segments, arrival.between(group.start, group.stop))
        return failed

    def _parse_residual(self, read: ReadRange, size: int) -> ShardHead:
        what = f"{self._residual_ranges.url}/{self.residual_ref().name}"
        return read_residual_head(read, size, self.header, what=what)

    def _kept_residual_head(self, ref: ResidualRef) -> ShardHead | None:
        """The Residual's head from its copy on disk."""
        copy = self._copy(ref.name, ref.header_sha256)
        data = copy.head() if copy is not None else None
        if copy is None or data is None:
            return None
        try:
            head = self._parse_residual(lambda start, stop: data[start:stop], ref.bytes)
        except FormatError:
            copy.drop()
            return None
        return head if copy.expect(head) else None

    def _copy(self, name: str, header_sha256: str) -> ShardCopy | None:
        """The copy of a shard on disk, which may be empty; None if this reader, or this store, has none."""
        ranges = self.ranges_reader(name)
        if self._disk is None or not ranges.transport.is_remote:
            return None
        if name not in self._copies:
            self._copies[name] = self._disk.copy(f"{ranges.url}/{name}", header_sha256)
        return self._copies[name]

    @contextmanager
    def _noticing(self, name: str) -> Iterator[None]:
        """Remember that the Residual could not be fetched."""
        try:
            yield
        except (CacheNotFoundError, FetchError) as error:
            if name != ANCHOR_NAME:
                self.residual_problem = error.message
            raise


def lane_of(name: str) -> Lane:
    """The lane in which a shard is asked for."""
    return Lane.ANCHOR if name == ANCHOR_NAME else Lane.RESIDUAL


def _is_needed(part: Span, segment: Segment) -> bool:
    """Whether decoding what is loaded needs a segment."""
    ref = segment.plan.tensor
    if ref is None or part.is_whole or segment.plan.part == "sink":
        return True
    if segment.tokens is None:  # it explains codes
        return part.stop > part.first_position(ref)
    return part.loaded_tokens(ref, segment.tokens) > 0


def _stored_bytes(segments: Iterable[Segment]) -> int:
    return sum(segment.stored_bytes for segment in segments)
