"""Values to fixed-rate segments (SPEC 8.3), with the reference's arithmetic step by step.

    page   mean = high / 2 + low / 2,  scale = max(high - mean, mean - low),  n = (x - mean) / scale
    chunk  offset = stored(high / 2 + low / 2),  scale = stored(max |n - offset| / peak)
    code   of the bucket that (n - offset) / scale falls in

A page of one head (of all heads, where chunks share their parameters) is widened once and stays in the second-level
cache for all these steps. The upper half of a value's bits names a cell no wider than 1/128 of the value; where a cell
holds one edge at most, one look-up tells which lower halves are beyond it, otherwise each edge takes a comparison.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from lynxkv.kernels.cpu.bits import code_of, helper, jit, load_rows, upper_half_of, wide_vectors
from lynxkv.kernels.cpu.memory import U8, source
from lynxkv.kernels.cpu.packing import pack_rows
from lynxkv.kernels.cpu.threads import run_split
from lynxkv.kernels.tables import Cells, FixedTables
from lynxkv.layout import FixedCoding, TensorSpec


@helper
def _extremes(values: Any, width: int, high: Any, low: Any) -> None:
    """Largest and smallest of each column of values [n, width]."""
    for x in range(width):
        high[x] = values[x]
        low[x] = values[x]
    for i in range(1, len(values) // width):
        row = values[i * width : (i + 1) * width]
        for x in range(width):
            high[x] = max(high[x], row[x])
            low[x] = min(low[x], row[x])


@helper
def _magnitudes(values: Any, width: int, high: Any) -> None:
    for x in range(width):
        high[x] = 0
    for i in range(len(values) // width):
        row = values[i * width : (i + 1) * width]
        for x in range(width):
            high[x] = max(high[x], abs(row[x]))


@helper
def _middle(high: Any, low: Any, middle: Any) -> None:
    """Halves first: the sum of two large values would overflow. Adding 0 leaves no negative zero."""
    for x in range(len(middle)):
        middle[x] = high[x] / np.float32(2) + low[x] / np.float32(2) + np.float32(0)


@helper
def _normalise(values: Any, width: int, mean: Any, scale: Any) -> None:
    """(v - mean) / scale; 0 where the scale is."""
    for i in range(len(values) // width):
        row = values[i * width : (i + 1) * width]
        for x in range(width):
            quotient = (row[x] - mean[x]) / scale[x]
            row[x] = quotient if scale[x] > 0 else np.float32(0)


@helper
def _subtract(values: Any, width: int, offset: Any) -> None:
    for i in range(len(values) // width):
        row = values[i * width : (i + 1) * width]
        for x in range(width):
            row[x] = row[x] - offset[x]


@helper
def _share(parameter: Any, heads: int, dim: int, largest: bool) -> None:
    """One value for all of parameter [heads, dim rounded up to 8]: its largest or smallest, the padding left out."""
    padded = len(parameter) // heads
    for head in range(heads):
        for x in range(head * padded + dim, (head + 1) * padded):
            parameter[x] = parameter[0]
    # Folded in halves: element by element it would be a chain of comparisons, four cycles each.
    left = len(parameter)
    while left > 1:
        half = (left + 1) // 2
        upper = parameter[half:left]
        if largest:
            for x in range(left - half):
                parameter[x] = max(parameter[x], upper[x])
        else:
            for x in range(left - half):
                parameter[x] = min(parameter[x], upper[x])
        left = half
    best = parameter[0]
    for x in range(len(parameter)):
        parameter[x] = best


@helper
def _entries(below: Any, entries: Any, most: int, values: Any, round_up: bool, index: Any) -> None:
    """For each value the least entry not below it, the last if there is none; or the nearest one."""
    last = np.uint32(len(entries) - most - 2)
    for x in range(len(values)):
        at = below[upper_half_of(values[x])]
        for _ in range(most):
            at += np.uint32(entries[at] < values[x])
        index[x] = min(at, last)
    if not round_up:
        # Without branches: which of two neighbours is nearer is as good as random.
        for x in range(len(values)):
            at = index[x]
            lower = at - np.uint32(at > 0)
            nearer = np.uint32(abs(values[x] - entries[lower]) < abs(entries[at] - values[x]))
            index[x] = at - nearer * np.uint32(at > 0)


@helper
def _store_parameter(
    values: Any,
    search: Any,
    round_up: bool,
    heads: int,
    dim: int,
    shared: bool,
    at: int,
    as_f32: Any,
    as_u8: Any,
    index: Any,
) -> None:
    """Store values [heads, dim rounded up to 8] of a chunk, as f32 or by the table, and take what they decode to."""
    padded = len(values) // heads
    below, entries, most = search
    if len(below):
        _entries(below, entries, most, values, round_up, index)
        for x in range(len(values)):
            values[x] = entries[index[x]]
        if shared:
            as_u8[at] = index[0]
            return
        for head in range(heads):
            for d in range(dim):
                as_u8[at + head * dim + d] = index[head * padded + d]
    elif shared:
        as_f32[at] = values[0]
    else:
        for head in range(heads):
            for d in range(dim):
                as_f32[at + head * dim + d] = values[head * padded + d]


@helper
def _codes_of(
    values: Any, width: int, scale: Any, cells: Any, below: Any, edges: Any, most: int, buckets: Any, codes: Any
) -> None:
    """Codes of values [n, width] / scale; 0 / 0 where a scale is."""
    wide_vectors()
    for i in range(len(values) // width):
        row = values[i * width : (i + 1) * width]
        own = codes[i * width : (i + 1) * width]
        for x in range(width):
            quotient = row[x] / scale[x]
            row[x] = quotient if scale[x] > 0 else np.float32(0)
        if len(cells):
            for x in range(width):
                own[x] = code_of(cells[upper_half_of(row[x])], row[x])
        else:
            for x in range(width):
                at = below[upper_half_of(row[x])]
                for _ in range(most):
                    at += np.uint32(row[x] >= edges[at])
                own[x] = buckets[at]


@helper
def _clear_padding(codes: Any, padded: int, dim: int) -> None:
    for i in range(len(codes) // padded):
        for d in range(dim, padded):
            codes[i * padded + d] = 0


@jit
def _encode_blocks(
    start: int,
    stop: int,
    block_tokens: int,
    heads: int,
    x: Any,
    head_stride: int,
    token_stride: int,
    kind: int,
    all_heads: int,
    dim: int,
    tokens: int,
    chunk_tokens: int,
    page_tokens: int,
    shared: bool,
    has_offset: bool,
    peak: Any,
    scale_below: Any,
    scale_entries: Any,
    scale_most: int,
    offset_below: Any,
    offset_entries: Any,
    offset_most: int,
    cells: Any,
    edges_below: Any,
    edges: Any,
    edges_most: int,
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
    """Blocks [start, stop): pages, or without pages chunks, of `heads` heads each, all heads of one after the other."""
    padded = -(-dim // 8) * 8
    wide_vectors()
    width = heads * padded
    groups = all_heads // heads
    all_values = np.zeros(block_tokens * width, np.float32)
    all_codes = np.zeros(len(all_values), np.uint8)
    high, low = np.zeros(width, np.float32), np.zeros(width, np.float32)
    middle, reach = np.zeros(width, np.float32), np.zeros(width, np.float32)
    index = np.zeros(width, np.uint32)
    for block in range(start, stop):
        first, head = block // groups * block_tokens, block % groups * heads
        count = min(block_tokens, tokens - first)
        values, codes = all_values[: count * width], all_codes[: count * width]
        at = head * head_stride + first * token_stride
        load_rows(x, at, head_stride, token_stride, heads, dim, values, kind)
        if page_tokens:
            _extremes(values, width, high, low)
            _middle(high, low, middle)
            for i in range(width):
                reach[i] = max(high[i] - middle[i], middle[i] - low[i]) + np.float32(0)
            for h in range(heads):
                at = (first // page_tokens * all_heads + head + h) * dim
                for d in range(dim):
                    page_mean[at + d] = middle[h * padded + d]
                    page_scale[at + d] = reach[h * padded + d]
            _normalise(values, width, middle, reach)
        for begin in range(0, count, chunk_tokens):
            part = values[begin * width : min(count, begin + chunk_tokens) * width]
            chunk = (first + begin) // chunk_tokens
            at = chunk if shared else (chunk * all_heads + head) * dim
            if has_offset:
                _extremes(part, width, high, low)
                if shared:
                    _share(high, heads, dim, True)
                    _share(low, heads, dim, False)
                _middle(high, low, middle)
                search = (offset_below, offset_entries, offset_most)
                _store_parameter(middle, search, False, heads, dim, shared, at, offset_f32, offset_u8, index)
                _subtract(part, width, middle)
            _magnitudes(part, width, reach)
            if shared:
                _share(reach, heads, dim, True)
            for i in range(width):
                reach[i] = reach[i] / peak
            search = (scale_below, scale_entries, scale_most)
            _store_parameter(reach, search, True, heads, dim, shared, at, scale_f32, scale_u8, index)
            own = codes[begin * width : begin * width + len(part)]
            _codes_of(part, width, reach, cells, edges_below, edges, edges_most, buckets, own)
        _clear_padding(codes, padded, dim)
        row, step = first * all_heads + head, (1 if heads == all_heads else all_heads)
        rows = tokens * all_heads
        if residual_bits:
            pack_rows(codes, rows, padded, residual_bits, row, step, packed_low)
        pack_rows(codes, rows, padded, bits, row, step, packed)


def quantize_fixed(x: Tensor, coding: FixedCoding, tables: FixedTables) -> tuple[U8, U8 | None]:
    """Anchor and residual bytes of x [H, T, D], as the reference's."""
    heads, tokens, dim = x.shape
    spec = TensorSpec(heads=heads, head_dim=dim, coding=0)
    place = source(x)
    shared = coding.group == "token"
    at_once = heads if shared else 1
    block_tokens = min(coding.page_tokens or coding.chunk_tokens, tokens)
    sizes = coding.parts(tokens, spec)
    anchor = np.empty(sum(sizes.values()), np.uint8)
    part, at = {}, 0
    for name, size in sizes.items():
        part[name] = anchor[at : at + size]
        at += size
    residual = np.empty(coding.residual_bytes(tokens, spec), np.uint8)
    u8 = coding.chunk_dtype == "u8"
    buckets = tables.quantiser()[1].astype(np.uint32)
    edges, none = tables.edge_cells, Cells.of(None, side="left")
    scales, offsets = (tables.scale_cells, tables.offset_cells) if u8 else (none, none)

    def encode(start: int, stop: int) -> None:
        _encode_blocks(
            start,
            stop,
            block_tokens,
            at_once,
            place.flat,
            place.head_stride,
            place.token_stride,
            place.kind,
            heads,
            dim,
            tokens,
            coding.chunk_tokens,
            coding.page_tokens,
            shared,
            coding.offset,
            np.float32(tables.peak),
            scales.below,
            scales.entries,
            scales.most,
            offsets.below,
            offsets.entries,
            offsets.most,
            tables.bucket_cells,
            edges.below,
            edges.entries,
            edges.most,
            buckets,
            coding.anchor_bits,
            coding.residual_bits,
            part["page_mean"].view(np.float32),
            part["page_scale"].view(np.float32),
            _NO_F32 if u8 else part["chunk_scale"].view(np.float32),
            part["chunk_scale"],
            _NO_F32 if u8 else part["chunk_offset"].view(np.float32),
            part["chunk_offset"],
            part["codes"],
            residual,
        )

    blocks = -(-tokens // block_tokens) * (heads // at_once)
    run_split(encode, blocks, unit=1, elements=x.numel())
    return anchor, residual if coding.residual_bits else None


_NO_F32 = np.empty(0, np.float32)
