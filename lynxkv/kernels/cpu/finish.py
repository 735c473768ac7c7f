"""The last step of decoding: from bytes to rounded values in the destination, many rows a call.

    out = round(fl(fl(value * scale) + offset))

All of it happens in registers, `LANES` channels at a time; only the packed bytes have been through memory before.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lynxkv.kernels.cpu.bits import helper, inlined, put, refined_index, wide_vectors
from lynxkv.kernels.cpu.lanes import LANES, f32_of_i8, f32_of_u8, gathered, load, permuted, spread
from lynxkv.packing import SYMBOL_ZERO

# Far enough below the largest bf16 that no sum rounds to infinity; bounds are worked out in f64.
BOUND = 3.0e38

PERMUTED, EVEN, GATHERED = 0, 1, 2
"""How codes become values: by a permutation of 16 entries, as code * slope + base, or by look-ups."""


@helper
def finish_symbols(tile: Any, padded: int, step: Any, mean: Any, out: Any, at: int, starts: Any, kind: int) -> None:
    """round((tile - 127) * step + mean[channel]) of a tile, u8 [tokens, padded], `padded` a multiple of `LANES`.

    Row i goes to `at` + starts[i] of `out`, a u16 or f32 array whose elements `kind` describes. Of an escape, which is
    one more than a signed byte holds, comes something.
    """
    wide_vectors()
    dim = len(mean)
    zero, steps = spread(np.uint8(SYMBOL_ZERO)), spread(step)
    for i in range(len(starts)):
        for d in range(0, dim, LANES):
            index = f32_of_i8(load(tile, i * padded + d, LANES) - zero)
            put(out, at + starts[i] + d, index * steps + load(mean, d, dim - d), dim - d, kind)


@helper
def finish_refined(
    tile: Any,
    low: Any,
    padded: int,
    radix: int,
    half_step: Any,
    mean: Any,
    out: Any,
    at: int,
    starts: Any,
    kind: int,
) -> None:
    """The same of j * half_step + mean[channel], j = 2 * ((tile - 127) * radix + low) - (radix - 1)."""
    wide_vectors()
    dim = len(mean)
    factor = spread(np.uint16(2 * radix))
    bias = spread(np.uint16(2 * radix * SYMBOL_ZERO + radix - 1))
    steps = spread(half_step)
    for i in range(len(starts)):
        for d in range(0, dim, LANES):
            at_lanes = i * padded + d
            index = refined_index(load(tile, at_lanes, LANES), load(low, at_lanes, LANES), factor, bias)
            put(out, at + starts[i] + d, index * steps + load(mean, d, dim - d), dim - d, kind)


@inlined
def _decoded(codes: Any, at: int, book: Any, entries: Any, how: int, slope: Any, base: Any) -> Any:
    picks = load(codes, at, LANES)
    if how == PERMUTED:
        return permuted(entries, picks)
    if how == EVEN:
        return f32_of_u8(picks) * slope + base
    return gathered(book, picks)


@helper
def finish_codes(
    codes: Any,
    padded: int,
    book: Any,
    even: Any,
    how: int,
    scale: Any,
    offset: Any,
    a_token: bool,
    heads: int,
    dim: int,
    out: Any,
    head_stride: int,
    starts: Any,
    kind: int,
) -> None:
    """round(book[codes] * scale + offset) of codes, u8 [tokens, heads, padded], with `LANES` bytes to spare.

    `scale` and `offset` are those of the tokens, or those of the channels [heads * dim] with `LANES` to spare. `even`
    is (slope, base), f32. Token i of the first head goes to starts[i] of `out`, a u16 or f32 array whose elements
    `kind` describes.
    """
    wide_vectors()
    entries = load(book, 0, LANES)
    slope, base = spread(even[0]), spread(even[1])
    for head in range(heads):
        for i in range(len(starts)):
            token_scale, token_offset = spread(scale[i if a_token else 0]), spread(offset[i if a_token else 0])
            first, start = (i * heads + head) * padded, starts[i] + head * head_stride
            for d in range(0, dim, LANES):
                value = _decoded(codes, first + d, book, entries, how, slope, base)
                if a_token:
                    value = value * token_scale + token_offset
                else:
                    channel = head * dim + d
                    value = value * load(scale, channel, LANES) + load(offset, channel, LANES)
                put(out, start + d, value, dim - d, kind)


@helper
def round_rows(
    values: Any, padded: int, heads: int, dim: int, out: Any, head_stride: int, starts: Any, kind: int
) -> None:
    """round(values), f32 [tokens, heads, padded] with `LANES` to spare; to where `finish_codes` writes."""
    wide_vectors()
    for i in range(len(starts)):
        for head in range(heads):
            first, start = (i * heads + head) * padded, starts[i] + head * head_stride
            for d in range(0, dim, LANES):
                put(out, start + d, load(values, first + d, LANES), dim - d, kind)
