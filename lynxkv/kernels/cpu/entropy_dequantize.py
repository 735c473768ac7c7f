"""Entropy-coded segments to values (SPEC 8.4).

    anchor  value = round(fl(fl(q * step) + mean))
    full    value = round(fl(fl(j * half_step) + mean)),    j = 2 * (q * R + d) - (R - 1)

Symbols are channel-major and the cache is token-major. A tile of tokens x head_dim is turned first, as integers in the
first-level cache, then the arithmetic runs along channels, where it vectorises. Both precisions share that second part:
with i the index in the tile, q = i - 127 and j = i - (255 R - 1) for i = 2 * (symbol * R + d), both exact in f32.
Escapes are patched last.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from lynxkv.errors import ContentError
from lynxkv.kernels.cpu.bits import jit, round_row
from lynxkv.kernels.cpu.memory import U8, Strided, read_only
from lynxkv.kernels.cpu.packing import unpack_row
from lynxkv.kernels.cpu.threads import run_split
from lynxkv.kernels.tables import EntropyTables
from lynxkv.layout import ESCAPE_BYTES, EntropyCoding, TensorSpec
from lynxkv.packing import INDEX_LIMIT, SYMBOL_ESCAPE, SYMBOL_ZERO, radix_group

# Tokens turned at once: 64 x 128 u16 are 16 KiB of a 32 or 48 KiB first-level cache, and a line of symbols is 64 bytes.
TILE_TOKENS = 64
_SCAN = 4096


@jit
def _escapes_match(symbols: Any, positions: Any) -> bool:
    """Whether the escape symbols are exactly at `positions`, in order."""
    found = 0
    for start in range(0, len(symbols), _SCAN):
        block = symbols[start : start + _SCAN]
        highest = np.uint8(0)
        for i in range(len(block)):
            highest = max(highest, block[i])
        if highest == SYMBOL_ESCAPE:
            for i in range(len(block)):
                if block[i] == SYMBOL_ESCAPE:
                    if found == len(positions) or positions[found] != start + i:
                        return False
                    found += 1
    return found == len(positions)


@jit
def _unpack_digits(
    data: Any, start: int, stop: int, rows: int, tokens: int, radix: int, group: int, bits: int, digits: Any
) -> int:
    """Digits of rows [start, stop) into digits [rows, stride]; 1: a code is too large, 2: padding is not zero."""
    stride = len(digits) // rows
    codes_per_row = -(-tokens // group)
    codes = np.empty(-(-codes_per_row // 8) * 8, np.uint8)
    limit = radix**group
    # c // R for c < 256 and R <= 32, exactly.
    reciprocal = np.uint32(65536 // radix + 1)
    for row in range(start, stop):
        out = digits[row * stride : (row + 1) * stride]
        unpack_row(data, row, rows, bits, codes)
        for i in range(codes_per_row, len(codes)):
            if codes[i]:
                return 2
        if limit < 1 << bits:
            highest = np.uint8(0)
            for i in range(codes_per_row):
                highest = max(highest, codes[i])
            if highest >= limit:
                return 1
        for e in range(group):
            part = out[e * codes_per_row : (e + 1) * codes_per_row]
            if e == group - 1:
                for i in range(codes_per_row):
                    part[i] = codes[i]
            else:
                for i in range(codes_per_row):
                    quotient = np.uint32(codes[i] * reciprocal) >> np.uint32(16)
                    part[i] = np.uint8(codes[i] - quotient * radix)
                    codes[i] = np.uint8(quotient)
        for i in range(tokens, group * codes_per_row):
            if out[i]:
                return 2
    return 0


@jit
def _turn_symbols(symbols: Any, tokens: int, first: int, count: int, rows: Any, tile: Any) -> None:
    """Symbols of tokens [first, first + count) of a head's channels into tile [count, dim]."""
    dim = len(rows)
    for d in range(dim):
        at = rows[d] * tokens + first
        row = symbols[at : at + count]
        column = tile[d:]
        for i in range(count):
            column[i * dim] = row[i]


@jit
def _turn_pairs(
    symbols: Any, digits: Any, stride: int, radix: int, tokens: int, first: int, count: int, rows: Any, tile: Any
) -> None:
    """2 * (symbol * R + digit) of the same."""
    dim = len(rows)
    for d in range(dim):
        at = rows[d] * tokens + first
        row = symbols[at : at + count]
        at = rows[d] * stride + first
        low = digits[at : at + count]
        column = tile[d:]
        for i in range(count):
            column[i * dim] = 2 * (row[i] * radix + low[i])


@jit
def _finish_rows(
    tile: Any, count: int, mean: Any, step: Any, bias: Any, out: Any, at: int, token_stride: int, kind: int, values: Any
) -> None:
    """Rows tile [count, dim] to values, in `out` from `at` on."""
    dim = len(mean)
    for i in range(count):
        index = tile[i * dim : i * dim + dim]
        for d in range(dim):
            values[d] = (np.float32(index[d]) - bias) * step + mean[d]
        start = at + i * token_stride
        round_row(values, out[start : start + dim], kind)


