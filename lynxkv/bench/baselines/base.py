"""What a baseline is: a published way to store a KV cache, written anew in plain torch to be measured, not used.

Sizes count what the method would store, to the bit; no container, checksum or token id is charged to it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lynxkv.bench.stored import Sizes, StoredCache, TensorDestination
from lynxkv.codecs.base import check_types
from lynxkv.kernels.rounding import round_to
from lynxkv.kv import KV
from lynxkv.layout import Precision, TensorName


@dataclass(frozen=True, kw_only=True)
class Coded:
    """A tensor as a baseline gives it back, f32 [H, T, D], and the bits it takes; `anchor` where it comes in two."""

    full: Tensor
    bits: float
    anchor: Tensor | None = None
    anchor_bits: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Baseline(ABC):
    """A method whose dataclass fields are its parameters.

    Raises:
        InputError: a parameter has a value that is not of its type, or out of its range.
    """

    name: ClassVar[str]

    def __post_init__(self) -> None:
        check_types(self)

    def params(self) -> dict[str, Any]:
        """All parameters."""
        return asdict(self)

    @abstractmethod
    def stored(self, kv: KV) -> StoredCache:
        """`kv` as the method keeps it."""


@dataclass(frozen=True, kw_only=True)
class TensorBaseline(Baseline):
    """A method that codes every tensor by itself."""

    @abstractmethod
    def code(self, x: Tensor, tensor: TensorName, depth: float) -> Coded:
        """Code x [H, T, D], f32 values of bf16, of the layer at `depth` in [0, 1) of the model."""

    def stored(self, kv: KV) -> StoredCache:
        coded: list[dict[TensorName, Coded]] = [
            {
                name: self.code(x.to("cpu", torch.float32), name, number / len(kv.layers))
                for name, x in layer.tensors.items()
            }
            for number, layer in enumerate(kv.layers)
        ]
        return CodedCache(coded)


@dataclass(frozen=True, kw_only=True)
class BaselineMethod:
    """A baseline as the bench measures it (`lynxkv.bench.methods.Method`)."""

    label: str
    baseline: Baseline

    @property
    def settings(self) -> dict[str, Any]:
        """The baseline's name and parameters."""
        return {"baseline": self.baseline.name, **self.baseline.params()}

    @contextmanager
    def store(self, kv: KV) -> Iterator[StoredCache]:
        """Keep it as the baseline does."""
        yield self.baseline.stored(kv)


class CodedCache:
    """Coded tensors, layer by layer."""

    sparse = None

    def __init__(self, coded: list[dict[TensorName, Coded]]) -> None:
        self._coded = coded
        parts = [part for layer in coded for part in layer.values()]
        self._split = any(part.anchor is not None for part in parts)
        total = _bytes(sum(part.bits for part in parts))
        anchor = _bytes(sum(part.anchor_bits for part in parts)) if self._split else total
        self.sizes = Sizes(anchor_bytes=anchor, full_bytes=total, total_bytes=total)

    def decode(self, destination: TensorDestination) -> Iterator[Precision]:
        """The anchor where there is one, then everything; values are rounded to bf16 as the library's are."""
        if self._split:
            self._write(destination, "anchor")
            yield "anchor"
        self._write(destination, "full")
        yield "full"

    def _write(self, destination: TensorDestination, precision: Precision) -> None:
        for number, layer in enumerate(self._coded):
            for name, part in layer.items():
                values = part.anchor if precision == "anchor" and part.anchor is not None else part.full
                destination.target(number, name).copy_(round_to(values, "bf16"))


def _bytes(bits: float) -> int:
    return int(-(-bits // 8))


def affine(x: Tensor, bits: int, dims: tuple[int, ...]) -> tuple[Tensor, int]:
    """x rounded to 2^bits even levels between the extremes over `dims`, which are stored in bf16 as an offset and a
    scale; returns the decoded values and the number of such pairs.
    """
    low, high = x.amin(dims, keepdim=True), x.amax(dims, keepdim=True)
    offset = round_to(low, "bf16").to(torch.float32)
    scale = round_to((high - low) / (2**bits - 1), "bf16").to(torch.float32)
    level = torch.where(scale > 0, (x - offset) / scale, 0.0).round().clamp_(0, 2**bits - 1)
    return level * scale + offset, low.numel()
