"""What a uniform quantiser wants to know of a tensor: mean and variance of each channel, and the farthest value."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from lynxkv.kernels.cpu.bits import bf16_of, f32_of_bf16, jit, wide_vectors, widened
from lynxkv.kernels.cpu.lanes import LANES, f32_of_f64, f64_of_f32, load, maximum, minimum, spread, store
from lynxkv.kernels.cpu.memory import source
from lynxkv.kernels.cpu.threads import run_split
from lynxkv.kernels.tables import ChannelStatistics

# Still in the first-level cache when it is read again.
_BLOCK_TOKENS = 32


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
    """Heads [start, stop), in blocks, each read twice: for its mean, then for the squares about that.

    Blocks are put together as in Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing
    Sample Variances" (1979). Sums are in f64, so that no square overflows.
    """
    wide_vectors()
    room = dim + LANES
    for head in range(start, stop):
        sums, squares = np.zeros(room, np.float64), np.zeros(room, np.float64)
        lowest, highest = np.full(room, np.inf, np.float32), np.full(room, -np.inf, np.float32)
        for first in range(0, tokens, _BLOCK_TOKENS):
            count = min(_BLOCK_TOKENS, tokens - first)
            before = spread(np.float64(max(1, first)))
            apart = spread(np.float64(first) * np.float64(count) / np.float64(first + count))
            for d in range(0, dim, LANES):
                at, width = head * head_stride + first * token_stride + d, dim - d
                low, high = load(lowest, d, LANES), load(highest, d, LANES)
                total = spread(np.float64(0))
                for i in range(count):
                    value = widened(x, at + i * token_stride, width, kind)
                    total = total + f64_of_f32(value)
                    low, high = minimum(value, low), maximum(value, high)
                own_mean = total / spread(np.float64(count))
                centre = f32_of_f64(own_mean)
                own_squares = spread(np.float64(0))
                for i in range(count):
                    distance = f64_of_f32(widened(x, at + i * token_stride, width, kind) - centre)
                    own_squares = own_squares + distance * distance
                sum_before = load(sums, d, LANES)
                shift = own_mean - sum_before / before  # nothing at all in a constant channel
                store(sums, d, sum_before + total, LANES)
                store(squares, d, load(squares, d, LANES) + own_squares + shift * shift * apart, LANES)
                store(lowest, d, low, LANES)
                store(highest, d, high, LANES)
        for d in range(dim):
            rounded = f32_of_bf16(bf16_of(np.float32(sums[d] / tokens)))
            means[head * dim + d] = rounded
            variances[head * dim + d] = squares[d] / tokens
            peaks[head * dim + d] = max(highest[d] - rounded, rounded - lowest[d])


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
