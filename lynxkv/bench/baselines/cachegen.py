"""After CacheGen (arXiv 2310.07240): differences to a group's first token, coarser in later layers, entropy-coded.

What differs from the paper: bins are in units of the tensor's standard deviation of differences, and the arithmetic
coder, with one table a channel, is taken to reach its entropy and to need no tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lynxkv.bench.baselines.base import Coded, TensorBaseline, affine
from lynxkv.codecs.base import check_range
from lynxkv.layout import TensorName


@dataclass(frozen=True, kw_only=True)
class CacheGen(TensorBaseline):
    """Groups of `group` tokens, the first in 8 bits; bins of `bin`, 2 and 3 times that by thirds of the layers."""

    name: ClassVar[str] = "cachegen"

    group: int = 10
    bin: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("group", self.group, 2, 1 << 16)
        check_range("bin", self.bin, 1e-3, 100)

    def code(self, x: Tensor, tensor: TensorName, depth: float) -> Coded:
        first = torch.arange(x.shape[1]) // self.group * self.group
        leaders, pairs = affine(x[:, :: self.group], 8, (2,))
        base = leaders[:, torch.arange(x.shape[1]) // self.group]
        follows = torch.arange(x.shape[1]) != first
        difference = (x - base)[:, follows]
        step = self.bin * (1 + int(depth * 3)) * float(difference.std(correction=0)) if difference.numel() else 0.0
        symbol = (difference / step).round() if step else torch.zeros_like(difference)
        full = base.clone()
        full[:, follows] += symbol * step
        bits = leaders.numel() * 8 + pairs * 32 + entropy_bits(symbol.transpose(1, 2).flatten(0, 1))
        return Coded(full=full, bits=bits)


def entropy_bits(symbols: Tensor) -> float:
    """Bits of the rows of integers [rows, n] at each row's own entropy."""
    total = 0.0
    for row in symbols:
        count = row.unique(return_counts=True)[1].to(torch.float64)
        total -= float((count * (count / row.numel()).log2()).sum())
    return total
