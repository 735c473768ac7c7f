"""What a codec is: the encoder's choices. Decoding needs none of this, only codings and tables (SPEC 8)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from torch import Tensor

from lynxkv.kernels.tables import F32, Tables
from lynxkv.layout import Coding, Precision, TensorName

SEGMENT_ELEMENTS = 1 << 20
# Attention favours the first tokens whatever they say. On SmolLM2, keeping 4 of them took Algorithm 1's attention
# error from 1.8e-2 to 6.1e-3.
SINK_TOKENS = 4


@dataclass(frozen=True, kw_only=True)
class Codec(ABC):
    """A quantisation method. The dataclass fields of a subclass are its parameters.

    `compress`: whether segments go through zstd where that makes them smaller.
    """

    name: ClassVar[str]
    compress: bool = True

    def params(self) -> dict[str, Any]:
        """The parameters, for the record in the cache."""
        return asdict(self)

    @abstractmethod
    def coding(self, tensor: TensorName, channels: int) -> Coding:
        """How segments of a tensor of N channels are stored."""

    def codebooks(self) -> dict[str, F32]:
        """Codebook arrays by name, without the leading `codebook.` (SPEC 4.1)."""
        return {}

    @abstractmethod
    def tables(self, x: Tensor, tensor: TensorName) -> Tables:
        """What the quantiser needs to know of the coded tokens x [H, n, D], any float dtype."""

    @abstractmethod
    def error_bound(self, x: Tensor, tensor: TensorName, precision: Precision) -> Tensor:
        """Bound on |decoded - x| for each element of x [H, n, D], f32, before rounding to the declared dtype."""


def segment_tokens(channels: int, unit: int) -> int:
    """Tokens a segment, a multiple of `unit`, for about 1 Mi elements."""
    return max(unit, SEGMENT_ELEMENTS // channels // unit * unit)
