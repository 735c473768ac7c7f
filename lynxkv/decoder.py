"""Checked segments to KV tensors, in place: the Anchor makes a cache, the Residual refines it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Protocol, TypeVar, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lynxkv.errors import CacheNotFoundError, ContentError, FetchError, InputError
from lynxkv.fetch import CacheReader, FetchOptions, SegmentPayload, open_cache
from lynxkv.format.content import check_content
from lynxkv.format.index import Segment
from lynxkv.kernels import EntropyTables, FixedTables, Out, Tables, dequantize, unpack_exact
from lynxkv.kernels.paged import read, span, write
from lynxkv.kernels.rounding import TORCH_DTYPES
from lynxkv.kv import KV, KVLayer
from lynxkv.layout import CacheHeader, EntropyCoding, FixedCoding, Precision, SegmentPlan, TensorName, TensorRef
from lynxkv.parallel import map_ordered, threads, torch_alone
from lynxkv.store import Link, Url

U8 = npt.NDArray[np.uint8]
F32 = npt.NDArray[np.float32]
T = TypeVar("T")
R = TypeVar("R")


class Destination(Protocol):
    """Where decoded tensors go: a live cache, an engine's pages, or plain tensors."""

    def target(self, layer: int, tensor: TensorName) -> Out:
        """A view [H, stop - start, D], any float dtype, or pages, for the positions [start, stop) the layer holds."""
        ...


@dataclass
class _Shared:
    """Arrays of the Anchor that come before the codes they explain."""

    codebooks: dict[str, F32] = field(default_factory=dict)
    steps: F32 | None = None
    means: dict[int, F32] = field(default_factory=dict)
    orders: dict[int, npt.NDArray[np.uint16]] = field(default_factory=dict)


class CacheDecoder:
    """Decodes segments into a destination, and keeps the anchor codes that refining needs.

    Segments may only come checked, from `SegmentStream`. Call it from one thread, between model steps; given several
    segments at once it decodes them on as many threads as torch has.

    Args:
        skip_anchor: tensors that have a Residual are written at full precision only; until then their codes are kept.
        refines: False keeps no codes: nothing will be refined.
    """

    def __init__(
        self, header: CacheHeader, destination: Destination, *, skip_anchor: bool = False, refines: bool = True
    ) -> None:
        self.header = header
        self._destination = destination
        self._skip_anchor, self._refines = skip_anchor, refines
        self._shared = _Shared()
        self._tables: dict[int, Tables] = {}
        self._codes: dict[tuple[int, int], U8] = {}
        self._anchor_left = sum(sum(1 for _ in ref.segments()) for ref in header.tensors)
        self._full_left = sum(sum(1 for _ in ref.segments()) for ref in header.tensors if ref.coding.has_residual)
        self._exact_left = sum(sum(1 for _ in ref.segments()) for ref in header.tensors if ref.coding.exact)

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
        """Bytes of anchor codes kept for refining."""
        return sum(codes.nbytes for codes in self._codes.values())

    def release(self) -> None:
        """Drop the codes kept for refining: the cache stays as it is."""
        self._codes.clear()

    def anchor(self, payload: SegmentPayload) -> None:
        """Take one segment of the Anchor, in file order; see `anchor_all`."""
        self.anchor_all((payload,))

    def anchor_all(self, payloads: Iterable[SegmentPayload]) -> None:
        """Take segments of the Anchor, in file order.

        Raises:
            ContentError: one holds what the SPEC forbids.
        """
        for ref, tokens, codes in _shared_out(self._decode_anchor, self._codes_among(payloads), payloads):
            kept = ref.coding.has_residual and self._refines
            if kept:
                self._codes[ref.ordinal, tokens.first_token] = codes
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
                self._tables_of(payload.segment.coded[0])
                yield payload
            else:
                self._explain(payload)

    def _explain(self, payload: SegmentPayload) -> None:
        """Take an array that comes before the codes it explains, or sink values."""
        segment, raw = payload.segment, payload.raw
        part, ref = segment.plan.part, segment.plan.tensor
        check_content(self.header, segment, raw)
        if part == "sink":
            assert ref is not None
            sink = torch.from_numpy(raw.copy()).view(TORCH_DTYPES[self.header.dtype])
            sink = sink.view(ref.sinks, ref.spec.heads, ref.spec.head_dim)
            write(span(self._destination.target(ref.layer, ref.name), 0, ref.sinks), sink.transpose(0, 1))
        elif part == "mean":
            assert ref is not None
            self._shared.means[ref.ordinal] = (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
        elif part == "order":
            assert ref is not None
            self._shared.orders[ref.ordinal] = raw.view("<u2")
        elif part == "steps":
            self._shared.steps = raw.view("<f4").reshape(-1, 2)
        elif part == "codebook":
            self._shared.codebooks[segment.plan.name] = raw.view("<f4")

    def _with_codes(self, payloads: Iterable[SegmentPayload]) -> Iterator[tuple[SegmentPayload, U8]]:
        for payload in payloads:
            ref, tokens = payload.segment.coded
            # Freed as refined: the codes are not needed again.
            yield payload, self._codes.pop((ref.ordinal, tokens.first_token))

    def _decode_anchor(self, payload: SegmentPayload) -> tuple[TensorRef, SegmentPlan, U8]:
        ref, tokens = payload.segment.coded
        if not (self._skip_anchor and ref.coding.has_residual):
            self._dequantize(payload.segment, payload.raw, None)
        return ref, tokens, payload.raw

    def _decode_full(self, item: tuple[SegmentPayload, U8]) -> None:
        payload, codes = item
        self._dequantize(payload.segment, codes, payload.raw)

    def _dequantize(self, segment: Segment, anchor: U8, residual: U8 | None) -> None:
        ref, tokens = segment.coded
        start = ref.sinks + tokens.first_token
        out = span(self._destination.target(ref.layer, ref.name), start, start + tokens.tokens)
        try:
            dequantize(anchor, residual, ref.coding, self._tables_of(ref), ref.spec, self.header.dtype, out)
        except ContentError as error:
            raise ContentError(f"{segment.plan.name} at token {start}: {error.message}") from error

    def _correct(self, payload: SegmentPayload) -> None:
        """Full values, as the destination holds them, to the original."""
        ref, tokens = payload.segment.coded
        start = ref.sinks + tokens.first_token
        out = span(self._destination.target(ref.layer, ref.name), start, start + tokens.tokens)
        dtype = TORCH_DTYPES[self.header.dtype]
        check_exact_destination(self.header, out.dtype)
        # The destination holds values of the declared dtype, however wide it is itself: this cast is exact.
        full = read(out).to("cpu", dtype).contiguous().view(torch.int16).numpy().view(np.uint16).reshape(-1)
        try:
            patterns = unpack_exact(payload.raw, full, self.header.dtype)
        except ValueError as error:
            raise ContentError(f"{payload.segment.plan.name} at token {start}: {error}") from error
        write(out, torch.from_numpy(patterns.view(np.int16)).view(dtype).view(out.shape))

    def _tables_of(self, ref: TensorRef) -> Tables:
        if ref.ordinal not in self._tables:
            self._tables[ref.ordinal] = self._build_tables(ref)
        return self._tables[ref.ordinal]

    def _build_tables(self, ref: TensorRef) -> Tables:
        shared = self._shared
        if isinstance(ref.coding, EntropyCoding):
            assert shared.steps is not None
            step, half_step = shared.steps[ref.ordinal]
            return EntropyTables(
                mean=shared.means[ref.ordinal],
                order=shared.orders[ref.ordinal],
                step=step,
                half_step=half_step,
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

    def __init__(self, header: CacheHeader) -> None:
        dtype = TORCH_DTYPES[header.dtype]
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
                for layer in header.layers
            ],
            start=header.tokens.start,
            stop=header.tokens.stop,
        )

    def target(self, layer: int, tensor: TensorName) -> Tensor:
        """The tensor itself, [H, T, D]."""
        return self.kv.layers[layer].tensors[tensor]


