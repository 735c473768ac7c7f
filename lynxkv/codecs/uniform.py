"""`default`, `quality` and `fast`: a uniform quantiser with one step a tensor, entropy-coded (SPEC 8.4).

No scales to store, and outliers cost bits only where they are: the symbol distribution is peaked, zstd's Huffman coder
takes the gain, and what does not fit a byte escapes. The Residual cuts each bin in `radix` parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from lynxkv.codecs.base import SINK_TOKENS, Codec, segment_tokens
from lynxkv.errors import InputError
from lynxkv.kernels import EntropyTables, channel_statistics
from lynxkv.layout import Coding, EntropyCoding, Precision, TensorName
from lynxkv.packing import MAX_RADIX

# |q| stays below 2^17, half of what the SPEC allows, whatever the outliers are.
_MAX_INDEX = 2**17
_MIN_STEP = 2.0**-100


@dataclass(frozen=True, kw_only=True)
class Uniform(Codec):
    """Steps are `key_step` and `value_step` times the standard deviation about the channel means."""

    name: ClassVar[str] = "default"

    key_step: float = 0.22
    value_step: float = 0.27
    radix: int = 8
    sink_tokens: int = SINK_TOKENS

    def __post_init__(self) -> None:
        if not (0 < self.key_step < 100 and 0 < self.value_step < 100):
            raise InputError("key_step and value_step must lie between 0 and 100")
        if not 1 <= self.radix <= MAX_RADIX:
            raise InputError(f"radix must lie in [1, {MAX_RADIX}]")

    def coding(self, tensor: TensorName, channels: int) -> Coding:
        return EntropyCoding(
            radix=self.radix, segment_tokens=segment_tokens(channels, 64), sink_tokens=self.sink_tokens
        )

    def tables(self, x: Tensor, tensor: TensorName) -> EntropyTables:
        found = channel_statistics(x)
        peak = max(found.peak, _MIN_STEP)
        spread = float(np.sqrt(found.variance.mean()))
        relative = self.value_step if tensor == "v" else self.key_step
        step = np.float32(max(relative * spread, peak / _MAX_INDEX, _MIN_STEP))
        return EntropyTables(
            mean=found.mean,
            order=np.argsort(found.variance, kind="stable").astype(np.uint16),
            step=step,
            half_step=np.float32(step / (2 * self.radix)),
        )

    def error_bound(self, x: Tensor, tensor: TensorName, precision: Precision) -> Tensor:
        """Half a step; with the Residual half a step over `radix`. A relative term covers f32 arithmetic."""
        tables = self.tables(x, tensor)
        half = float(tables.step) / 2 if precision == "anchor" else float(tables.half_step)
        mean = torch.from_numpy(tables.mean).view(x.shape[0], 1, x.shape[2])
        return half + 2.0**-21 * ((x - mean).abs() + x.abs())


@dataclass(frozen=True, kw_only=True)
class Quality(Uniform):
    """A finer anchor and full precision near that of bf16 itself, about 4.6 and 8.1 bits an element."""

    name: ClassVar[str] = "quality"

    key_step: float = 0.13
    value_step: float = 0.22
    radix: int = 11


@dataclass(frozen=True, kw_only=True)
class Fast(Uniform):
    """The anchor of `default`, and full precision at INT8's fidelity in about 6.4 bits an element."""

    name: ClassVar[str] = "fast"

    radix: int = 5
