"""Bit planes inside kernels (SPEC 8.1), and rows of a destination.

A padded row is eight runs of `unit` codes, and a plane of width w takes w * unit bytes of it. Code k + f * unit lies in
byte k + (f mod w) * unit of the row's plane, at bit (f div w) * w: for one f all of a tile's codes are neighbours, in
memory as in the row, whatever the planes are.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_codes(
    data: tl.tensor,
    rows: tl.tensor,
    row: tl.tensor,
    unit: tl.tensor,
    f: tl.tensor,
    k: tl.tensor,
    mask: tl.tensor,
    BITS: tl.constexpr,
) -> tl.tensor:
    """Codes k + f * unit of each `row` of `rows`, int32; `row` and `k` broadcast against each other."""
    code = tl.zeros_like(row + k).to(tl.int32)
    plane = data
    if BITS & 8:
        code = tl.load(plane + row * (unit * 8) + f * unit + k, mask=mask, other=0).to(tl.int32)
    if BITS & 4:
        byte = tl.load(plane + row * (unit * 4) + (f % 4) * unit + k, mask=mask, other=0).to(tl.int32)
        code = (code << 4) | ((byte >> (f // 4 * 4)) & 15)
        plane += rows * unit * 4
    if BITS & 2:
        byte = tl.load(plane + row * (unit * 2) + (f % 2) * unit + k, mask=mask, other=0).to(tl.int32)
        code = (code << 2) | ((byte >> (f // 2 * 2)) & 3)
        plane += rows * unit * 2
    if BITS & 1:
        byte = tl.load(plane + row * unit + k, mask=mask, other=0).to(tl.int32)
        code = (code << 1) | ((byte >> f) & 1)
    return code


@triton.jit
def row_start(
    token: tl.tensor,
    mask: tl.tensor,
    token_stride: tl.tensor,
    table: tl.tensor,
    first: tl.tensor,
    page_stride: tl.tensor,
    SLOTS: tl.constexpr,
) -> tl.tensor:
    """Where the row of each token begins, in a head of the destination; SLOTS 0 means that there are no pages."""
    if SLOTS > 0:
        place = token.to(tl.int32) + first
        page = tl.load(table + place // SLOTS, mask=mask, other=0)
        start = page * page_stride + (place % SLOTS).to(tl.int64) * token_stride
    else:
        start = token.to(tl.int64) * token_stride
    return start


@triton.jit
def load_group(
    digits: tl.tensor,
    start: tl.tensor,
    j: tl.tensor,
    per_row: tl.tensor,
    count: tl.tensor,
    mask: tl.tensor,
    RADIX: tl.constexpr,
    GROUP: tl.constexpr,
) -> tl.tensor:
    """The code of digits j, j + per_row, ... of a row of `count` that begins at `start`; zero beyond."""
    code = tl.zeros_like(start + j).to(tl.int32)
    for e in tl.static_range(GROUP - 1, -1, -1):
        at = j + e * per_row
        digit = tl.load(digits + start + at, mask=mask & (j < per_row) & (at < count), other=0).to(tl.int32)
        code = code * RADIX + digit
    return code


@triton.jit
def pack_kernel(
    digits: tl.tensor,
    packed: tl.tensor,
    rows: tl.tensor,
    count: tl.tensor,
    per_row: tl.tensor,
    unit_blocks: tl.tensor,
    SHIFT: tl.constexpr,
    BITS: tl.constexpr,
    RADIX: tl.constexpr,
    GROUP: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """Rows of `count` u8 digits, GROUP of them to a code, packed; of each code the BITS above SHIFT."""
    unit = unit_blocks * ALIGN
    row = (tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)[:, None]
    k = (tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K))[None, :]
    mask = (row < rows) & (k < unit)
    start = row * count
    plane = packed
    for power in tl.static_range(3, -1, -1):
        if BITS & (1 << power):
            for r in range(1 << power):
                byte = tl.zeros((BLOCK_R, BLOCK_K), tl.int32)
                for g in tl.static_range(8 >> power):
                    j = k + (r + g * (1 << power)) * unit
                    code = load_group(digits, start, j, per_row, count, mask, RADIX, GROUP)
                    code = (code >> (SHIFT + (BITS & ((1 << power) - 1)))) & ((1 << (1 << power)) - 1)
                    byte |= code << (g * (1 << power))
                tl.store(plane + row * (unit << power) + r * unit + k, byte.to(tl.uint8), mask=mask)
            plane += rows.to(tl.int64) * unit << power
