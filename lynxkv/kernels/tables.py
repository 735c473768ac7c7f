"""What the segments of a tensor share: codebooks, means, steps (SPEC 4.1)."""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(frozen=True, kw_only=True)
class EntropyTables:
    """Channel means [N] (f32, exact in bf16), stored channel order [N], step and half-step of the tensor."""

    mean: F32
    order: npt.NDArray[np.uint16]
    step: np.float32
    half_step: np.float32


Tables = FixedTables | EntropyTables | None
