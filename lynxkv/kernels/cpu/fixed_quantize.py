"""Values to fixed-rate segments (SPEC 8.3), with the reference's arithmetic step by step.

    page   mean = high / 2 + low / 2,  scale = max(high - mean, mean - low),  n = (x - mean) / scale
    chunk  offset = stored(high / 2 + low / 2),  scale = stored(max |n - offset| / peak)
    code   of the bucket that (n - offset) / scale falls in

Rounding keeps the order of values, so the largest |n - offset| is that of one of a chunk's extremes. A page of one head
is read twice, the second time from a cache, and a chunk of it waits in f32 for its scale.

Even edges are found by arithmetic: a guess, which rounding can only make one too high, and the comparison that tells.
Otherwise the upper half of a value's bits names a cell no wider than 1/128 of the value; where a cell holds one edge at
most, one look-up tells which lower halves are beyond it, else each edge takes a comparison.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from lynxkv.kernels import reference
from lynxkv.kernels.cpu.bits import FP32, code_of, helper, inlined, jit, upper_half_of, wide_vectors, widened
from lynxkv.kernels.cpu.lanes import (
    LANES,
    floor,
    gathered,
    is_below,
    largest,
    load,
    magnitude,
    maximum,
    minimum,
    smallest,
    spread,
    store,
    u8_of_u32,
    u32_of_f32,
    where_positive,
    within,
)
from lynxkv.kernels.cpu.memory import U8, source
from lynxkv.kernels.cpu.packing import pack_rows
from lynxkv.kernels.cpu.threads import run_split
from lynxkv.kernels.tables import F32, Cells, FixedTables
from lynxkv.layout import FixedCoding, TensorSpec

_EVEN, _CELLS, _SEARCH = 0, 1, 2
# Rows over which extremes stay in registers: few enough to stay in the first-level cache for the next channels.
_ROWS = 16
_BLOCK_ELEMENTS = 4096


@helper
def _extremes(x: Any, at: int, stride: int, rows: int, dim: int, kind: int, high: Any, low: Any) -> None:
    """Largest and smallest of each channel in `rows` rows of x, u16 or f32 elements that `kind` describes."""
    wide_vectors()
    for first in range(0, rows, _ROWS):
        for d in range(0, dim, LANES):
            top = widened(x, at + first * stride + d, dim - d, kind)
            bottom = top
            for i in range(first + 1, min(first + _ROWS, rows)):
                value = widened(x, at + i * stride + d, dim - d, kind)
                top, bottom = maximum(top, value), minimum(bottom, value)
            if first:
                top, bottom = maximum(top, load(high, d, LANES)), minimum(bottom, load(low, d, LANES))
            store(high, d, top, LANES)
            store(low, d, bottom, LANES)


@inlined
def _middle(high: Any, low: Any) -> Any:
    """Halves first: the sum of two large values would overflow. Adding 0 leaves no negative zero."""
    half = spread(np.float32(0.5))
    return high * half + low * half + spread(np.float32(0))


@inlined
def _reach(high: Any, low: Any, offset: Any) -> Any:
    return maximum(magnitude(high - offset), magnitude(low - offset))


@inlined
def _nearest(value: Any, search: Any, round_up: bool) -> Any:
    """Of each value the least entry that is not below it, the last if there is none; or else the nearest one."""
    below, entries, most = search
    at = gathered(below, upper_half_of(value))
    for _ in range(most):
        at = at + is_below(gathered(entries, at), value)
    at = minimum(at, spread(np.uint32(len(entries) - most - 2)))
    if not round_up:
        one = spread(np.uint32(1))
        lower = maximum(at, one) - one
        at = at - is_below(magnitude(value - gathered(entries, lower)), magnitude(gathered(entries, at) - value))
    return at


@inlined
def _stored(value: Any, search: Any, round_up: bool, at: int, count: int, as_f32: Any, as_u8: Any) -> Any:
    """Store `count` parameters of a chunk, as f32 or by the table, and take what they decode to."""
    if len(search[0]):
        index = _nearest(value, search, round_up)
        store(as_u8, at, u8_of_u32(index), count)
        return gathered(search[1], index)
    store(as_f32, at, value, count)
    return value


@inlined
def _code(value: Any, how: int, even: Any, cells: Any, search: Any, buckets: Any) -> Any:
    """The code of the bucket that each value falls in."""
    if how == _EVEN:
        slope, base, last = spread(even[0]), spread(even[1]), spread(even[2])
        guess = floor((value - base) * spread(np.float32(1) / even[0]))
        guess = minimum(maximum(guess, spread(np.float32(0))), last)
        reached = u32_of_f32(guess) + spread(np.uint32(1))
        return u8_of_u32(reached - is_below(value, guess * slope + base))
    if how == _CELLS:
        return code_of(gathered(cells, upper_half_of(value)), value)
    below, edges, most = search
    at = gathered(below, upper_half_of(value))
    for _ in range(most):
        at = at + spread(np.uint32(1)) - is_below(value, gathered(edges, at))
    return gathered(buckets, at)


@helper
def _clear_padding(codes: Any, padded: int, dim: int) -> None:
    for i in range(len(codes) // padded):
        for d in range(dim, padded):
            codes[i * padded + d] = 0


@jit
def _encode_pages(
    start: int,
    stop: int,
    block_tokens: int,
    x: Any,
    head_stride: int,
    token_stride: int,
    kind: int,
    heads: int,
    dim: int,
    tokens: int,
    chunk_tokens: int,
    page_tokens: int,
    has_offset: bool,
    peak: Any,
    scales: Any,
    offsets: Any,
    how: int,
    even: Any,
    cells: Any,
    search: Any,
    buckets: Any,
    bits: int,
    residual_bits: int,
    page_mean: Any,
    page_scale: Any,
    scale_f32: Any,
    scale_u8: Any,
    offset_f32: Any,
    offset_u8: Any,
    packed: Any,
    packed_low: Any,
) -> None:
    """Blocks [start, stop): pages, or without pages chunks, of one head; all heads of one after the other."""
    wide_vectors()
    padded = -(-dim // 8) * 8
    all_codes = np.zeros(block_tokens * padded + LANES, np.uint8)
    values = np.zeros(chunk_tokens * padded + LANES, np.float32)
    high, low = np.zeros(padded + LANES, np.float32), np.zeros(padded + LANES, np.float32)
    mean, reach = np.zeros(padded + LANES, np.float32), np.zeros(padded + LANES, np.float32)
    offset, scale = np.zeros(padded + LANES, np.float32), np.zeros(padded + LANES, np.float32)
    peaks = spread(peak)
    for block in range(start, stop):
        first, head = block // heads * block_tokens, block % heads
        count = min(block_tokens, tokens - first)
        codes = all_codes[: count * padded]
        rows = head * head_stride + first * token_stride
        if page_tokens:
            _extremes(x, rows, token_stride, count, dim, kind, high, low)
            for d in range(0, dim, LANES):
                top, bottom, at = load(high, d, LANES), load(low, d, LANES), (first // page_tokens * heads + head) * dim
                middle = _middle(top, bottom)
                farthest = maximum(top - middle, middle - bottom) + spread(np.float32(0))
                store(mean, d, middle, LANES)
                store(reach, d, farthest, LANES)
                store(page_mean, at + d, middle, dim - d)
                store(page_scale, at + d, farthest, dim - d)
        for begin in range(0, count, chunk_tokens):
            length = min(chunk_tokens, count - begin)
            for i in range(length):
                row = rows + (begin + i) * token_stride
                for d in range(0, dim, LANES):
                    value = widened(x, row + d, dim - d, kind)
                    if page_tokens:
                        unit = load(reach, d, LANES)
                        value = where_positive((value - load(mean, d, LANES)) / unit, unit)
                    store(values, i * padded + d, value, LANES)
            _extremes(values, 0, padded, length, dim, FP32, high, low)
            own = ((first + begin) // chunk_tokens * heads + head) * dim
            for d in range(0, dim, LANES):
                top, bottom, left = load(high, d, LANES), load(low, d, LANES), dim - d
                if has_offset:
                    middle = _stored(_middle(top, bottom), offsets, False, own + d, left, offset_f32, offset_u8)
                    store(offset, d, middle, LANES)
                farthest = _reach(top, bottom, load(offset, d, LANES)) / peaks
                store(scale, d, _stored(farthest, scales, True, own + d, left, scale_f32, scale_u8), LANES)
            for i in range(length):
                for d in range(0, dim, LANES):
                    unit = load(scale, d, LANES)
                    value = (load(values, i * padded + d, LANES) - load(offset, d, LANES)) / unit
                    code = _code(where_positive(value, unit), how, even, cells, search, buckets)
                    store(all_codes, (begin + i) * padded + d, code, LANES)
        _clear_padding(codes, padded, dim)
        row = first * heads + head
        if residual_bits:
            pack_rows(codes, tokens * heads, padded, residual_bits, row, heads, packed_low)
        pack_rows(codes, tokens * heads, padded, bits, row, heads, packed)


@jit
def _encode_tokens(
    start: int,
    stop: int,
    x: Any,
    head_stride: int,
    token_stride: int,
    kind: int,
    heads: int,
    dim: int,
    tokens: int,
    chunk_tokens: int,
    has_offset: bool,
    peak: Any,
    scales: Any,
    offsets: Any,
    how: int,
    even: Any,
    cells: Any,
    search: Any,
    buckets: Any,
    bits: int,
    residual_bits: int,
    scale_f32: Any,
    scale_u8: Any,
    offset_f32: Any,
    offset_u8: Any,
    packed: Any,
    packed_low: Any,
) -> None:
    """Chunks [start, stop), whose channels share a scale and an offset. Some chunks are packed at a time."""
    wide_vectors()
    padded = -(-dim // 8) * 8
    width = heads * padded
    at_once = max(1, _BLOCK_ELEMENTS // (chunk_tokens * width))
    all_codes = np.zeros(at_once * chunk_tokens * width + LANES, np.uint8)
    for some in range(start, stop, at_once):
        begin, end = some * chunk_tokens, min(min(some + at_once, stop) * chunk_tokens, tokens)
        for first in range(begin, end, chunk_tokens):
            last, chunk = min(first + chunk_tokens, end), first // chunk_tokens
            high, low = spread(np.float32(-np.inf)), spread(np.float32(np.inf))
            for token in range(first, last):
                for head in range(heads):
                    row = head * head_stride + token * token_stride
                    for d in range(0, dim, LANES):
                        value = widened(x, row + d, dim - d, kind)
                        if dim - d < LANES:
                            high = maximum(high, within(value, dim - d, high))
                            low = minimum(low, within(value, dim - d, low))
                        else:
                            high, low = maximum(high, value), minimum(low, value)
            high, low = spread(largest(high)), spread(smallest(low))
            offset = spread(np.float32(0))
            if has_offset:
                offset = _stored(_middle(high, low), offsets, False, chunk, 1, offset_f32, offset_u8)
            farthest = _reach(high, low, offset) / spread(peak)
            scale = _stored(farthest, scales, True, chunk, 1, scale_f32, scale_u8)
            for token in range(first, last):
                for head in range(heads):
                    row, to = head * head_stride + token * token_stride, ((token - begin) * heads + head) * padded
                    for d in range(0, dim, LANES):
                        value = where_positive((widened(x, row + d, dim - d, kind) - offset) / scale, scale)
                        store(all_codes, to + d, _code(value, how, even, cells, search, buckets), LANES)
        codes = all_codes[: (end - begin) * width]
        _clear_padding(codes, padded, dim)
        if residual_bits:
            pack_rows(codes, tokens * heads, padded, residual_bits, begin * heads, 1, packed_low)
        pack_rows(codes, tokens * heads, padded, bits, begin * heads, 1, packed)


def quantize_fixed(x: Tensor, coding: FixedCoding, tables: FixedTables) -> tuple[U8, U8 | None]:
    """Anchor and residual bytes of x [H, T, D], as the reference's."""
    shared = coding.group == "token"
    if shared and coding.page_tokens:
        return reference.quantize(x, coding, tables)  # no codec has both
    heads, tokens, dim = x.shape
    spec = TensorSpec(heads=heads, head_dim=dim, coding=0)
    place = source(x)
    sizes = coding.parts(tokens, spec)
    anchor = np.empty(sum(sizes.values()), np.uint8)
    part, at = {}, 0
    for name, size in sizes.items():
        part[name] = anchor[at : at + size]
        at += size
    residual = np.empty(coding.residual_bytes(tokens, spec), np.uint8)
    u8 = coding.chunk_dtype == "u8"
    scales, offsets = (tables.scale_cells, tables.offset_cells) if u8 else (_NO_CELLS, _NO_CELLS)
    edges, (how, even) = tables.edge_cells, _way(tables)
    quantiser: tuple[Any, ...] = (np.float32(tables.peak), _search(scales), _search(offsets))
    quantiser += (how, even, tables.bucket_cells, _search(edges), tables.quantiser()[1])
    quantiser += (coding.anchor_bits, coding.residual_bits)
    stored: tuple[Any, ...] = (
        _NO_F32 if u8 else part["chunk_scale"].view(np.float32),
        part["chunk_scale"],
        _NO_F32 if u8 else part["chunk_offset"].view(np.float32),
        part["chunk_offset"],
        part["codes"],
        residual,
    )
    block_tokens = min(coding.page_tokens or coding.chunk_tokens, tokens)
    strided: tuple[Any, ...] = (place.flat, place.head_stride, place.token_stride, place.kind, heads, dim, tokens)
    lengths: tuple[Any, ...] = (coding.chunk_tokens, coding.offset)
    if not shared:
        strided, lengths = (block_tokens, *strided), (coding.chunk_tokens, coding.page_tokens, coding.offset)
        stored = (part["page_mean"].view(np.float32), part["page_scale"].view(np.float32), *stored)
    kernel: Any = _encode_tokens if shared else _encode_pages

    def encode(start: int, stop: int) -> None:
        kernel(start, stop, *strided, *lengths, *quantiser, *stored)

    blocks = -(-tokens // coding.chunk_tokens) if shared else -(-tokens // block_tokens) * heads
    run_split(encode, blocks, unit=1, elements=x.numel())
    return anchor, residual if coding.residual_bits else None


def _search(cells: Cells) -> tuple[npt.NDArray[np.uint32], F32, int]:
    return cells.below, cells.entries, cells.most


def _way(tables: FixedTables) -> tuple[int, tuple[np.float32, np.float32, np.float32]]:
    """How codes are found, and (slope, base, last) of even edges: edge i is i * slope + base up to i = last.

    Even means exactly so, with a slope that can be divided by exactly, and buckets that are their codes.
    """
    edges, buckets = tables.quantiser()
    number = np.arange(edges.size, dtype=np.float32)
    slope, base = edges[1] - edges[0] if edges.size > 1 else np.float32(1), edges[0]
    even = (
        np.frexp(slope)[0] == 0.5
        and np.array_equal(number * slope + base, edges)
        and np.array_equal(edges - base, number * slope)
        and np.array_equal(buckets, np.arange(edges.size + 1))
    )
    how = _EVEN if even else _CELLS if tables.bucket_cells.size else _SEARCH
    return how, (slope, base, np.float32(edges.size - 1))


_NO_F32 = np.empty(0, np.float32)
_NO_CELLS = Cells.of(None, side="left")