@jit
def _decode_tiles(
    symbols: Any,
    digits: Any,
    radix: int,
    start: int,
    stop: int,
    tokens: int,
    row_of: Any,
    mean: Any,
    step: Any,
    heads: int,
    dim: int,
    out: Any,
    head_stride: int,
    token_stride: int,
    kind: int,
) -> None:
    """Tokens [start, stop) of all channels; `radix` 0 means that there are no digits."""
    tile = np.empty(TILE_TOKENS * dim, np.uint16)
    values = np.empty(dim, np.float32)
    stride = len(digits) // len(row_of)
    bias = np.float32(SYMBOL_ZERO) if radix == 0 else np.float32(255 * radix - 1)
    for first in range(start, stop, TILE_TOKENS):
        count = min(TILE_TOKENS, stop - first)
        for head in range(heads):
            rows = row_of[head * dim : head * dim + dim]
            if radix == 0:
                _turn_symbols(symbols, tokens, first, count, rows, tile)
            else:
                _turn_pairs(symbols, digits, stride, radix, tokens, first, count, rows, tile)
            at = head * head_stride + first * token_stride
            means = mean[head * dim : head * dim + dim]
            _finish_rows(tile, count, means, step, bias, out, at, token_stride, kind, values)


@jit
def _patch_escapes(
    positions: Any,
    indices: Any,
    digits: Any,
    radix: int,
    tokens: int,
    order: Any,
    mean: Any,
    step: Any,
    dim: int,
    out: Any,
    head_stride: int,
    token_stride: int,
    kind: int,
) -> None:
    value = np.empty(1, np.float32)
    stride = len(digits) // len(order)
    for i in range(len(positions)):
        row = positions[i] // tokens
        token = positions[i] % tokens
        index = np.int64(indices[i])
        if radix:
            index = 2 * (index * radix + digits[row * stride + token]) - (radix - 1)
        channel = order[row]
        value[0] = np.float32(index) * step + mean[channel]
        at = channel // dim * head_stride + token * token_stride + channel % dim
        round_row(value, out[at : at + 1], kind)


def dequantize_entropy(
    anchor: U8,
    residual: U8 | None,
    coding: EntropyCoding,
    tables: EntropyTables,
    spec: TensorSpec,
    tokens: int,
    out: Strided,
) -> None:
    """Decode a segment of `tokens` tokens; nothing is written before all of it has been checked.

    Raises:
        ContentError: as the reference.
    """
    count = spec.channels * tokens
    symbols = read_only(anchor[:count])
    positions, indices = _escapes(anchor, count)
    if symbols.size != count or not _escapes_match(symbols, positions):
        raise ContentError("escapes are not at the escape symbols")
    if np.any((indices <= -INDEX_LIMIT) | (indices >= INDEX_LIMIT)):
        raise ContentError("an escape is out of range")
    digits, radix = _NO_DIGITS, 0
    if residual is not None:
        digits, radix = read_only(_digits(residual, coding, spec, tokens)), coding.radix
    step = np.float32(tables.half_step if radix else tables.step)
    order = read_only(tables.order.astype(np.int64))
    mean = read_only(tables.mean.astype(np.float32, copy=False))
    row_of = np.zeros(spec.channels, np.int64)
    row_of[order] = np.arange(spec.channels)
    place = (out.flat, out.head_stride, out.token_stride, out.kind)

    def decode(start: int, stop: int) -> None:
        _decode_tiles(
            symbols, digits, radix, start, stop, tokens, row_of, mean, step, spec.heads, spec.head_dim, *place
        )

    run_split(decode, tokens, unit=TILE_TOKENS, elements=count)
    if positions.size:
        _patch_escapes(positions, indices, digits, radix, tokens, order, mean, step, spec.head_dim, *place)


def _escapes(anchor: U8, count: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
    if (anchor.size - count) % ESCAPE_BYTES:
        raise ContentError("escapes are not whole")
    pairs = anchor[count:].copy().view("<u4").reshape(-1, 2)
    return pairs[:, 0].astype(np.int64), pairs[:, 1].copy().view("<i4")


def _digits(residual: U8, coding: EntropyCoding, spec: TensorSpec, tokens: int) -> U8:
    """Digits [N, stride] of a residual segment, one byte each."""
    if residual.size != coding.residual_bytes(tokens, spec):
        raise ContentError(f"a residual segment has {residual.size} bytes")
    rows, (group, bits) = spec.channels, radix_group(coding.radix)
    digits = np.empty(rows * group * -(-tokens // group), np.uint8)
    data = read_only(residual)
    found: list[int] = []

    def unpack(start: int, stop: int) -> None:
        found.append(_unpack_digits(data, start, stop, rows, tokens, coding.radix, group, bits, digits))

    run_split(unpack, rows, unit=1, elements=digits.size)
    if any(found):
        message = f"a residual code is not below {coding.radix}^{group}" if 1 in found else "padding is not zero"
        raise ContentError(message)
    return digits


_NO_DIGITS = read_only(np.empty(0, np.uint8))
