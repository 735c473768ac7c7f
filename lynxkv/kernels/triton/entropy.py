"""Entropy-coded segments and values (SPEC 8.4), both ways.

    anchor  value = round(fl(fl(q * step) + mean))
    full    value = round(fl(fl(j * half_step) + mean)),    j = 2 * (q * R + d) - (R - 1)
    y = fl(fl(x - mean) / step),  q = rint(y),  digit = floor(fl(fl(fl(y - q) + 0.5) * R)) within [0, R - 1]

Tiles of symbols are read along tokens, as they are stored, turned as bytes, and written along channels.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lynxkv.kernels.triton.planes import load_codes, row_start
from lynxkv.kernels.triton.rounding import rounded_as, widened


@triton.jit
def dequantize_entropy_kernel(
    symbols: tl.tensor,
    residual: tl.tensor,
    row_of: tl.tensor,
    mean: tl.tensor,
    out: tl.tensor,
    found: tl.tensor,
    step: tl.tensor,
    tokens: tl.tensor,
    per_row: tl.tensor,
    unit_blocks: tl.tensor,
    channels: tl.tensor,
    dim: tl.tensor,
    head_stride: tl.tensor,
    token_stride: tl.tensor,
    table: tl.tensor,
    first: tl.tensor,
    page_stride: tl.tensor,
    SLOTS: tl.constexpr,
    RADIX: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    LIMIT: tl.constexpr,
    KIND: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """Tokens x channels of one head; RADIX 1 means anchor precision.

    found[0] counts escape symbols, found[1] codes and padding that the SPEC forbids.
    """
    tiles = tl.cdiv(dim, BLOCK_D)
    head = tl.program_id(1) // tiles
    d = tl.program_id(1) % tiles * BLOCK_D + tl.arange(0, BLOCK_D)
    real = d < dim
    channel = head * dim + d
    row = tl.load(row_of + channel, mask=real, other=0)[:, None]
    m = tl.load(mean + channel, mask=real, other=0.0)[None, :]
    place = out + head.to(tl.int64) * head_stride + d[None, :]
    k = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    escapes = tl.zeros((BLOCK_D, BLOCK_T), tl.int32)
    if RADIX == 1:
        mask = real[:, None] & (k < tokens)[None, :]
        symbol = tl.load(symbols + row * tokens + k[None, :], mask=mask, other=127)
        escapes += (symbol == 255).to(tl.int32)
        q = tl.trans(symbol).to(tl.int32) - 127
        value = q.to(tl.float32) * step
        value = value + m
        start = row_start(k, k < tokens, token_stride, table, first, page_stride, SLOTS)[:, None]
        tl.store(place + start, rounded_as(value, KIND), mask=tl.trans(mask))
    else:
        unit = unit_blocks * ALIGN
        bad = tl.zeros((BLOCK_D, BLOCK_T), tl.int32)
        inside = real[:, None] & (k < unit)[None, :]
        for f in range(8):
            j = k + f * unit
            code = load_codes(residual, channels.to(tl.int64), row, unit, f, k[None, :], inside, BITS)
            bad += (code >= LIMIT).to(tl.int32)
            bad += ((j >= per_row)[None, :] & (code != 0)).to(tl.int32)
            for e in tl.static_range(GROUP):
                if e == GROUP - 1:
                    digit = code
                else:
                    digit = code % RADIX
                    code = code // RADIX
                t = j + e * per_row
                mask = inside & ((j < per_row) & (t < tokens))[None, :]
                bad += ((t >= tokens)[None, :] & (digit != 0)).to(tl.int32)
                symbol = tl.load(symbols + row * tokens + t[None, :], mask=mask, other=127)
                escapes += (symbol == 255).to(tl.int32)
                index = 2 * ((symbol.to(tl.int32) - 127) * RADIX + digit) - (RADIX - 1)
                value = tl.trans(index.to(tl.int16)).to(tl.float32) * step
                value = value + m
                start = row_start(t, t < tokens, token_stride, table, first, page_stride, SLOTS)[:, None]
                tl.store(place + start, rounded_as(value, KIND), mask=tl.trans(mask))
        tl.atomic_add(found + 1, tl.sum(bad))
    tl.atomic_add(found, tl.sum(escapes))


@triton.jit
def quantize_entropy_kernel(
    x: tl.tensor,
    row_of: tl.tensor,
    mean: tl.tensor,
    symbols: tl.tensor,
    digits: tl.tensor,
    step: tl.tensor,
    tokens: tl.tensor,
    dim: tl.tensor,
    head_stride: tl.tensor,
    token_stride: tl.tensor,
    RADIX: tl.constexpr,
    BF16_BITS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """Symbols, and with RADIX above 1 digits, both [channels, tokens] u8."""
    tiles = tl.cdiv(dim, BLOCK_D)
    head = tl.program_id(1) // tiles
    d = tl.program_id(1) % tiles * BLOCK_D + tl.arange(0, BLOCK_D)
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    real = d < dim
    channel = head * dim + d
    mask = (t < tokens)[:, None] & real[None, :]
    m = tl.load(mean + channel, mask=real, other=0.0)[None, :]
    source = x + head.to(tl.int64) * head_stride + t.to(tl.int64)[:, None] * token_stride + d[None, :]
    value = widened(tl.load(source, mask=mask, other=0), BF16_BITS)
    y = tl.div_rn(value - m, step)
    # To nearest even by the rounding of an addition: |y| is below 2^22.
    q = (y + 12582912.0) - 12582912.0
    symbol = tl.where(tl.abs(q) <= 127.0, q + 127.0, 255.0).to(tl.int32).to(tl.uint8)
    row = tl.load(row_of + channel, mask=real, other=0)[:, None]
    place = row * tokens + t[None, :]
    tl.store(symbols + place, tl.trans(symbol), mask=tl.trans(mask))
    if RADIX > 1:
        # Not negative: cutting off the fraction is the floor.
        part = y - q
        digit = tl.minimum(((part + 0.5) * RADIX).to(tl.int32), RADIX - 1).to(tl.uint8)
        tl.store(digits + place, tl.trans(digit), mask=tl.trans(mask))
