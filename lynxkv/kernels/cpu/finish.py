"""The last step of decoding: from bytes to rounded values in the destination, many rows a call.

    out = round(fl(fl(value * scale) + offset))

For each rounding a loop of its own, over many rows: a call a row, with its counted references to every array, costs a
third more, and so does a second loop only to round.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba.core import types
from numba.extending import overload

from lynxkv.kernels.cpu.bits import (
    BF16,
    BF16_BOUNDED,
    BF16_IN_F32,
    FP16_IN_F32,
    bf16_of,
    bf16_of_bounded,
    f32_of_bf16,
    f32_of_fp16,
    fp16_of,
    helper,
    refined_index,
    wide_vectors,
)
from lynxkv.packing import SYMBOL_ZERO

# Far enough below the largest bf16 that no sum rounds to infinity; bounds are worked out in f64.
BOUND = 3.0e38


def _loops(rounded: Callable[[Any], Any]) -> tuple[Callable[..., None], Callable[..., None], Callable[..., None]]:
    """The three loops below with one rounding, f32 to an element of the destination."""

    @helper
    def symbols(
        tile: Any, padded: Any, factor: Any, bias: Any, low: Any, step: Any, mean: Any, out: Any, at: Any, starts: Any
    ) -> None:
        wide_vectors()
        dim = len(mean)
        for i in range(len(starts)):
            high = tile[i * padded : i * padded + dim]
            row = out[at + starts[i] : at + starts[i] + dim]
            for d in range(dim):
                row[d] = rounded((np.float32(high[d]) - np.float32(SYMBOL_ZERO)) * step + mean[d])

    @helper
    def refined(
        tile: Any, padded: Any, factor: Any, bias: Any, low: Any, step: Any, mean: Any, out: Any, at: Any, starts: Any
    ) -> None:
        wide_vectors()
        dim = len(mean)
        for i in range(len(starts)):
            high = tile[i * padded : i * padded + dim]
            digit = low[i * padded : i * padded + dim]
            row = out[at + starts[i] : at + starts[i] + dim]
            for d in range(dim):
                row[d] = rounded(refined_index(high[d], digit[d], factor, bias) * step + mean[d])

    @helper
    def rows(
        values: Any,
        padded: Any,
        scale: Any,
        offset: Any,
        heads: Any,
        out: Any,
        at: Any,
        head_stride: Any,
        starts: Any,
    ) -> None:
        wide_vectors()
        dim = len(scale) // heads
        for i in range(len(values) // padded):
            head = i % heads
            v = values[i * padded : i * padded + dim]
            s = scale[head * dim : head * dim + dim]
            o = offset[head * dim : head * dim + dim]
            start = at + head * head_stride + starts[i // heads]
            row = out[start : start + dim]
            for d in range(dim):
                row[d] = rounded(v[d] * s[d] + o[d])

    return symbols, refined, rows


@helper
def _bf16_widened(value: Any) -> Any:
    return f32_of_bf16(bf16_of(value))


@helper
def _fp16_widened(value: Any) -> Any:
    return f32_of_fp16(fp16_of(value))


@helper
def _unrounded(value: Any) -> Any:
    return value


_symbols_bf16, _refined_bf16, _values_bf16 = _loops(bf16_of)
_symbols_bounded, _refined_bounded, _values_bounded = _loops(bf16_of_bounded)
_symbols_fp16, _refined_fp16, _values_fp16 = _loops(fp16_of)
_symbols_bf16_f32, _refined_bf16_f32, _values_bf16_f32 = _loops(_bf16_widened)
_symbols_fp16_f32, _refined_fp16_f32, _values_fp16_f32 = _loops(_fp16_widened)
_symbols_f32, _refined_f32, _values_f32 = _loops(_unrounded)


def finish_symbols(
    tile: Any,
    padded: int,
    factor: Any,
    bias: Any,
    low: Any,
    step: Any,
    mean: Any,
    out: Any,
    at: int,
    starts: Any,
    kind: int,
) -> None:
    """Values of tile and low, u8 [tokens, padded]: round((tile * factor + 2 * low - bias) * step + mean[channel]).

    Where `low` is None it is round((tile - 127) * step + mean[channel]). `factor` and `bias` are int16. Row i goes to
    `at` + starts[i] of `out`, a u16 or f32 array whose elements `kind` describes.
    """
    raise NotImplementedError("compiled code only")


@overload(finish_symbols)
def _finish_symbols(
    tile: Any,
    padded: Any,
    factor: Any,
    bias: Any,
    low: Any,
    step: Any,
    mean: Any,
    out: Any,
    at: Any,
    starts: Any,
    kind: Any,
) -> Any:
    # Which loop is known when compiling: code for anchors alone is there in half the time.
    anchor = isinstance(low, types.NoneType)
    bounded, bf16, fp16 = (
        (_symbols_bounded, _symbols_bf16, _symbols_fp16) if anchor else (_refined_bounded, _refined_bf16, _refined_fp16)
    )
    bf16_f32, fp16_f32, f32 = (
        (_symbols_bf16_f32, _symbols_fp16_f32, _symbols_f32)
        if anchor
        else (_refined_bf16_f32, _refined_fp16_f32, _refined_f32)
    )

    def into_16(
        tile: Any,
        padded: Any,
        factor: Any,
        bias: Any,
        low: Any,
        step: Any,
        mean: Any,
        out: Any,
        at: Any,
        starts: Any,
        kind: Any,
    ) -> Any:
        if kind == BF16_BOUNDED:
            bounded(tile, padded, factor, bias, low, step, mean, out, at, starts)
        elif kind == BF16:
            bf16(tile, padded, factor, bias, low, step, mean, out, at, starts)
        else:
            fp16(tile, padded, factor, bias, low, step, mean, out, at, starts)

    def into_32(
        tile: Any,
        padded: Any,
        factor: Any,
        bias: Any,
        low: Any,
        step: Any,
        mean: Any,
        out: Any,
        at: Any,
        starts: Any,
        kind: Any,
    ) -> Any:
        if kind == BF16_IN_F32:
            bf16_f32(tile, padded, factor, bias, low, step, mean, out, at, starts)
        elif kind == FP16_IN_F32:
            fp16_f32(tile, padded, factor, bias, low, step, mean, out, at, starts)
        else:
            f32(tile, padded, factor, bias, low, step, mean, out, at, starts)

    return into_16 if out.dtype == types.uint16 else into_32


def finish_values(
    values: Any,
    padded: int,
    scale: Any,
    offset: Any,
    heads: int,
    out: Any,
    at: int,
    head_stride: int,
    starts: Any,
    kind: int,
) -> None:
    """round(values * scale + offset), f32 [tokens, heads, padded] and twice [heads, head_dim].

    Token i of the first head goes to `at` + starts[i] of `out`, a u16 or f32 array whose elements `kind` describes.
    """
    raise NotImplementedError("compiled code only")


@overload(finish_values)
def _finish_values(
    values: Any,
    padded: Any,
    scale: Any,
    offset: Any,
    heads: Any,
    out: Any,
    at: Any,
    head_stride: Any,
    starts: Any,
    kind: Any,
) -> Any:
    def into_16(
        values: Any,
        padded: Any,
        scale: Any,
        offset: Any,
        heads: Any,
        out: Any,
        at: Any,
        head_stride: Any,
        starts: Any,
        kind: Any,
    ) -> Any:
        if kind == BF16_BOUNDED:
            _values_bounded(values, padded, scale, offset, heads, out, at, head_stride, starts)
        elif kind == BF16:
            _values_bf16(values, padded, scale, offset, heads, out, at, head_stride, starts)
        else:
            _values_fp16(values, padded, scale, offset, heads, out, at, head_stride, starts)

    def into_32(
        values: Any,
        padded: Any,
        scale: Any,
        offset: Any,
        heads: Any,
        out: Any,
        at: Any,
        head_stride: Any,
        starts: Any,
        kind: Any,
    ) -> Any:
        if kind == BF16_IN_F32:
            _values_bf16_f32(values, padded, scale, offset, heads, out, at, head_stride, starts)
        elif kind == FP16_IN_F32:
            _values_fp16_f32(values, padded, scale, offset, heads, out, at, head_stride, starts)
        else:
            _values_f32(values, padded, scale, offset, heads, out, at, head_stride, starts)

    return into_16 if out.dtype == types.uint16 else into_32
