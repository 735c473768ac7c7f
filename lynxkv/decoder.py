"""Checked segments to KV tensors, in place: the Anchor makes a cache, the Residual refines it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from typing import Protocol, TypeVar, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lynxkv.errors import BindingError, CacheNotFoundError, ContentError, FetchError, InputError
from lynxkv.fetch import CacheReader, FetchOptions, SegmentPayload, open_cache
from lynxkv.format.basis import Basis
from lynxkv.format.content import check_content
from lynxkv.kernels import EntropyTables, FixedTables, Out, Tables, Transform, dequantize, tables_at, unpack_exact
from lynxkv.kernels.paged import read, span, write
from lynxkv.kernels.rounding import TORCH_DTYPES
from lynxkv.kv import KV, KVLayer
from lynxkv.layout import (
    DTYPE_BYTES,
    CacheHeader,
    Dtype,
    EntropyCoding,
    Extent,
    FixedCoding,
    Precision,
    TensorName,
    TensorRef,
)
from lynxkv.parallel import map_ordered, threads, torch_alone
from lynxkv.store import Link, Url

U8 = npt.NDArray[np.uint8]
F32 = npt.NDArray[np.float32]
T = TypeVar("T")
R = TypeVar("R")
_Place = tuple[int, int, int]
"""A segment: its span, its tensor's ordinal, its first coded token."""


class Destination(Protocol):
    """Where decoded tensors go: a live cache, an engine's pages, or plain tensors."""

    def target(self, layer: int, tensor: TensorName) -> Out:
        """A view [H, stop - start, D], any float dtype, or pages, for the positions [start, stop) the layer holds."""
        ...


@dataclass
class _Shared:
    """Arrays of one Anchor that come before the codes they explain, and tables made of them."""

    header: CacheHeader
    basis: Basis | None
    codebooks: dict[str, F32] = field(default_factory=dict)
    steps: F32 | None = None
    means: dict[int, F32] = field(default_factory=dict)
    orders: dict[int, npt.NDArray[np.uint16]] = field(default_factory=dict)
    tables: dict[int, Tables] = field(default_factory=dict)


