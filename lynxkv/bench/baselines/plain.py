"""Two plain ones: INT8 cut in two halves (the Lynx paper's linear split), and the original's bytes under zstd."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import zstandard
from torch import Tensor

from lynxkv.bench.baselines.base import Coded, TensorBaseline
from lynxkv.codecs.base import check_range
from lynxkv.layout import TensorName


@dataclass(frozen=True, kw_only=True)
class LinearSplit(TensorBaseline):
    """INT8 between each token's extremes over all heads, as `int8`, whose upper four bits are the anchor.

    An anchor code decodes to the middle of its sixteen levels.
    """

    name: ClassVar[str] = "linear-split"

    def code(self, x: Tensor, tensor: TensorName, depth: float) -> Coded:
        low, high = x.amin((0, 2), keepdim=True), x.amax((0, 2), keepdim=True)
        scale = (high - low) / 255
        level = torch.where(scale > 0, (x - low) / scale, 0.0).round()
        pairs = low.numel() * 64
        return Coded(
            full=level * scale + low,
            bits=x.numel() * 8 + pairs,
            anchor=((level / 16).floor() * 16 + 7.5) * scale + low,
            anchor_bits=x.numel() * 4 + pairs,
        )


@dataclass(frozen=True, kw_only=True)
class BytePlanes(TensorBaseline):
    """bf16 without loss: the upper bytes of all values of a tensor, channel by channel, then the lower, under zstd."""

    name: ClassVar[str] = "byte-planes"

    level: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("level", self.level, 1, 22)

    def code(self, x: Tensor, tensor: TensorName, depth: float) -> Coded:
        pairs = x.to(torch.bfloat16).transpose(1, 2).contiguous().view(torch.uint8).view(-1, 2)
        planes = pairs.T.contiguous().numpy().tobytes()
        return Coded(full=x, bits=8 * len(zstandard.ZstdCompressor(level=self.level).compress(planes)))
