"""The segment index (SPEC 5.1) and the arrays that a document calls for (SPEC 4.1, 4.6)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt

from lynxkv.errors import HeaderError
from lynxkv.format.container import ITEM_BYTES, ArrayInfo
from lynxkv.format.limits import MAX_RAW_BYTES
from lynxkv.layout import (
    ALIGNMENT_BYTES,
    ESCAPE_BYTES,
    CacheHeader,
    EntropyCoding,
    FixedCoding,
    SegmentPlan,
    TensorRef,
    roundup,
)

INDEX_DTYPE = np.dtype(
    [
        ("offset", "<u8"),
        ("stored_bytes", "<u4"),
        ("raw_bytes", "<u4"),
        ("array", "<u4"),
        ("first_token", "<u4"),
        ("compression", "u1"),
        ("reserved", "u1", 7),
        ("sha256", "u1", 32),
    ]
)
STORED, ZSTD = 0, 1
_SAFETENSORS_DTYPE = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}


@dataclass(frozen=True, kw_only=True)
class ArrayPlan:
    """An array as the document implies it. `shape` None: sized by its segments, U8."""

    name: str
    part: str
    dtype: str = "U8"
    shape: tuple[int, ...] | None = None
    tensor: TensorRef | None = None
    raw_bytes: tuple[int, ...] = ()
    plans: tuple[SegmentPlan, ...] = ()

    @property
    def may_compress(self) -> bool:
        return self.shape is None


@dataclass(frozen=True, kw_only=True)
class Segment:
    """One checked index entry: where stored bytes are, and what they hold."""

    plan: ArrayPlan
    tokens: SegmentPlan | None
    offset: int
    stored_bytes: int
    raw_bytes: int
    compression: int
    sha256: bytes

    @property
    def stop(self) -> int:
        return self.offset + self.stored_bytes

    @property
    def coded(self) -> tuple[TensorRef, SegmentPlan]:
        """The tensor and the tokens of a segment of codes or values."""
        if self.plan.tensor is None or self.tokens is None:
            raise TypeError(f"{self.plan.name} holds no tokens")
        return self.plan.tensor, self.tokens


def _typed(name: str, part: str, dtype: str, shape: tuple[int, ...], tensor: TensorRef | None = None) -> ArrayPlan:
    raw = prod(shape) * ITEM_BYTES[dtype]
    return ArrayPlan(name=name, part=part, dtype=dtype, shape=shape, tensor=tensor, raw_bytes=(raw,))


def anchor_plans(header: CacheHeader) -> Iterator[ArrayPlan]:
    """The indexed arrays of the Anchor, in file order (SPEC 4.6)."""
    if header.prefix_blocks:
        yield _typed("prefix_sha256", "prefix", "U8", (header.prefix_blocks, 32))
    yield from _codebook_plans(header)
    if any(isinstance(ref.coding, EntropyCoding) for ref in header.tensors):
        yield _typed("steps", "steps", "F32", (len(header.tensors), 2))
    if header.logits_tokens:
        yield _typed("logits", "logits", "F32", (header.logits_tokens,))
    dtype = _SAFETENSORS_DTYPE[header.dtype]
    for ref in header.tensors:
        spec = ref.spec
        if ref.sinks:
            yield _typed(f"{ref.key}.sink", "sink", dtype, (ref.sinks, spec.heads, spec.head_dim), ref)
        if not ref.coded_tokens:
            continue
        if isinstance(ref.coding, EntropyCoding):
            yield _typed(f"{ref.key}.mean", "mean", "BF16", (spec.heads, spec.head_dim), ref)
            yield _typed(f"{ref.key}.order", "order", "U16", (spec.channels,), ref)
        plans = tuple(ref.segments())
        raw_bytes = tuple(ref.coding.anchor_bytes(plan.tokens, spec, header.dtype) for plan in plans)
        if ref.coding.scheme == "raw":
            yield ArrayPlan(
                name=f"{ref.key}.raw",
                part="raw",
                dtype=dtype,
                shape=(ref.coded_tokens, spec.heads, spec.head_dim),
                tensor=ref,
                raw_bytes=raw_bytes,
                plans=plans,
            )
        else:
            yield ArrayPlan(name=f"{ref.key}.anchor", part="anchor", tensor=ref, raw_bytes=raw_bytes, plans=plans)
    if header.tokens.stored:
        yield _typed("token_ids", "token_ids", "U32", (header.tokens.count,))


def residual_plans(header: CacheHeader) -> Iterator[ArrayPlan]:
    """The indexed arrays of the Residual: keys of all layers, then values, then exact in the same way (SPEC 4.6)."""
    keys = [ref for ref in header.tensors if ref.coded_tokens and ref.name != "v"]
    values = [ref for ref in header.tensors if ref.coded_tokens and ref.name == "v"]
    for ref in keys + values:
        if ref.coding.scheme != "raw" and ref.coding.has_residual:
            plans = tuple(ref.segments())
            raw_bytes = tuple(ref.coding.residual_bytes(plan.tokens, ref.spec) for plan in plans)
            yield ArrayPlan(name=f"{ref.key}.residual", part="residual", tensor=ref, raw_bytes=raw_bytes, plans=plans)
    for ref in keys + values:
        if ref.coding.exact:
            plans = tuple(ref.segments())
            raw_bytes = tuple(2 * plan.tokens * ref.spec.channels for plan in plans)
            yield ArrayPlan(name=f"{ref.key}.exact", part="exact", tensor=ref, raw_bytes=raw_bytes, plans=plans)


def _codebook_plans(header: CacheHeader) -> Iterator[ArrayPlan]:
    seen: dict[str, FixedCoding] = {}
    for coding in header.codings:
        if not isinstance(coding, FixedCoding):
            continue
        first = seen.setdefault(coding.codebook, coding)
        if first is not coding:
            if _tables(first) != _tables(coding):
                raise HeaderError(f"codebook {coding.codebook!r} is used by codings of different shape")
            continue
        for part, size in _tables(coding).items():
            yield _typed(f"codebook.{coding.codebook}.{part}", "codebook", "F32", (size,))


def _tables(coding: FixedCoding) -> dict[str, int]:
    sizes = {"anchor": 2**coding.anchor_bits}
    if coding.residual_bits:
        sizes["full"] = 2 ** (coding.anchor_bits + coding.residual_bits)
    if coding.chunk_dtype == "u8":
        sizes["scale"] = 256
        if coding.offset:
            sizes["offset"] = 256
    return sizes


def segments_of(
    plans: list[ArrayPlan], arrays: tuple[ArrayInfo, ...], entries: npt.NDArray[np.void], *, what: str
) -> tuple[Segment, ...]:
    """Match plans, arrays and index entries, all in file order, and return the segments.

    `arrays` are all arrays of the shard; the first two are `header_sha256` and `index`.

    Raises:
        HeaderError: an array or an entry is not the one the document implies (SPEC 4.3, 4.6, 5.1).
    """
    wanted = sum(len(plan.raw_bytes) for plan in plans)
    if len(entries) != wanted:
        raise HeaderError(f"{what}: the index has {len(entries)} segments, the document implies {wanted}")
    if entries["reserved"].any():
        raise HeaderError(f"{what}: reserved bytes of the index are not zero")
    segments: list[Segment] = []
    position, pads = 2, 0
    for plan in plans:
        array = arrays[position] if position < len(arrays) else None
        if array is None or array.name != plan.name:
            raise HeaderError(f"{what}: expected array {plan.name!r}, found {array.name if array else 'none'!r}")
        if array.dtype != plan.dtype or (array.shape != plan.shape if plan.shape else len(array.shape) != 1):
            raise HeaderError(f"{what}: array {plan.name!r} is {array.dtype} {array.shape}")
        at = array.start
        for number, expected in enumerate(plan.raw_bytes):
            tokens = plan.plans[number] if plan.plans else None
            segment = _segment(plan, tokens, entries[len(segments)], expected, at, position, what)
            segments.append(segment)
            at = segment.stop if plan.shape else roundup(segment.stop, ALIGNMENT_BYTES)
        if at != array.stop:
            raise HeaderError(f"{what}: array {plan.name!r} ends at {array.stop}, its segments at {at}")
        position += 1
        pad = -array.stop % ALIGNMENT_BYTES
        if pad:
            info = arrays[position] if position < len(arrays) else None
            if info is None or info.name != f"pad.{pads}" or info.dtype != "U8" or info.shape != (pad,):
                raise HeaderError(f"{what}: expected a pad of {pad} bytes after {plan.name!r}")
            position, pads = position + 1, pads + 1
    if position != len(arrays):
        raise HeaderError(f"{what}: array {arrays[position].name!r} is not called for")
    return tuple(segments)


def _segment(
    plan: ArrayPlan,
    tokens: SegmentPlan | None,
    entry: np.void,
    expected: int,
    at: int,
    position: int,
    what: str,
) -> Segment:
    offset, stored, raw = int(entry["offset"]), int(entry["stored_bytes"]), int(entry["raw_bytes"])
    where = f"{what}: segment {tokens.first_token if tokens else 0} of {plan.name!r}"
    if offset != at or int(entry["array"]) != position:
        raise HeaderError(f"{where}: the index points to byte {offset} of array {entry['array']}")
    if int(entry["first_token"]) != (tokens.first_token if tokens else 0):
        raise HeaderError(f"{where}: the index names token {entry['first_token']}")
    escapes = 0
    if plan.part == "anchor" and plan.tensor is not None and isinstance(plan.tensor.coding, EntropyCoding):
        escapes = raw - expected
        if escapes % ESCAPE_BYTES or not 0 <= escapes <= expected * ESCAPE_BYTES:
            raise HeaderError(f"{where}: {raw} raw bytes, not {expected} and whole escapes")
    if raw - escapes != expected or raw > MAX_RAW_BYTES or not raw:
        raise HeaderError(f"{where}: {raw} raw bytes, expected {expected} and at most {MAX_RAW_BYTES}")
    compression = int(entry["compression"])
    if compression not in (STORED, ZSTD) or (compression == ZSTD and not plan.may_compress):
        raise HeaderError(f"{where}: compression {compression} is not allowed")
    if not stored or (compression == STORED and stored != raw):
        raise HeaderError(f"{where}: {stored} bytes stored for {raw} uncompressed ones")
    return Segment(
        plan=plan,
        tokens=tokens,
        offset=offset,
        stored_bytes=stored,
        raw_bytes=raw,
        compression=compression,
        sha256=entry["sha256"].tobytes(),
    )
