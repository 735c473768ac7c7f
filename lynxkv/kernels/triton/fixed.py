"""Fixed-rate segments and values (SPEC 8.3), both ways, with the reference's arithmetic step by step.

scale = fl(s * sigma),  offset = fl(fl(o * sigma) + mu),  value = round(fl(fl(codebook[code] * scale) + offset))
"""

from __future__ import annotations

import triton
import triton.language as tl

from lynxkv.kernels.triton.planes import load_codes, row_start
from lynxkv.kernels.triton.rounding import rounded_as, widened


@triton.jit
def _parameter(stored: tl.tensor, table: tl.tensor, at: tl.tensor, mask: tl.tensor, U8: tl.constexpr) -> tl.tensor:
    """A chunk's parameter: f32, or an index into a table."""
    if U8:
        index = tl.load(stored + at, mask=mask, other=0).to(tl.int32)
        value = tl.load(table + index, mask=mask, other=0.0)
    else:
        value = tl.load(stored + at, mask=mask, other=0.0)
    return value


@triton.jit
def dequantize_fixed_kernel(
    codes: tl.tensor,
    residual: tl.tensor,
    book: tl.tensor,
    scales: tl.tensor,
    scale_table: tl.tensor,
    offsets: tl.tensor,
    offset_table: tl.tensor,
    page_scales: tl.tensor,
    page_means: tl.tensor,
    out: tl.tensor,
    found: tl.tensor,
    tokens: tl.tensor,
    heads: tl.tensor,
    dim: tl.tensor,
    unit_blocks: tl.tensor,
    head_stride: tl.tensor,
    token_stride: tl.tensor,
    table: tl.tensor,
    first: tl.tensor,
    page_stride: tl.tensor,
    SLOTS: tl.constexpr,
    BITS: tl.constexpr,
    LOW_BITS: tl.constexpr,
    CHUNK: tl.constexpr,
    PAGE: tl.constexpr,
    SHARED: tl.constexpr,
    U8: tl.constexpr,
    OFFSET: tl.constexpr,
    KIND: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """Tokens of one head; LOW_BITS 0 means anchor precision. found[1] counts padding codes that are not zero."""
    unit = unit_blocks * ALIGN
    head = tl.program_id(1)
    token = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)[:, None]
    k = tl.arange(0, BLOCK_K)[None, :]
    inside = (token < tokens) & (k < unit)
    row = token * heads + head
    rows = tokens.to(tl.int64) * heads
    channels = heads * dim
    start = row_start(token, token < tokens, token_stride, table, first, page_stride, SLOTS)
    bad = tl.zeros((BLOCK_T, BLOCK_K), tl.int32)
    for f in range(8):
        d = k + f * unit
        mask = inside & (d < dim)
        code = load_codes(codes, rows, row, unit, f, k, inside, BITS)
        if LOW_BITS > 0:
            code = (code << LOW_BITS) | load_codes(residual, rows, row, unit, f, k, inside, LOW_BITS)
        bad += ((d >= dim) & (code != 0)).to(tl.int32)
        channel = head * dim + d
        if SHARED:
            at = token // CHUNK + tl.zeros_like(d)
        else:
            at = token // CHUNK * channels + channel
        scale = _parameter(scales, scale_table, at, mask, U8)
        offset = tl.zeros((BLOCK_T, BLOCK_K), tl.float32)
        if OFFSET:
            offset = _parameter(offsets, offset_table, at, mask, U8)
        if PAGE > 0:
            at = token // PAGE * channels + channel
            sigma = tl.load(page_scales + at, mask=mask, other=0.0)
            mu = tl.load(page_means + at, mask=mask, other=0.0)
            scale = scale * sigma
            offset = offset * sigma
            offset = offset + mu
        value = tl.load(book + code, mask=mask, other=0.0) * scale
        value = value + offset
        place = out + head.to(tl.int64) * head_stride + start + d
        tl.store(place, rounded_as(value, KIND), mask=mask)
    tl.atomic_add(found + 1, tl.sum(bad))


@triton.jit
def _entry(table: tl.tensor, value: tl.tensor, NEAREST: tl.constexpr) -> tl.tensor:
    """Index of the least of 256 entries not below `value`, the last if there is none; or of the nearest."""
    index = tl.zeros_like(value).to(tl.int32)
    for power in tl.static_range(7, -1, -1):
        index += tl.where(tl.load(table + index + ((1 << power) - 1)) < value, 1 << power, 0)
    if NEAREST:
        lower = tl.maximum(index - 1, 0)
        nearer = tl.abs(value - tl.load(table + lower)) < tl.abs(tl.load(table + index) - value)
        index = tl.where(nearer, lower, index)
    return index


@triton.jit
def _stored(
    stored: tl.tensor,
    table: tl.tensor,
    at: tl.tensor,
    value: tl.tensor,
    mask: tl.tensor,
    U8: tl.constexpr,
    NEAREST: tl.constexpr,
) -> tl.tensor:
    """Store a chunk's parameter and return what it decodes to."""
    if U8:
        index = _entry(table, value, NEAREST)
        tl.store(stored + at, index.to(tl.uint8), mask=mask)
        decoded = tl.load(table + index)
    else:
        tl.store(stored + at, value, mask=mask)
        decoded = value
    return decoded


