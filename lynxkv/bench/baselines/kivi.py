"""KIVI (arXiv 2402.02750): keys in groups of tokens of a channel, values in groups of channels of a token.

Asymmetric integers of 2 or 4 bits; each group of 32 has a 16-bit scale and offset, and the latest 128 tokens stay in 16
bits. As in the paper, except that the window of keys does not vary with the length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from lynxkv.bench.baselines.base import Coded, TensorBaseline, affine
from lynxkv.codecs.base import check_range
from lynxkv.layout import TensorName


@dataclass(frozen=True, kw_only=True)
class Kivi(TensorBaseline):
    """`bits` 1 to 8, groups of `group`, the last `window` tokens whole."""

    name: ClassVar[str] = "kivi"

    bits: int = 2
    group: int = 32
    window: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("bits", self.bits, 1, 8)
        check_range("group", self.group, 1, 1 << 16)
        check_range("window", self.window, 0, 1 << 20)

    def code(self, x: Tensor, tensor: TensorName, depth: float) -> Coded:
        out = x.clone()
        old = max(0, x.shape[1] - self.window)
        axis = 2 if tensor == "v" else 1
        pairs = 0
        length = x.shape[2] if axis == 2 else old
        for start in range(0, length, self.group):
            part = slice(start, min(start + self.group, length))
            where = (slice(None), slice(0, old), part) if axis == 2 else (slice(None), part)
            if old:
                out[where], count = affine(x[where], self.bits, (axis,))
                pairs += count
        coded = x[:, :old].numel()
        return Coded(full=out, bits=coded * self.bits + pairs * 32 + (x.numel() - coded) * 16)
