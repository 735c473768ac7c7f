"""`raw`: the model's own bits in the declared dtype, in the same container (SPEC 8.2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lynxkv.codecs.base import ANYWHERE, Codec, Place, segment_tokens
from lynxkv.layout import Coding, Precision, RawCoding, TensorName


@dataclass(frozen=True, kw_only=True)
class Raw(Codec):
    """No quantisation; a single object."""

    name: ClassVar[str] = "raw"

    compress: bool = False

    def coding(self, tensor: TensorName, channels: int) -> Coding:
        return RawCoding(segment_tokens=segment_tokens(channels, 64))

    def tables(self, x: Tensor, tensor: TensorName, place: Place = ANYWHERE) -> None:
        return None

    def error_bound(self, x: Tensor, tensor: TensorName, precision: Precision) -> Tensor:
        """Zero."""
        return torch.zeros_like(x)
