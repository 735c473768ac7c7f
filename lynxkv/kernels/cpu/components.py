"""From the sums of components to values in the destination (SPEC 8.8): step, mean, turn and rounding in one pass.

v = fl(fl(S * step) + mean), turned by position, rounded
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from lynxkv.kernels.cpu.bits import helper, jit, wide_vectors
from lynxkv.kernels.cpu.finish import round_rows
from lynxkv.kernels.cpu.lanes import LANES
from lynxkv.kernels.cpu.memory import Rows, read_only
from lynxkv.kernels.cpu.threads import run_split
from lynxkv.kernels.tables import F32, EntropyTables, Transform
from lynxkv.layout import TensorSpec

# Tokens a tile: its values stay in the first-level cache, of 192 channels as of 1,024.
TILE_TOKENS = 16


@helper
def _turn(row: Any, cos: Any, sin: Any) -> None:
    wide_vectors()
    pairs = len(cos)
    for i in range(pairs):
        x, y = row[i], row[pairs + i]
        row[i] = x * cos[i] - y * sin[i]
        row[pairs + i] = y * cos[i] + x * sin[i]


@jit
def _place_tiles(
    start: int,
    stop: int,
    sums: Any,
    step: Any,
    mean: Any,
    cos: Any,
    sin: Any,
    heads: int,
    dim: int,
    out: Any,
    head_stride: int,
    starts: Any,
    kind: int,
) -> None:
    """Tokens [start, stop) of sums [blocks, T, n]; without rope `cos` and `sin` are [0, 0]."""
    blocks, _, size = sums.shape
    padded = -(-dim // 8) * 8
    tile = np.zeros(TILE_TOKENS * heads * padded + LANES, np.float32)
    for first in range(start, stop, TILE_TOKENS):
        count = min(TILE_TOKENS, stop - first)
        for i in range(count):
            for block in range(blocks):
                line = sums[block, first + i]
                at = block * size
                while at < (block + 1) * size:
                    head, d = at // dim, at % dim
                    run = min(dim - d, (block + 1) * size - at)
                    row = tile[(i * heads + head) * padded + d : (i * heads + head) * padded + d + run]
                    own = line[at - block * size : at - block * size + run]
                    means = mean[at : at + run]
                    for k in range(run):
                        row[k] = own[k] * step + means[k]
                    at += run
            if len(cos):
                for head in range(heads):
                    row = tile[(i * heads + head) * padded : (i * heads + head) * padded + dim]
                    _turn(row, cos[first + i], sin[first + i])
        values, own_starts = tile[: count * heads * padded], starts[first : first + count]
        round_rows(values, padded, heads, dim, out, head_stride, own_starts, kind)


def place_components(
    sums: F32, tables: EntropyTables, transform: Transform, spec: TensorSpec, step: float, place: Rows
) -> None:
    """Write the values of sums [blocks, T, n] to `place`."""
    tokens = sums.shape[1]
    empty: npt.NDArray[np.float32] = np.empty((0, 0), np.float32)
    cos, sin = transform.rope.angles(tokens) if transform.rope is not None else (empty, empty)
    mean = read_only(tables.mean.astype(np.float32, copy=False))

    def work(start: int, stop: int) -> None:
        _place_tiles(
            start,
            stop,
            read_only(sums),
            np.float32(step),
            mean,
            read_only(cos),
            read_only(sin),
            spec.heads,
            spec.head_dim,
            place.flat,
            place.head_stride,
            place.starts,
            place.kind,
        )

    run_split(work, tokens, unit=TILE_TOKENS, elements=sums.size)
