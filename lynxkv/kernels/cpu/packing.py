"""Bit planes and radix groups (SPEC 8.1 and 8.4), row by row.

Byte k of a plane of width w and s bytes a row holds codes k, k + s, k + 2s, ...: unpacking is a shift, a mask and one
contiguous store for each of the 8 / w fields, which LLVM turns into vector code.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lynxkv.kernels.cpu.bits import jit


@jit
def unpack_row(data: Any, row: int, rows: int, bits: int, codes: Any) -> None:
    """Codes of one row of `rows`; `codes` is u8, as long as the padded row."""
    padded = len(codes)
    plane = 0
    shift = bits
    first = True
    for width in (8, 4, 2, 1):
        if not bits & width:
            continue
        shift -= width
        row_bytes = padded * width // 8
        source = data[plane + row * row_bytes : plane + (row + 1) * row_bytes]
        mask = np.uint8(0xFF >> (8 - width))
        for field in range(8 // width):
            part = codes[field * row_bytes : (field + 1) * row_bytes]
            down = np.uint8(field * width)
            up = np.uint8(shift)
            if first:
                for k in range(row_bytes):
                    part[k] = np.uint8(np.uint8(source[k] >> down) & mask) << up
            else:
                for k in range(row_bytes):
                    part[k] |= np.uint8(np.uint8(source[k] >> down) & mask) << up
        plane += rows * row_bytes
        first = False


@jit
def pack_row(codes: Any, row: int, rows: int, bits: int, data: Any) -> None:
    """Pack one row of `rows` into `data`; `codes` is u8, as long as the padded row, and zero beyond its codes."""
    padded = len(codes)
    plane = 0
    shift = bits
    for width in (8, 4, 2, 1):
        if not bits & width:
            continue
        shift -= width
        row_bytes = padded * width // 8
        target = data[plane + row * row_bytes : plane + (row + 1) * row_bytes]
        mask = np.uint8(0xFF >> (8 - width))
        down = np.uint8(shift)
        for field in range(8 // width):
            part = codes[field * row_bytes : (field + 1) * row_bytes]
            up = np.uint8(field * width)
            if field == 0:
                for k in range(row_bytes):
                    target[k] = np.uint8(part[k] >> down) & mask
            else:
                for k in range(row_bytes):
                    target[k] |= np.uint8(np.uint8(part[k] >> down) & mask) << up
        plane += rows * row_bytes
