"""After KVQuant (arXiv 2401.18079): a learned non-uniform codebook, outliers kept, keys by channel, values by token.

What differs from the paper: keys are taken after RoPE; the codebook is that of plain k-means, learned for each tensor
on the very data it codes, which flatters it; its 2^bits entries are counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lynxkv.bench.baselines.base import Coded, TensorBaseline
from lynxkv.codecs.base import check_range
from lynxkv.layout import TensorName

_LEARNED_ON = 1 << 16
_ROUNDS = 25


@dataclass(frozen=True, kw_only=True)
class KVQuant(TensorBaseline):
    """`bits` a code, `outliers` the share of values of a vector that are stored in 32 bits, value and index."""

    name: ClassVar[str] = "kvquant"

    bits: int = 4
    outliers: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("bits", self.bits, 1, 8)
        check_range("outliers", self.outliers, 0, 0.5)

    def code(self, x: Tensor, tensor: TensorName, depth: float) -> Coded:
        heads, tokens, dim = x.shape
        # One vector a row: a channel's tokens, or a token's channels. The first token, a sink, is kept.
        rows = x[:, 1:].transpose(0, 1).reshape(tokens - 1, heads * dim)
        vectors = rows if tensor == "v" else rows.T
        kept = round(self.outliers * vectors.shape[1])
        middle = vectors.mean(1, keepdim=True) if vectors.numel() else vectors
        far = (vectors - middle).abs().topk(kept, 1).indices
        outlier = torch.zeros(vectors.shape, dtype=torch.bool).scatter_(1, far, True)
        low = vectors.masked_fill(outlier, torch.inf).amin(1, keepdim=True)
        high = vectors.masked_fill(outlier, -torch.inf).amax(1, keepdim=True)
        half = ((high - low) / 2).clamp_(min=1e-30)
        unit = (vectors - (high + low) / 2) / half
        table = codebook(unit[~outlier], self.bits)
        nearest = torch.bucketize(unit.contiguous(), (table[1:] + table[:-1]) / 2)
        decoded = torch.where(outlier, vectors, table[nearest] * half + (high + low) / 2)
        out = x.clone()
        back = decoded if tensor == "v" else decoded.T
        out[:, 1:] = back.reshape(tokens - 1, heads, dim).transpose(0, 1)
        bits = vectors.numel() * self.bits + outlier.sum().item() * 32 + len(vectors) * 32
        return Coded(full=out, bits=bits + 16 * x[:, :1].numel() + 32 * 2**self.bits)


def codebook(values: Tensor, bits: int) -> Tensor:
    """2^bits ascending centres of values, by Lloyd's rounds of k-means on a regular sample, from quantiles on."""
    sample = values.flatten()[:: max(1, values.numel() // _LEARNED_ON)].sort().values
    centres = torch.quantile(sample[:: max(1, sample.numel() // 4096)], (torch.arange(2**bits) + 0.5) / 2**bits)
    sums = torch.cat([torch.zeros(1, dtype=torch.float64), sample.to(torch.float64).cumsum(0)])
    for _ in range(_ROUNDS):
        edge = torch.searchsorted(sample, (centres[1:] + centres[:-1]) / 2)
        edge = torch.cat([torch.zeros(1, dtype=edge.dtype), edge, torch.tensor([sample.numel()])])
        count = edge.diff()
        means = (sums[edge].diff() / count.clamp(min=1)).to(torch.float32)
        centres = torch.where(count > 0, means, centres)
    return centres
