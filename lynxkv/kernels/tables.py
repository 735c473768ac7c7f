"""What the segments of a tensor share: codebooks, means, steps (SPEC 4.1)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class FixedTables:
    """Values of codes, f32: `anchor` [2^a], `full` [2^(a+r)], `scale` and `offset` [256] for u8 chunk parameters.

    The quantiser alone uses the rest: a scaled value between edges[i - 1] and edges[i] takes the full code buckets[i],
    and a chunk is scaled so that its largest magnitude becomes `peak`.
    """

    anchor: F32
    full: F32 | None = None
    scale: F32 | None = None
    offset: F32 | None = None
    edges: F32 | None = None
    buckets: npt.NDArray[np.uint8] | None = None
    peak: float = 1.0

    def quantiser(self) -> tuple[F32, npt.NDArray[np.uint8]]:
        """Edges and buckets, which tables read from a cache do not have."""
        if self.edges is None or self.buckets is None:
            raise TypeError("these tables only decode")
        return self.edges, self.buckets

    @cached_property
    def cells(self) -> tuple[npt.NDArray[np.uint16], F32, int]:
        """The search for a bucket, prepared: floats with the same upper 16 bits form a cell.

        The number of edges not above the smallest float of each cell, the edges with infinities after them, and the
        most edges that lie within one cell: so many comparisons finish the search.
        """
        edges, _ = self.quantiser()
        upper = np.arange(1 << 16, dtype=np.uint32) << 16
        inner, outer = upper.view(np.float32), (upper | 0xFFFF).view(np.float32)
        negative = upper >> 31 == 1
        with np.errstate(invalid="ignore"):
            below = np.searchsorted(edges, np.where(negative, outer, inner), side="right")
            within = np.searchsorted(edges, np.where(negative, inner, outer), side="right") - below
        most = int(within[np.isfinite(inner)].max())
        padded = np.concatenate([edges, np.full(most, np.inf, np.float32)]).astype(np.float32)
        return below.astype(np.uint16), padded, most


@dataclass(frozen=True, kw_only=True)
class EntropyTables:
    """Channel means [N] (f32, exact in bf16), stored channel order [N], step and half-step of the tensor."""

    mean: F32
    order: npt.NDArray[np.uint16]
    step: np.float32
    half_step: np.float32


@dataclass(frozen=True, kw_only=True)
class ChannelStatistics:
    """Of each channel, [N]: its mean rounded to bf16 (f32), and its variance (f64) about the mean before rounding.

    A large bias, which bf16 holds coarsely, is no spread. `peak` is the largest distance of any value from a rounded
    mean.
    """

    mean: F32
    variance: npt.NDArray[np.float64]
    peak: float


Tables = FixedTables | EntropyTables | None
