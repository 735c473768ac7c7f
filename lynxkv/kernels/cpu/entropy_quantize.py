"""Values to entropy-coded segments (SPEC 8.4).

    y = fl(fl(x - mean) / step),  q = rint(y),  digit = floor(fl(fl(fl(y - q) + 0.5) * R)) within [0, R - 1]

The arithmetic runs along channels, in the layout of the model; tiles of bytes are then turned into rows. Digits wait as
bytes until a row of them is complete and can be packed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from lynxkv.kernels.cpu.bits import helper, jit, load_rows, symbol_of, wide_vectors, widened
from lynxkv.kernels.cpu.lanes import LANES, load, minimum, rint, spread, store, u8_of_u32, u32_of_f32
from lynxkv.kernels.cpu.memory import U8, read_only, source
from lynxkv.kernels.cpu.packing import clear, pack_rows
from lynxkv.kernels.cpu.threads import run_split
from lynxkv.kernels.cpu.turn import tile_to_rows
from lynxkv.kernels.tables import EntropyTables
from lynxkv.layout import ESCAPE_BYTES, EntropyCoding, TensorSpec
from lynxkv.packing import SYMBOL_ESCAPE, radix_group

TILE_TOKENS = 128
_SCAN = 4096


@helper
def _code_rows(
    x: Any, at: int, token_stride: int, kind: int, count: int, mean: Any, step: Any, radix: int, symbols: Any, low: Any
) -> None:
    """`count` rows of x, u16 or f32, to symbols, and to digits where the radix is above 1: tiles u8 [count, padded].

    No y - q + 0.5 is negative, so cutting off the fraction is the floor.
    """
    wide_vectors()
    dim = len(mean)
    padded = -(-dim // LANES) * LANES
    steps, half, scale = spread(step), spread(np.float32(0.5)), spread(np.float32(radix))
    top = spread(np.uint32(radix - 1))
    for i in range(count):
        for d in range(0, dim, LANES):
            y = (widened(x, at + i * token_stride + d, dim - d, kind) - load(mean, d, dim - d)) / steps
            q = rint(y)
            store(symbols, i * padded + d, symbol_of(q), LANES)
            if radix > 1:
                digit = minimum(u32_of_f32((y - q + half) * scale), top)
                store(low, i * padded + d, u8_of_u32(digit), LANES)


@jit
def _encode_tiles(
    start: int,
    stop: int,
    x: Any,
    head_stride: int,
    token_stride: int,
    kind: int,
    heads: int,
    dim: int,
    mean: Any,
    step: Any,
    radix: int,
    row_of: Any,
    tokens: int,
    symbols: Any,
    digits: Any,
) -> None:
    """Tokens [start, stop) of all channels; digits [N, stride] only where the radix is above 1."""
    padded = -(-dim // LANES) * LANES
    tile, low = np.zeros(TILE_TOKENS * padded, np.uint8), np.zeros(TILE_TOKENS * padded, np.uint8)
    stride = len(digits) // len(row_of)
    for first in range(start, stop, TILE_TOKENS):
        count = min(TILE_TOKENS, stop - first)
        for head in range(heads):
            rows = row_of[head * dim : head * dim + dim]
            means = mean[head * dim : head * dim + dim]
            at = head * head_stride + first * token_stride
            _code_rows(x, at, token_stride, kind, count, means, step, radix, tile, low)
            tile_to_rows(tile, padded, symbols, rows, tokens, first, count)
            if radix > 1:
                tile_to_rows(low, padded, digits, rows, stride, first, count)


@jit
def _pack_digits(digits: Any, start: int, stop: int, rows: int, radix: int, group: int, bits: int, data: Any) -> None:
    """Rows [start, stop) of digits [rows, group * u] to codes of `group` digits, packed."""
    stride = len(digits) // rows
    count = stride // group
    codes = np.empty(-(-count // 8) * 8, np.uint8)
    for row in range(start, stop):
        own = digits[row * stride : (row + 1) * stride]
        clear(codes)
        for e in range(group - 1, -1, -1):
            part = own[e * count : (e + 1) * count]
            for i in range(count):
                codes[i] = np.uint8(codes[i] * radix) + part[i]
        pack_rows(codes, rows, len(codes), bits, row, 1, data)


@jit
def _count_escapes(symbols: Any) -> int:
    found = 0
    for start in range(0, len(symbols), _SCAN):
        block = symbols[start : start + _SCAN]
        highest = np.uint8(0)
        for i in range(len(block)):
            highest = max(highest, block[i])
        if highest == SYMBOL_ESCAPE:
            for i in range(len(block)):
                found += block[i] == SYMBOL_ESCAPE
    return found


@jit
def _fill_escapes(
    symbols: Any,
    tokens: int,
    order: Any,
    x: Any,
    head_stride: int,
    token_stride: int,
    kind: int,
    dim: int,
    mean: Any,
    step: Any,
    pairs: Any,
) -> None:
    """Position and index of each escape, from the values anew."""
    value = np.zeros(8, np.float32)
    at = 0
    for position in range(len(symbols)):
        if symbols[position] == SYMBOL_ESCAPE:
            channel = order[position // tokens]
            start = channel // dim * head_stride + position % tokens * token_stride + channel % dim
            load_rows(x, start, 0, 0, 1, 1, value, kind)
            pairs[at] = position
            pairs[at + 1] = np.int32(np.rint((value[0] - mean[channel]) / step))
            at += 2


def quantize_entropy(x: Tensor, coding: EntropyCoding, tables: EntropyTables) -> tuple[U8, U8 | None]:
    """Anchor and residual bytes of x [H, T, D], as the reference's."""
    heads, tokens, dim = x.shape
    place = source(x)
    channels, radix = heads * dim, coding.radix
    order = read_only(tables.order.astype(np.int64))
    mean, step = read_only(tables.mean.astype(np.float32, copy=False)), np.float32(tables.step)
    symbols = np.empty(channels * tokens, np.uint8)
    group, bits = radix_group(radix) if radix > 1 else (1, 0)
    digits = np.zeros(channels * group * -(-tokens // group) if radix > 1 else 0, np.uint8)

    def encode(start: int, stop: int) -> None:
        _encode_tiles(
            start,
            stop,
            place.flat,
            place.head_stride,
            place.token_stride,
            place.kind,
            heads,
            dim,
            mean,
            step,
            radix,
            tables.row_of,
            tokens,
            symbols,
            digits,
        )

    run_split(encode, tokens, unit=TILE_TOKENS, elements=symbols.size)
    anchor = symbols
    escapes = _count_escapes(symbols)
    if escapes:
        pairs = np.empty(2 * escapes, "<i4")
        strides = (place.head_stride, place.token_stride)
        _fill_escapes(symbols, tokens, order, place.flat, *strides, place.kind, dim, mean, step, pairs)
        assert pairs.nbytes == escapes * ESCAPE_BYTES
        anchor = np.concatenate([symbols, pairs.view(np.uint8)])
    if radix == 1:
        return anchor, None
    residual = np.empty(coding.residual_bytes(tokens, TensorSpec(heads=heads, head_dim=dim, coding=0)), np.uint8)

    def pack(start: int, stop: int) -> None:
        _pack_digits(digits, start, stop, channels, radix, group, bits, residual)

    run_split(pack, channels, unit=1, elements=digits.size)
    return anchor, residual
