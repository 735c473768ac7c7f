"""Packed rows, radix groups and symbols (SPEC 8.1 and 8.4) in numpy: sizes, packing, unpacking."""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

U8 = npt.NDArray[np.uint8]
I32 = npt.NDArray[np.int32]

MAX_RADIX = 32
SYMBOL_ZERO = 127
SYMBOL_ESCAPE = 255
INDEX_LIMIT = 1 << 18
_ESCAPE_DTYPE = np.dtype([("position", "<u4"), ("value", "<i4")])


@cache
def planes(bits: int) -> tuple[int, ...]:
    """Widths of the bit planes of a `bits`-bit code, most significant first: 7 gives (4, 2, 1)."""
    return tuple(width for width in (8, 4, 2, 1) if bits & width)


def plane_row_bytes(codes: int, bits: int) -> int:
    """Bytes of one packed row of `codes` codes, all planes together."""
    return -(-codes // 8) * bits


@cache
def radix_group(radix: int) -> tuple[int, int]:
    """(g, b): g digits of `radix` share a code of b <= 8 bits, at the fewest bits a digit (SPEC 8.4)."""
    choices = ((b / g, g, b) for b in range(1, 9) for g in range(1, 9) if radix**g <= 2**b)
    _, group, bits = min(choices)
    return group, bits


def pack_rows(codes: U8, bits: int) -> U8:
    """Pack codes [rows, m], each below 2^bits, to bytes [rows * plane_row_bytes(m, bits)], plane by plane."""
    rows, count = codes.shape
    padded = np.zeros((rows, -(-count // 8) * 8), np.uint8)
    padded[:, :count] = codes
    out, shift = [], bits
    for width in planes(bits):
        shift -= width
        per_byte = 8 // width
        fields = (padded >> shift) & (0xFF >> (8 - width))
        fields = fields.reshape(rows, per_byte, -1)
        plane = np.zeros((rows, fields.shape[2]), np.uint8)
        for j in range(per_byte):
            plane |= fields[:, j] << (j * width)
        out.append(plane.reshape(-1))
    return np.concatenate(out)


def unpack_rows(data: U8, rows: int, count: int, bits: int) -> U8:
    """Undo `pack_rows`: codes [rows, count] from the packed bytes.

    Raises:
        ValueError: a code beyond `count` is not zero.
    """
    padded = -(-count // 8) * 8
    codes = np.zeros((rows, padded), np.uint8)
    at, shift = 0, bits
    for width in planes(bits):
        shift -= width
        row_bytes = padded * width // 8
        plane = data[at : at + rows * row_bytes].reshape(rows, row_bytes)
        at += rows * row_bytes
        for j in range(8 // width):
            field = (plane >> (j * width)) & (0xFF >> (8 - width))
            codes[:, j * row_bytes : (j + 1) * row_bytes] |= field << shift
    if codes[:, count:].any():
        raise ValueError("padding codes are not zero")
    return codes[:, :count]


def pack_digits(digits: U8, radix: int) -> U8:
    """Pack digits [rows, t] below `radix` in groups (SPEC 8.4): code j holds digits j, j + u, j + 2u, ..."""
    group, bits = radix_group(radix)
    rows, count = digits.shape
    codes_per_row = -(-count // group)
    padded = np.zeros((rows, group * codes_per_row), np.uint8)
    padded[:, :count] = digits
    codes = np.zeros((rows, codes_per_row), np.uint8)
    for e in reversed(range(group)):
        codes = codes * np.uint8(radix) + padded[:, e * codes_per_row : (e + 1) * codes_per_row]
    return pack_rows(codes, bits)


def unpack_digits(data: U8, rows: int, count: int, radix: int) -> U8:
    """Undo `pack_digits`: digits [rows, count].

    Raises:
        ValueError: a code is not below radix^g, or padding is not zero.
    """
    group, bits = radix_group(radix)
    codes_per_row = -(-count // group)
    codes = unpack_rows(data, rows, codes_per_row, bits)
    if radix**group < 2**bits and codes.max(initial=0) >= radix**group:
        raise ValueError(f"a residual code is not below {radix}^{group}")
    digits = np.empty((rows, group * codes_per_row), np.uint8)
    for e in range(group):
        digits[:, e * codes_per_row : (e + 1) * codes_per_row] = codes % radix
        codes = codes // radix
    if digits[:, count:].any():
        raise ValueError("padding digits are not zero")
    return digits[:, :count]


def pack_symbols(index: I32) -> U8:
    """One byte for each index, row by row, then position and value of those that do not fit (SPEC 8.4)."""
    flat = index.reshape(-1)
    positions = np.flatnonzero(np.abs(flat) > SYMBOL_ZERO)
    symbols = (flat + SYMBOL_ZERO).astype(np.uint8)
    symbols[positions] = SYMBOL_ESCAPE
    escapes = np.empty(positions.size, _ESCAPE_DTYPE)
    escapes["position"], escapes["value"] = positions, flat[positions]
    return np.concatenate([symbols, escapes.view(np.uint8)])


def unpack_symbols(data: U8, count: int) -> I32:
    """Undo `pack_symbols`: `count` indices.

    Raises:
        ValueError: escapes are not exactly where the escape symbols are, or a value is out of range.
    """
    symbols = data[:count]
    escapes = data[count:].view(_ESCAPE_DTYPE)
    positions = escapes["position"].astype(np.int64)
    if not np.array_equal(np.flatnonzero(symbols == SYMBOL_ESCAPE), positions):
        raise ValueError("escapes are not at the escape symbols")
    if np.any((escapes["value"] <= -INDEX_LIMIT) | (escapes["value"] >= INDEX_LIMIT)):
        raise ValueError("an escape is out of range")
    index = symbols.astype(np.int32) - SYMBOL_ZERO
    index[positions] = escapes["value"]
    return index