@triton.jit
def _bucket(edges: tl.tensor, value: tl.tensor) -> tl.tensor:
    """How many of 255 edges are not above `value`."""
    index = tl.zeros_like(value).to(tl.int32)
    for power in tl.static_range(7, -1, -1):
        index += tl.where(tl.load(edges + index + ((1 << power) - 1)) <= value, 1 << power, 0)
    return index


@triton.jit
def quantize_fixed_kernel(
    x: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    scale_table: tl.tensor,
    offsets: tl.tensor,
    offset_table: tl.tensor,
    page_scales: tl.tensor,
    page_means: tl.tensor,
    edges: tl.tensor,
    buckets: tl.tensor,
    peak: tl.tensor,
    tokens: tl.tensor,
    heads: tl.tensor,
    dim: tl.tensor,
    head_stride: tl.tensor,
    token_stride: tl.tensor,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    PAGE: tl.constexpr,
    U8: tl.constexpr,
    OFFSET: tl.constexpr,
    BF16_BITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """CHUNKS chunks, a page if there are pages, of some channels of one head; codes are u8 [tokens, heads, dim].

    BLOCK_N and BLOCK_C are CHUNKS and CHUNK rounded up to powers of two.
    """
    tiles = tl.cdiv(dim, BLOCK_D)
    head = tl.program_id(1) // tiles
    d = (tl.program_id(1) % tiles * BLOCK_D + tl.arange(0, BLOCK_D))[None, None, :]
    block = tl.program_id(0)
    chunk = tl.arange(0, BLOCK_N)[:, None, None]
    i = tl.arange(0, BLOCK_C)[None, :, None]
    token = (block * CHUNKS + chunk).to(tl.int64) * CHUNK + i
    mask = (chunk < CHUNKS) & (i < CHUNK) & (token < tokens) & (d < dim)
    source = x + head.to(tl.int64) * head_stride + token * token_stride + d
    value = widened(tl.load(source, mask=mask, other=0), BF16_BITS)
    channels = heads * dim
    low_pad, high_pad = float("inf"), float("-inf")
    if PAGE > 0:
        high = tl.max(tl.max(tl.where(mask, value, high_pad), 1, keep_dims=True), 0, keep_dims=True)
        low = tl.min(tl.min(tl.where(mask, value, low_pad), 1, keep_dims=True), 0, keep_dims=True)
        # Adding 0 leaves no negative zero.
        mean = (high * 0.5 + low * 0.5) + 0.0
        reach = tl.maximum(high - mean, mean - low) + 0.0
        at = block * channels + head * dim + d
        tl.store(page_means + at, mean, mask=d < dim)
        tl.store(page_scales + at, reach, mask=d < dim)
        value = tl.where(reach > 0, tl.div_rn(value - mean, tl.where(reach > 0, reach, 1.0)), 0.0)
    first = (block * CHUNKS + chunk).to(tl.int64)
    at = first * channels + head * dim + d
    kept = (chunk < CHUNKS) & (first * CHUNK < tokens) & (d < dim)
    if OFFSET:
        high = tl.max(tl.where(mask, value, high_pad), 1, keep_dims=True)
        low = tl.min(tl.where(mask, value, low_pad), 1, keep_dims=True)
        middle = tl.where(kept, (high * 0.5 + low * 0.5) + 0.0, 0.0)
        value = value - _stored(offsets, offset_table, at, middle, kept, U8, True)
    reach = tl.div_rn(tl.max(tl.where(mask, tl.abs(value), 0.0), 1, keep_dims=True), peak)
    scale = _stored(scales, scale_table, at, reach, kept, U8, False)
    unit = tl.where(scale > 0, tl.div_rn(value, tl.where(scale > 0, scale, 1.0)), 0.0)
    code = tl.load(buckets + _bucket(edges, unit))
    tl.store(codes + (token * heads + head) * dim + d, code, mask=mask)


@triton.jit
def quantize_token_kernel(
    x: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    offsets: tl.tensor,
    edges: tl.tensor,
    buckets: tl.tensor,
    peak: tl.tensor,
    heads: tl.tensor,
    dim: tl.tensor,
    head_stride: tl.tensor,
    token_stride: tl.tensor,
    BF16_BITS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    OFFSET: tl.constexpr,
) -> None:
    """One token, all heads, with f32 parameters of its own; codes are u8 [tokens, heads, dim]."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, BLOCK_H).to(tl.int64)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    mask = (head < heads) & (d < dim)
    value = widened(tl.load(x + head * head_stride + token * token_stride + d, mask=mask, other=0), BF16_BITS)
    if OFFSET:
        high = tl.max(tl.max(tl.where(mask, value, float("-inf")), 1), 0)
        low = tl.min(tl.min(tl.where(mask, value, float("inf")), 1), 0)
        middle = (high * 0.5 + low * 0.5) + 0.0
        tl.store(offsets + token, middle)
        value = value - middle
    scale = tl.div_rn(tl.max(tl.max(tl.where(mask, tl.abs(value), 0.0), 1), 0), peak)
    tl.store(scales + token, scale)
    unit = tl.where(scale > 0, tl.div_rn(value, tl.where(scale > 0, scale, 1.0)), 0.0)
    code = tl.load(buckets + _bucket(edges, unit))
    tl.store(codes + (token * heads + head) * dim + d, code, mask=mask)
