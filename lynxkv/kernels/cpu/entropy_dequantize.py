"""Entropy-coded segments to values (SPEC 8.4).

    anchor  value = round(fl(fl(q * step) + mean))
    full    value = round(fl(fl(j * half_step) + mean)),    j = 2 * (q * R + d) - (R - 1)

Symbols are channel-major and the cache is token-major. A tile of tokens x head_dim is turned first, as bytes in the
first-level cache; q and j are exact in f32, so the arithmetic runs there, along channels. Escapes are patched last.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from lynxkv.errors import ContentError
from lynxkv.kernels.cpu.bits import helper, jit, put
from lynxkv.kernels.cpu.finish import finish_refined, finish_symbols
from lynxkv.kernels.cpu.lanes import LANES, spread
from lynxkv.kernels.cpu.memory import U8, Rows, bounded, read_only
from lynxkv.kernels.cpu.packing import unpack_rows
from lynxkv.kernels.cpu.threads import run_split
from lynxkv.kernels.cpu.turn import rows_to_tile
from lynxkv.kernels.tables import EntropyTables
from lynxkv.layout import ESCAPE_BYTES, EntropyCoding, TensorSpec
from lynxkv.packing import INDEX_LIMIT, SYMBOL_ESCAPE, radix_group

# Tokens turned at once: two cache lines of a row. With one, as fast from the cache but a quarter slower from memory.
TILE_TOKENS = 128


@helper
def _count_escapes(tile: Any) -> int:
    highest = np.uint8(0)
    for i in range(len(tile)):
        highest = max(highest, tile[i])
    found = 0
    if highest == SYMBOL_ESCAPE:
        for i in range(len(tile)):
            found += tile[i] == SYMBOL_ESCAPE
    return found


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
    if limit == 1 << bits and group == 1 and len(codes) == tokens:
        # Every code is a digit, and none is padding.
        unpack_rows(data, rows, tokens, bits, start, digits[start * stride : stop * stride], True)
        return 0
    for row in range(start, stop):
        out = digits[row * stride : (row + 1) * stride]
        unpack_rows(data, rows, len(codes), bits, row, codes, True)
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
def _decode_tiles(
    start: int,
    stop: int,
    tokens: int,
    symbols: Any,
    digits: Any,
    low: Any,
    radix: int,
    row_of: Any,
    mean: Any,
    step: Any,
    heads: int,
    dim: int,
    out: Any,
    head_stride: int,
    starts: Any,
    kind: int,
) -> int:
    """Tokens [start, stop) of all channels. Returns how many are escapes.

    `digits`, and room for a tile of them, `low`, are both None at anchor precision.
    """
    padded = -(-dim // LANES) * LANES
    tile = np.zeros(TILE_TOKENS * padded, np.uint8)
    escapes = 0
    for first in range(start, stop, TILE_TOKENS):
        count = min(TILE_TOKENS, stop - first)
        part = tile[: count * padded]
        for head in range(heads):
            rows = row_of[head * dim : head * dim + dim]
            rows_to_tile(symbols, rows, tokens, first, count, part, padded)
            escapes += _count_escapes(part)
            means = mean[head * dim : head * dim + dim]
            own, at = starts[first : first + count], head * head_stride
            if digits is None:
                finish_symbols(part, padded, step, means, out, at, own, kind)
            else:
                rows_to_tile(digits, rows, len(digits) // len(row_of), first, count, low, padded)
                finish_refined(part, low, padded, radix, step, means, out, at, own, kind)
    return escapes


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
    starts: Any,
    kind: int,
) -> None:
    stride = len(digits) // len(order)
    for i in range(len(positions)):
        row = positions[i] // tokens
        token = positions[i] % tokens
        index = np.int64(indices[i])
        if radix:
            index = 2 * (index * radix + digits[row * stride + token]) - (radix - 1)
        channel = order[row]
        at = starts[token] + channel // dim * head_stride + channel % dim
        put(out, at, spread(np.float32(index)) * spread(step) + spread(mean[channel]), 1, kind)


def dequantize_entropy(
    anchor: U8,
    residual: U8 | None,
    coding: EntropyCoding,
    tables: EntropyTables,
    spec: TensorSpec,
    tokens: int,
    out: Rows,
) -> None:
    """Decode a segment of `tokens` tokens.

    Raises:
        ContentError: as the reference, which alone writes nothing then. Escape symbols without a value are only found
            on the way, for reading all symbols twice would cost a fifth of the time.
    """
    count = spec.channels * tokens
    symbols = read_only(anchor[:count])
    positions, indices = _escapes(anchor, count)
    if symbols.size != count or (positions.size and not _escaped(symbols, positions)):
        raise ContentError("escapes are not at the escape symbols")
    if positions.size and np.any((indices <= -INDEX_LIMIT) | (indices >= INDEX_LIMIT)):
        raise ContentError("an escape is out of range")
    digits = read_only(_digits(residual, coding, spec, tokens)) if residual is not None else None
    radix = coding.radix if digits is not None else 0
    step = np.float32(tables.half_step if radix else tables.step)
    mean = read_only(tables.mean.astype(np.float32, copy=False))
    farthest = 256.0 * max(1, 2 * radix) * float(step) + tables.mean_reach
    kind = bounded(out, farthest)

    found: list[int] = []
    padded = -(-spec.head_dim // LANES) * LANES

    def decode(start: int, stop: int) -> None:
        escapes = _decode_tiles(
            start,
            stop,
            tokens,
            symbols,
            digits,
            np.empty(TILE_TOKENS * padded, np.uint8) if digits is not None else None,
            radix,
            tables.row_of,
            mean,
            step,
            spec.heads,
            spec.head_dim,
            out.flat,
            out.head_stride,
            out.starts,
            kind,
        )
        found.append(escapes)

    run_split(decode, tokens, unit=TILE_TOKENS, elements=count)
    if sum(found) != positions.size:
        raise ContentError("escapes are not at the escape symbols")
    if positions.size:
        _patch_escapes(
            positions,
            indices,
            digits if digits is not None else _NO_DIGITS,
            radix,
            tokens,
            read_only(tables.order.astype(np.int64)),
            mean,
            step,
            spec.head_dim,
            out.flat,
            out.head_stride,
            out.starts,
            out.kind,
        )


def _escaped(symbols: U8, positions: npt.NDArray[np.int64]) -> bool:
    """Whether escapes ascend and are at escape symbols."""
    ascending = np.all(positions[1:] > positions[:-1]) and positions[-1] < symbols.size
    return bool(ascending and np.all(symbols[positions] == SYMBOL_ESCAPE))


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
