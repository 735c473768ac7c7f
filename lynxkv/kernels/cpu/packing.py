"""Bit planes and radix groups (SPEC 8.1 and 8.4), row by row.

Byte k of a plane of width w and s bytes a row holds codes k, k + s, k + 2s, ...: unpacking is a shift, a mask and one
contiguous store for each of the 8 / w fields. Shifts by constants are one instruction; shifts of bytes by variables are
many, hence functions a width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from lynxkv.kernels.cpu.bits import helper, wide_vectors
from lynxkv.kernels.cpu.lanes import LANES, load, spread, store


def _plane(width: int) -> tuple[Callable[..., None], Callable[..., None]]:
    """The ways out of and into a plane of this width."""
    fields, mask = 8 // width, (1 << width) - 1

    @helper
    def append(data: Any, first: int, s: int, codes: Any, fresh: bool) -> None:
        wide_vectors()
        by, lowest = spread(np.uint8(width)), spread(np.uint8(mask))
        for row in range(len(codes) // (fields * s)):
            for k in range(0, s, LANES):
                plane = load(data, first + row * s + k, s - k)
                for field in range(fields):
                    at, part = (row * fields + field) * s + k, plane & lowest
                    if not fresh:
                        part = part | (load(codes, at, s - k) << by)
                    store(codes, at, part, s - k)
                    plane = plane >> by

    @helper
    def collect(codes: Any, s: int, data: Any, first: int, step: int) -> None:
        wide_vectors()
        by, lowest = spread(np.uint8(width)), spread(np.uint8(mask))
        for row in range(len(codes) // (fields * s)):
            for k in range(0, s, LANES):
                plane = spread(np.uint8(0))
                for field in range(fields - 1, -1, -1):
                    at = (row * fields + field) * s + k
                    part = load(codes, at, s - k)
                    plane = (plane << by) | (part & lowest)
                    store(codes, at, part >> by, s - k)
                store(data, first + row * step + k, plane, s - k)

    return append, collect


_append_1, _collect_1 = _plane(1)
_append_2, _collect_2 = _plane(2)
_append_4, _collect_4 = _plane(4)


@helper
def unpack_rows(data: Any, rows: int, padded: int, bits: int, row: int, codes: Any, fresh: bool) -> None:
    """Rows [row, row + n) of the `rows` in `data` into `codes` [n, padded], u8; unless `fresh` below what is there."""
    plane = 0
    if bits & 8:
        source = data[row * padded : row * padded + len(codes)]
        for k in range(len(codes)):
            codes[k] = source[k]
    if bits & 4:
        s = padded // 2
        _append_4(data, row * s, s, codes, fresh)
        plane += rows * s
        fresh = False
    if bits & 2:
        s = padded // 4
        _append_2(data, plane + row * s, s, codes, fresh)
        plane += rows * s
        fresh = False
    if bits & 1:
        s = padded // 8
        _append_1(data, plane + row * s, s, codes, fresh)


@helper
def clear(codes: Any) -> None:
    """Zero a u8 array; numba's slice assignment costs as much as unpacking a short row."""
    for k in range(len(codes)):
        codes[k] = 0


@helper
def pack_rows(codes: Any, rows: int, padded: int, bits: int, row: int, step: int, data: Any) -> None:
    """Pack the lowest `bits` of codes [n, padded], u8, as rows row, row + step, ... of the `rows` in `data`.

    What is packed is shifted out of `codes`, as long as `bits` is less than 8; the rest stays.
    """
    unit = padded // 8
    plane = rows * unit * bits
    if bits & 1:
        plane -= rows * unit
        _collect_1(codes, unit, data, plane + row * unit, step * unit)
    if bits & 2:
        plane -= rows * unit * 2
        _collect_2(codes, unit * 2, data, plane + row * unit * 2, step * unit * 2)
    if bits & 4:
        plane -= rows * unit * 4
        _collect_4(codes, unit * 4, data, plane + row * unit * 4, step * unit * 4)
    if bits & 8:
        for i in range(len(codes) // padded):
            at = (row + i * step) * padded
            target = data[at : at + padded]
            source = codes[i * padded : (i + 1) * padded]
            for k in range(padded):
                target[k] = source[k]