def load(
    url: Url, *, precision: Precision = "full", link: Link | None = None, options: FetchOptions | None = None
) -> KV:
    """Fetch and decode a whole cache; tensors are [H, T, D] in the cache's declared dtype.

    `link` simulates a slower one, `options` say how to fetch.

    Raises:
        InputError: exact precision is asked of a cache that does not hold it.
        CacheNotFoundError, FetchError: the store cannot deliver it.
        FormatError: it is damaged.
    """
    with open_cache(url, link=link, options=options) as reader:
        destination = KVDestination(reader.header)
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
    header, aim = reader.header, precisions[-1]
    for precision in precisions:
        check_precision(header, precision)
    if aim == "exact":
        check_exact_destination(header, destination.target(0, next(iter(header.layers[0].tensors))).dtype)
    decoder = CacheDecoder(header, destination, skip_anchor="anchor" not in precisions, refines=aim != "anchor")
    decoder.anchor_all(reader.stream_anchor())
    if header.residual is None or (decoder.complete_full and "full" in precisions):
        yield "full"
    elif "anchor" in precisions:
        yield "anchor"
    if aim == "anchor" or header.residual is None:
        return
    stream = reader.start_residual(exact=aim == "exact")
    for part, payloads in groupby(stream, key=lambda payload: payload.segment.plan.part):
        decoder.refine_all(payloads)
        reached: Precision = "exact" if part == "exact" else "full"
        if reached in precisions:
            yield reached


def check_precision(header: CacheHeader, precision: Precision) -> None:
    """Refuse, with an InputError, a precision that there is not, or that a cache cannot reach."""
    if precision not in get_args(Precision):
        raise InputError(f"precision is {precision!r}", hint=f"use one of {', '.join(get_args(Precision))}")
    if precision == "exact" and not header.has_exact:
        raise InputError("the cache has no exact section", hint="make one with: lynxkv encode --exact")


def check_exact_destination(header: CacheHeader, dtype: torch.dtype) -> None:
    """Refuse, with an InputError, a destination too narrow for full values: correcting starts from their very bits."""
    if dtype not in (torch.float32, torch.float64, TORCH_DTYPES[header.dtype]):
        raise InputError(
            f"a model in {str(dtype).removeprefix('torch.')} cannot hold the exact values of a {header.dtype} cache",
            hint="load the model in float32, or in the dtype of the cache",
        )


def _shared_out(work: Callable[[T], R], items: Iterable[T], payloads: Iterable[SegmentPayload]) -> Iterator[R]:
    """`work` on the items made of `payloads`. A segment alone stays on this thread: kernels split it themselves."""
    if isinstance(payloads, Sequence) and len(payloads) == 1:
        yield from map(work, items)
        return
    with torch_alone():
        yield from map_ordered(work, items, threads=threads())
