"""Bit planes and radix groups (SPEC 8.1 and 8.4), row by row.

Byte k of a plane of width w and s bytes a row holds codes k, k + s, k + 2s, ...: unpacking is a shift, a mask and one
contiguous store for each of the 8 / w fields. Shifts by constants vectorise; shifts of bytes by variables do not (five
times slower for 4 bits), hence a function a width.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lynxkv.kernels.cpu.bits import helper


@helper
def _append_4(data: Any, first: int, s: int, codes: Any) -> None:
    for row in range(len(codes) // (2 * s)):
        plane = data[first + row * s : first + row * s + s]
        low = codes[row * 2 * s : row * 2 * s + s]
        high = codes[row * 2 * s + s : row * 2 * s + 2 * s]
        for k in range(s):
            low[k] = np.uint8(plane[k] & 15) | np.uint8(low[k] << 4)
        for k in range(s):
            high[k] = np.uint8(plane[k] >> 4) | np.uint8(high[k] << 4)


@helper
def _append_2(data: Any, first: int, s: int, codes: Any) -> None:
    for row in range(len(codes) // (4 * s)):
        plane = data[first + row * s : first + row * s + s]
        at = row * 4 * s
        a, b, c, d = codes[at : at + s], codes[at + s : at + 2 * s], codes[at + 2 * s : at + 3 * s], codes[at + 3 * s :]
        for k in range(s):
            a[k] = np.uint8(plane[k] & 3) | np.uint8(a[k] << 2)
        for k in range(s):
            b[k] = np.uint8((plane[k] >> 2) & 3) | np.uint8(b[k] << 2)
        for k in range(s):
            c[k] = np.uint8((plane[k] >> 4) & 3) | np.uint8(c[k] << 2)
        for k in range(s):
            d[k] = np.uint8(plane[k] >> 6) | np.uint8(d[k] << 2)


@helper
def _append_1(data: Any, first: int, s: int, codes: Any) -> None:
    for row in range(len(codes) // (8 * s)):
        plane = data[first + row * s : first + row * s + s]
        for field in range(8):
            at = (row * 8 + field) * s
            part = codes[at : at + s]
            bit = np.uint8(1 << field)
            for k in range(s):
                part[k] = np.uint8((plane[k] & bit) != 0) | np.uint8(part[k] << 1)


@helper
def unpack_rows(data: Any, rows: int, padded: int, bits: int, row: int, codes: Any) -> None:
    """Shift packed codes into `codes` [n, padded], u8, from below: rows [row, row + n) of the `rows` in `data`."""
    plane = 0
    if bits & 8:
        source = data[row * padded : row * padded + len(codes)]
        for k in range(len(codes)):
            codes[k] = source[k]
    if bits & 4:
        s = padded // 2
        _append_4(data, row * s, s, codes)
        plane += rows * s
    if bits & 2:
        s = padded // 4
        _append_2(data, plane + row * s, s, codes)
        plane += rows * s
    if bits & 1:
        s = padded // 8
        _append_1(data, plane + row * s, s, codes)


@helper
def clear(codes: Any) -> None:
    """Zero a u8 array; numba's slice assignment costs as much as unpacking a short row."""
    for k in range(len(codes)):
        codes[k] = 0


@helper
def _collect_4(codes: Any, s: int, data: Any, first: int, step: int) -> None:
    for row in range(len(codes) // (2 * s)):
        plane = data[first + row * step : first + row * step + s]
        low = codes[row * 2 * s : row * 2 * s + s]
        high = codes[row * 2 * s + s : row * 2 * s + 2 * s]
        for k in range(s):
            plane[k] = np.uint8(low[k] & 15) | np.uint8(high[k] << 4)
            low[k] >>= 4
            high[k] >>= 4


@helper
def _collect_2(codes: Any, s: int, data: Any, first: int, step: int) -> None:
    for row in range(len(codes) // (4 * s)):
        plane = data[first + row * step : first + row * step + s]
        at = row * 4 * s
        a, b, c, d = codes[at : at + s], codes[at + s : at + 2 * s], codes[at + 2 * s : at + 3 * s], codes[at + 3 * s :]
        for k in range(s):
            plane[k] = np.uint8(a[k] & 3) | np.uint8(np.uint8(b[k] & 3) << 2)
        for k in range(s):
            plane[k] |= np.uint8(np.uint8(c[k] & 3) << 4) | np.uint8(d[k] << 6)
        both = codes[at : at + 4 * s]
        for k in range(4 * s):
            both[k] >>= 2


@helper
def _collect_1(codes: Any, s: int, data: Any, first: int, step: int) -> None:
    for row in range(len(codes) // (8 * s)):
        plane = data[first + row * step : first + row * step + s]
        for k in range(s):
            plane[k] = 0
        for field in range(8):
            at = (row * 8 + field) * s
            part = codes[at : at + s]
            for k in range(s):
                plane[k] = np.uint8(plane[k] >> 1) | np.uint8(part[k] << 7)
                part[k] >>= 1


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