class CacheDecoder:
    """Decodes segments into a destination, and keeps the anchor codes that refining needs.

    Segments may only come checked, from `SegmentStream`. Call it from one thread, between model steps; given several
    segments at once it decodes them on as many threads as torch has.

    Args:
        extent: what is loaded, as `CacheReader.extent` says it.
        skip_anchor: tensors that have a Residual are written at full precision only; until then their codes are kept.
        refines: False keeps no codes: nothing will be refined.
        bases: what each cache's header names, if anything: `CacheReader.bases`.

    Raises:
        BindingError: a basis is not the one that the header names.
    """

    def __init__(
        self,
        extent: Extent,
        destination: Destination,
        *,
        skip_anchor: bool = False,
        refines: bool = True,
        bases: Sequence[Basis | None] = (),
    ) -> None:
        self.extent = Extent(spans=())
        self._destination = destination
        self._skip_anchor, self._refines = skip_anchor, refines
        self._shared: list[_Shared] = []
        self._codes: dict[_Place, U8] = {}
        # Segments of which the last tokens are not loaded: whole, for they cannot be decoded in part.
        self._aside: dict[_Place, Tensor] = {}
        self._anchor_left = self._full_left = self._exact_left = 0
        self.grow(extent, bases)

    def grow(self, extent: Extent, bases: Sequence[Basis | None] = ()) -> None:
        """Take in what is loaded now, where spans have come to a chain that is still being written.

        Raises:
            BindingError: a basis is not the one that the header names.
        """
        bases = bases or [None] * len(extent.spans)
        if [part.header.transform for part in extent.spans] != [basis and basis.ref for basis in bases]:
            raise BindingError("a cache is decoded with another basis than its own")
        known = len(self.extent.spans)
        for part, basis in zip(extent.spans[known:], bases[known:], strict=True):
            self._shared.append(_Shared(header=part.header, basis=basis))
            for ref in part.header.tensors:
                count = sum(1 for _ in part.segments(ref))
                self._anchor_left += count
                self._full_left += count if ref.coding.has_residual else 0
                self._exact_left += count if ref.coding.exact else 0
        self.extent = extent

    @property
    def complete_anchor(self) -> bool:
        """Whether every element holds at least anchor precision."""
        return self._anchor_left == 0

    @property
    def complete_full(self) -> bool:
        """Whether every element holds full precision."""
        return self._anchor_left == 0 and self._full_left == 0

    @property
    def complete_exact(self) -> bool:
        """Whether every element holds the original's bits, or the best the cache has."""
        return self.complete_full and self._exact_left == 0

    def complete(self, precision: Precision) -> bool:
        """Whether every element holds at least `precision`, or the best the cache has."""
        return {
            "anchor": self.complete_anchor,
            "full": self.complete_full,
            "exact": self.complete_exact,
        }[precision]

    @property
    def resident_bytes(self) -> int:
        """Bytes of anchor codes, and of segments loaded in part, kept for refining."""
        return sum(item.nbytes for kept in (self._codes, self._aside) for item in kept.values())

    def release(self) -> None:
        """Drop what is kept for refining: the cache stays as it is."""
        self._codes.clear()
        self._aside.clear()

    def anchor(self, payload: SegmentPayload) -> None:
        """Take one segment of the Anchor, in file order; see `anchor_all`."""
        self.anchor_all((payload,))

    def anchor_all(self, payloads: Iterable[SegmentPayload]) -> None:
        """Take segments of the Anchor, in file order.

        Raises:
            ContentError: one holds what the SPEC forbids.
        """
        for payload in _shared_out(self._decode_anchor, self._codes_among(payloads), payloads):
            kept = payload.segment.coded[0].coding.has_residual and self._refines
            if kept:
                self._codes[_place(payload)] = payload.raw
            if not (kept and self._skip_anchor):
                self._anchor_left -= 1

    def refine(self, payload: SegmentPayload) -> None:
        """Take one segment of the Residual; see `refine_all`."""
        self.refine_all((payload,))

    def refine_all(self, payloads: Iterable[SegmentPayload]) -> None:
        """Take segments of the Residual, in file order: the tokens they cover go to full or exact precision, in place.

        Raises:
            ContentError: one holds what the SPEC forbids.
            InputError: exact values do not fit the destination's dtype.
        """
        # Corrections start from full values, which come first (SPEC 4, rule 6).
        for part, own in groupby(payloads, key=lambda payload: payload.segment.plan.part):
            if part == "exact":
                for _ in _shared_out(self._correct, own, payloads):
                    self._exact_left -= 1
                continue
            for _ in _shared_out(self._decode_full, self._with_codes(own), payloads):
                self._full_left -= 1
                if self._skip_anchor:
                    self._anchor_left -= 1

    def _codes_among(self, payloads: Iterable[SegmentPayload]) -> Iterator[SegmentPayload]:
        """The segments that hold codes or raw values; those between are taken here, for later ones need them."""
        for payload in payloads:
            if payload.segment.plan.part in ("anchor", "raw"):
                self._tables_of(payload)
                yield payload
            else:
                self._explain(payload)

    def _explain(self, payload: SegmentPayload) -> None:
        """Take an array that comes before the codes it explains, or sink values."""
        segment, raw = payload.segment, payload.raw
        part, ref = segment.plan.part, segment.plan.tensor
        span, shared = self.extent.spans[payload.span], self._shared[payload.span]
        check_content(span.header, segment, raw)
        if part == "sink":
            assert ref is not None
            dtype, loaded = span.header.dtype, span.loaded_sinks(ref)
            sink = raw.view(f"<i{DTYPE_BYTES[dtype]}").reshape(ref.sinks, ref.spec.heads, ref.spec.head_dim)
            # Turned by numpy: torch would let go of the interpreter lock, which others are waiting for, at every step.
            heads_first = torch.from_numpy(sink[:loaded].transpose(1, 0, 2).copy()).view(TORCH_DTYPES[dtype])
            write(self._positions(payload.span, ref, 0, loaded), heads_first)
        elif part == "mean":
            assert ref is not None
            shared.means[ref.ordinal] = (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
        elif part == "order":
            assert ref is not None
            shared.orders[ref.ordinal] = raw.view("<u2")
        elif part == "steps":
            shared.steps = raw.view("<f4").reshape(-1, 2)
        elif part == "codebook":
            shared.codebooks[segment.plan.name] = raw.view("<f4")

    def _with_codes(self, payloads: Iterable[SegmentPayload]) -> Iterator[tuple[SegmentPayload, U8]]:
        for payload in payloads:
            # Freed as refined: the codes are not needed again.
            yield payload, self._codes.pop(_place(payload))

    def _decode_anchor(self, payload: SegmentPayload) -> SegmentPayload:
        if not (self._skip_anchor and payload.segment.coded[0].coding.has_residual):
            self._dequantize(payload, payload.raw, None)
        return payload

    def _decode_full(self, item: tuple[SegmentPayload, U8]) -> None:
        payload, codes = item
        self._dequantize(payload, codes, payload.raw)

    def _dequantize(self, payload: SegmentPayload, anchor: U8, residual: U8 | None) -> None:
        ref = payload.segment.coded[0]
        try:
            with self._written(payload) as out:
                tables = tables_at(self._tables_of(payload), payload.segment.coded[1].first_token)
                dequantize(anchor, residual, ref.coding, tables, ref.spec, self.extent.dtype, out)
        except ContentError as error:
            raise ContentError(f"{self._where(payload)}: {error.message}") from error

    def _correct(self, payload: SegmentPayload) -> None:
        """Full values, as the destination holds them, to the original."""
        dtype = TORCH_DTYPES[self.extent.dtype]
        with self._written(payload) as out:
            check_exact_destination(self.extent.dtype, out.dtype)
            # The destination holds values of the declared dtype, however wide it is itself: this cast is exact.
            full = read(out).to("cpu", dtype).contiguous().view(torch.int16).numpy().view(np.uint16).reshape(-1)
            try:
                patterns = unpack_exact(payload.raw, full, self.extent.dtype)
            except ValueError as error:
                raise ContentError(f"{self._where(payload)}: {error}") from error
            write(out, torch.from_numpy(patterns.view(np.int16)).view(dtype).view(out.shape))

    @contextmanager
    def _written(self, payload: SegmentPayload) -> Iterator[Out]:
        """Where the values of a segment go: aside, if it is loaded in part, and what is loaded is copied then."""
        ref, plan = payload.segment.coded
        loaded = self.extent.spans[payload.span].loaded_tokens(ref, plan)
        first = ref.sinks + plan.first_token
        place = self._positions(payload.span, ref, first, first + loaded)
        if loaded == plan.tokens:
            yield place
            return
        aside = self._aside.get(_place(payload))
        if aside is None:
            shape = (ref.spec.heads, plan.tokens, ref.spec.head_dim)
            aside = self._aside[_place(payload)] = torch.empty(shape, dtype=TORCH_DTYPES[self.extent.dtype])
        yield aside
        write(place, aside[:, :loaded])

    def _positions(self, number: int, ref: TensorRef, start: int, stop: int) -> Out:
        """The destination's part for the positions [start, stop) of a tensor, counted from its first in this span."""
        offset = self.extent.offset(number, ref.layer)
        return span(self._destination.target(ref.layer, ref.name), offset + start, offset + stop)

    def _where(self, payload: SegmentPayload) -> str:
        ref, plan = payload.segment.coded
        return f"{payload.segment.plan.name} at token {ref.sinks + plan.first_token}"

    def _tables_of(self, payload: SegmentPayload) -> Tables:
        ref, shared = payload.segment.coded[0], self._shared[payload.span]
        if ref.ordinal not in shared.tables:
            shared.tables[ref.ordinal] = _build_tables(ref, shared)
        return shared.tables[ref.ordinal]


def _place(payload: SegmentPayload) -> _Place:
    ref, plan = payload.segment.coded
    return payload.span, ref.ordinal, plan.first_token


def _build_tables(ref: TensorRef, shared: _Shared) -> Tables:
    if isinstance(ref.coding, EntropyCoding):
        assert shared.steps is not None
        step, half_step = shared.steps[ref.ordinal]
        return EntropyTables(
            mean=shared.means[ref.ordinal],
            order=shared.orders[ref.ordinal],
            step=step,
            half_step=half_step,
            transform=Transform.of(shared.basis, shared.header, ref) if shared.basis is not None else None,
        )
    if isinstance(ref.coding, FixedCoding):
        prefix = f"codebook.{ref.coding.codebook}"
        return FixedTables(
            anchor=shared.codebooks[f"{prefix}.anchor"],
            full=shared.codebooks.get(f"{prefix}.full"),
            scale=shared.codebooks.get(f"{prefix}.scale"),
            offset=shared.codebooks.get(f"{prefix}.offset"),
        )
    return None


class KVDestination:
    """Plain tensors in the cache's declared dtype."""

    def __init__(self, extent: Extent) -> None:
        dtype = TORCH_DTYPES[extent.dtype]
        self.kv = KV(
            layers=[
                KVLayer(
                    tensors={
                        name: torch.empty(spec.heads, layer.tokens, spec.head_dim, dtype=dtype)
                        for name, spec in layer.tensors.items()
                    },
                    start=layer.start,
                    stop=layer.stop,
                    kind=layer.kind,
                    window=layer.window,
                )
                for layer in extent.layers
            ],
            start=extent.start,
            stop=extent.stop,
        )

    def target(self, layer: int, tensor: TensorName) -> Tensor:
        """The tensor itself, [H, T, D]."""
        return self.kv.layers[layer].tensors[tensor]


def load(
    url: Url,
    *,
    tokens: int | None = None,
    precision: Precision = "full",
    link: Link | None = None,
    options: FetchOptions | None = None,
) -> KV:
    """Fetch and decode a cache and those that it continues; tensors are [H, T, D] in its declared dtype.

    `tokens` loads the first so many only, `link` simulates a slower one, `options` say how to fetch.

    Raises:
        InputError: exact precision is asked of a cache that does not hold it, or so many tokens cannot be loaded.
        CacheNotFoundError, FetchError: the store cannot deliver it.
        FormatError: it is damaged.
    """
    with open_cache(url, tokens=tokens, link=link, options=options) as reader:
        destination = KVDestination(reader.extent)
        destination.kv.precision = decode_into(reader, destination, precision)
        ids = reader.token_ids()
        destination.kv.token_ids = ids.tolist() if ids is not None else None
    return destination.kv


def decode_into(reader: CacheReader, destination: Destination, precision: Precision) -> Precision:
    """Fetch and decode an open cache into `destination`, to `precision` or the best it has.

    Returns `precision`, or "anchor" if the Residual cannot be fetched and the reader's options allow for that.

    Raises:
        InputError: there is no such precision, or cache or destination cannot hold exact values.
        CacheNotFoundError, FetchError: the store cannot deliver it.
        FormatError: it is damaged.
    """
    try:
        for _ in decode_stages(reader, destination, (precision,)):
            pass
    except (CacheNotFoundError, FetchError):
        if reader.residual_problem is None or reader.options.if_residual_unavailable == "error":
            raise
        # What has been refined by now would make the values a mixture.
        return decode_into(reader, destination, "anchor")
    return precision


def decode_stages(
    reader: CacheReader, destination: Destination, precisions: Sequence[Precision]
) -> Iterator[Precision]:
    """As `decode_into`, with stops on the way: yields each of `precisions` once all of the destination holds it.

    Where anchor and full are the same only the latter is yielded, and of a cache without Residual just that, whatever
    was asked for: its one precision (SPEC 3). The last of `precisions` is the aim.
    """
    reader.wait_for_writer()
    extent, aim = reader.extent, precisions[-1]
    for precision in precisions:
        check_precision(extent, precision)
    if aim == "exact":
        check_exact_destination(extent.dtype, destination.target(0, next(iter(extent.layers[0].tensors))).dtype)
    decoder = CacheDecoder(
        extent,
        destination,
        skip_anchor="anchor" not in precisions,
        refines=aim != "anchor",
        bases=reader.bases(),
    )
    decoder.anchor_all(reader.stream_anchor())
    if not extent.has_residual or (decoder.complete_full and "full" in precisions):
        yield "full"
    elif "anchor" in precisions:
        yield "anchor"
    if aim == "anchor" or not extent.has_residual:
        return
    stream = reader.start_residual(exact=aim == "exact")
    for part, payloads in groupby(stream, key=lambda payload: payload.segment.plan.part):
        decoder.refine_all(payloads)
        reached: Precision = "exact" if part == "exact" else "full"
        if reached in precisions:
            yield reached


def check_precision(extent: Extent, precision: Precision) -> None:
    """Refuse, with an InputError, a precision that there is not, or that a cache cannot reach."""
    if precision not in get_args(Precision):
        raise InputError(f"precision is {precision!r}", hint=f"use one of {', '.join(get_args(Precision))}")
    if precision == "exact" and not extent.has_exact:
        raise InputError("the cache has no exact section", hint="make one with: lynxkv encode --exact")


def check_exact_destination(stored: Dtype, dtype: torch.dtype) -> None:
    """Refuse, with an InputError, a destination too narrow for full values: correcting starts from their very bits."""
    if not holds_exact(stored, dtype):
        raise InputError(
            f"a model in {str(dtype).removeprefix('torch.')} cannot hold the exact values of a {stored} cache",
            hint="load the model in float32, or in the dtype of the cache",
        )


def holds_exact(stored: Dtype, dtype: torch.dtype) -> bool:
    """Whether a destination's dtype holds every value of a cache's."""
    return dtype in (torch.float32, torch.float64, TORCH_DTYPES[stored])


def _shared_out(work: Callable[[T], R], items: Iterable[T], payloads: Iterable[SegmentPayload]) -> Iterator[R]:
    """`work` on the items made of `payloads`. A segment alone stays on this thread: kernels split it themselves."""
    if isinstance(payloads, Sequence) and len(payloads) == 1:
        yield from map(work, items)
        return
    with torch_alone():
        yield from map_ordered(work, items, threads=threads())
