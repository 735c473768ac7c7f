"""What a uniform quantiser wants to know of a tensor: mean and variance of each channel, and the farthest value."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from lynxkv.kernels.cpu.bits import bf16_of, f32_of_bf16, helper, jit, load_rows, wide_vectors
from lynxkv.kernels.cpu.memory import source
from lynxkv.kernels.cpu.threads import run_split
from lynxkv.kernels.tables import ChannelStatistics

_BLOCK_TOKENS = 32


@helper
def _add(values: Any, width: int, sums: Any) -> None:
    for i in range(len(values) // width):
        row = values[i * width : (i + 1) * width]
        for x in range(width):
            sums[x] += np.float64(row[x])


@helper
def _add_squares(values: Any, width: int, mean: Any, rounded: Any, squares: Any, peaks: Any) -> None:
    for i in range(len(values) // width):
        row = values[i * width : (i + 1) * width]
        for x in range(width):
            centred = np.float64(row[x] - mean[x])
            squares[x] += centred * centred
        for x in range(width):
            peaks[x] = max(peaks[x], abs(row[x] - rounded[x]))


@jit
def _statistics(
    start: int,
    stop: int,
    x: Any,
    head_stride: int,
    token_stride: int,
    kind: int,
    tokens: int,
    dim: int,
    means: Any,
    variances: Any,
    peaks: Any,
) -> None:
    """Heads [start, stop), each read twice, in blocks: sums in f64, so that no square overflows."""
    wide_vectors()
    padded = -(-dim // 8) * 8
    values = np.zeros(_BLOCK_TOKENS * padded, np.float32)
    for head in range(start, stop):
        sums, squares = np.zeros(padded, np.float64), np.zeros(padded, np.float64)
        mean, rounded, peak = np.zeros(padded, np.float32), np.zeros(padded, np.float32), np.zeros(padded, np.float32)
        for second in range(2):
            for first in range(0, tokens, _BLOCK_TOKENS):
                part = values[: min(_BLOCK_TOKENS, tokens - first) * padded]
                load_rows(x, head * head_stride + first * token_stride, 0, token_stride, 1, dim, part, kind)
                if second:
                    _add_squares(part, padded, mean, rounded, squares, peak)
                else:
                    _add(part, padded, sums)
            if not second:
                for d in range(padded):
                    mean[d] = np.float32(sums[d] / tokens)
                    rounded[d] = f32_of_bf16(bf16_of(mean[d]))
        for d in range(dim):
            means[head * dim + d] = rounded[d]
            variances[head * dim + d] = squares[d] / tokens
            peaks[head * dim + d] = peak[d]


def channel_statistics(x: Tensor) -> ChannelStatistics:
    """Statistics of x [H, T, D] without a copy in f32; see `ChannelStatistics`."""
    heads, tokens, dim = x.shape
    place = source(x)
    means, peaks = np.empty(heads * dim, np.float32), np.empty(heads * dim, np.float32)
    variances = np.empty(heads * dim, np.float64)

    def measure(start: int, stop: int) -> None:
        strides = (place.head_stride, place.token_stride)
        _statistics(start, stop, place.flat, *strides, place.kind, tokens, dim, means, variances, peaks)

    run_split(measure, heads, unit=1, elements=x.numel())
    return ChannelStatistics(mean=means, variance=variances, peak=float(peaks.max()))
