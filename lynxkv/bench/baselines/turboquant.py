"""After TurboQuant (arXiv 2504.19874), its variant for the mean square error: rotate, then a scalar codebook.

Each head's vector of a token is stored as its length in 16 bits and, for its direction turned by one random rotation,
the nearest codes of the Lloyd-Max codebook for a coordinate of a random direction. No channels are set apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from lynxkv.bench.baselines.base import Coded, TensorBaseline
from lynxkv.codecs.base import check_range
from lynxkv.kernels.rounding import round_to
from lynxkv.layout import TensorName

_GRID = 20_001
_ROUNDS = 500


@dataclass(frozen=True, kw_only=True)
class TurboQuant(TensorBaseline):
    """`bits` a coordinate."""

    name: ClassVar[str] = "turboquant"

    bits: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("bits", self.bits, 1, 8)
        check_range("seed", self.seed, 0, 2**31)

    def code(self, x: Tensor, tensor: TensorName, depth: float) -> Coded:
        rotation, table = random_rotation(x.shape[2], self.seed), sphere_codebook(x.shape[2], self.bits)
        length = torch.linalg.vector_norm(x, dim=2, keepdim=True)
        unit = torch.where(length > 0, x / length, 0.0) @ rotation
        code = torch.bucketize(unit, (table[1:] + table[:-1]) / 2)
        full = table[code] @ rotation.T * round_to(length, "bf16").to(torch.float32)
        return Coded(full=full, bits=x.numel() * self.bits + length.numel() * 16)


def random_rotation(dim: int, seed: int) -> Tensor:
    """An orthogonal matrix [dim, dim], uniform over all of them."""
    q, r = torch.linalg.qr(torch.randn(dim, dim, generator=torch.Generator().manual_seed(seed)))
    rotation: Tensor = q * r.diagonal().sign()
    return rotation


@lru_cache
def sphere_codebook(dim: int, bits: int) -> Tensor:
    """Lloyd-Max centres of a coordinate of a random unit vector, whose density is (1 - x^2)^((dim - 3) / 2)."""
    x = torch.linspace(-1, 1, _GRID, dtype=torch.float64)[1:-1]
    weight = (1 - x**2) ** ((dim - 3) / 2)
    mass = torch.cat([torch.zeros(1, dtype=torch.float64), weight.cumsum(0)])
    moment = torch.cat([torch.zeros(1, dtype=torch.float64), (weight * x).cumsum(0)])
    quantiles = (torch.arange(2**bits, dtype=torch.float64) + 0.5) / 2**bits * mass[-1]
    centres = x[torch.searchsorted(mass[1:], quantiles)]
    for _ in range(_ROUNDS):
        edge = torch.searchsorted(x, (centres[1:] + centres[:-1]) / 2)
        edge = torch.cat([torch.zeros(1, dtype=edge.dtype), edge, torch.tensor([len(x)])])
        inside = mass[edge].diff()
        centres = torch.where(inside > 0, moment[edge].diff() / inside.clamp(min=1e-300), centres)
    return centres.to(torch.float32)
