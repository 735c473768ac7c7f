"""`default`, `quality`, `fast` and `compact`: a uniform quantiser with one step a tensor, entropy-coded (SPEC 8.4).

No scales to store, and outliers cost bits only where they are: the symbol distribution is peaked, zstd's Huffman coder
takes the gain, and what does not fit a byte escapes. The Residual cuts each bin in `radix` parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from lynxkv.codecs.base import ANYWHERE, SINK_TOKENS, Codec, Place, check_range, check_sinks, segment_tokens
from lynxkv.errors import InputError
from lynxkv.kernels import ChannelStatistics, EntropyTables, channel_statistics
from lynxkv.kernels.rounding import round_to
from lynxkv.kernels.tables import F32, Transform
from lynxkv.kernels.transform import components, turned_back
from lynxkv.kv import KV, KVLayer
from lynxkv.layout import Coding, EntropyCoding, Precision, TensorName
from lynxkv.packing import MAX_RADIX

# |q| stays below 2^17, half of what the SPEC allows, whatever the outliers are.
_MAX_INDEX = 2**17
_MIN_STEP = 2.0**-100
_STEPS = (1e-3, 100.0)
_MAX_FACTOR = 4.0

# Delimiters all over a text draw attention and say nothing: attention sinks beside the first token. There are few.
_SHORT_VECTORS = 64


@dataclass(frozen=True, kw_only=True)
class Uniform(Codec):
    """Steps are `key_step` and `value_step` times the tensor's standard deviation about its channel means, times the
    layer's factor; with a basis, that of keys before their rope.
    """

    name: ClassVar[str] = "default"
    takes_basis: ClassVar[bool] = True

    key_step: float = 0.17
    value_step: float = 0.37
    radix: int = 8
    sink_tokens: int = SINK_TOKENS

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("key_step", self.key_step, *_STEPS)
        check_range("value_step", self.value_step, *_STEPS)
        check_range("radix", self.radix, 1, MAX_RADIX)
        check_sinks(self.sink_tokens)

    def coding(self, tensor: TensorName, channels: int) -> Coding:
        return EntropyCoding(
            radix=self.radix, segment_tokens=segment_tokens(channels, 64), sink_tokens=self.sink_tokens
        )

    def step_factors(self, kv: KV) -> list[float]:
        """The spread of each layer's values against the geometric mean of all, to the power -1/2.

        What layers put out adds up in the model, so those of large values need smaller relative errors. At -1 the
        errors of all would be alike in size, at 0 in proportion; -1/2 does better than both on real models.
        """
        spreads = np.array([self._value_spread(layer) for layer in kv.layers])
        known = spreads > 0
        if not known.any():
            return super().step_factors(kv)
        typical = np.exp(np.log(spreads[known]).mean())
        factors = np.where(known, (np.where(known, spreads, 1) / typical) ** -0.5, 1)
        return [float(factor) for factor in factors.clip(1 / _MAX_FACTOR, _MAX_FACTOR)]

    def _value_spread(self, layer: KVLayer) -> float:
        """Standard deviation of the coded values; 0 where there are none, or none that is finite."""
        values = layer.tensors.get("v")
        sinks = max(self.sink_tokens - layer.start, 0)
        if values is None or sinks >= values.shape[1]:
            return 0.0
        spread = _spread(channel_statistics(values[:, sinks:].detach()))
        return spread if np.isfinite(spread) else 0.0

    def tables(self, x: Tensor, tensor: TensorName, place: Place = ANYWHERE) -> EntropyTables:
        relative = place.step_factor * (self.value_step if tensor == "v" else self.key_step)
        if place.transform is not None:
            return self._transformed(x, tensor, relative, place.transform)
        found = channel_statistics(x)
        peak = max(found.peak, _MIN_STEP)
        step = np.float32(max(relative * _spread(found), peak / _MAX_INDEX, _MIN_STEP))
        half_step = np.float32(step / (2 * self.radix))
        mean = found.mean
        if tensor == "v":
            mean = grid_through_short_vectors(x, mean, float(step), self._beside(half_step))
        return EntropyTables(
            mean=mean,
            order=np.argsort(found.variance, kind="stable").astype(np.uint16),
            step=step,
            half_step=half_step,
        )

    def _beside(self, half_step: np.float32) -> float:
        """How far beside the grid's points short vectors are best.

        With an even radix the grid of full precision has no point where the anchor's has one, but half_step to either
        side: in between, both grids are near.
        """
        return 0.0 if self.radix % 2 else float(half_step) / 2

    def _transformed(self, x: Tensor, tensor: TensorName, relative: float, transform: Transform) -> EntropyTables:
        """The same for components. The spread is that of channels turned back: RoPE turns a bias into variance that is
        nothing to be coded. Rows of a basis are longer than 1, so the step between indices is so much smaller.

        Raises:
            InputError: the basis cannot be led back from, or its rope not undone.
        """
        turned = turned_back(x, transform.rope)
        known = channel_statistics(turned)
        mean = torch.from_numpy(known.mean).to(x.device)
        found = components(turned, mean, transform)
        variance = found.to(torch.float64).var(1, correction=0).reshape(-1)
        peak = float(found.abs().amax())
        if not np.isfinite(peak):
            raise InputError(
                "components of the basis are too large", hint="calibrate the model again, or take another codec"
            )
        step = np.float32(max(relative * _spread(known) / transform.basis.norm, peak / _MAX_INDEX, _MIN_STEP))
        half_step = np.float32(step / (2 * self.radix))
        if tensor == "v":
            moved = _turn(*_short_tokens(x, found), float(step), self._beside(half_step)) * float(step)
            rows = torch.from_numpy(transform.rows.astype(np.float64)).to(x.device)
            mean = mean + torch.bmm(moved.view(transform.blocks, 1, -1), rows).view(-1).to(torch.float32)
            mean = round_to(mean, "bf16").to(torch.float32)
        return EntropyTables(
            mean=mean.cpu().numpy(),
            order=np.argsort(variance.cpu().numpy(), kind="stable").astype(np.uint16),
            step=step,
            half_step=half_step,
            transform=transform,
        )

    def error_bound(self, x: Tensor, tensor: TensorName, precision: Precision) -> Tensor:
        """Half a step; with the Residual half a step over `radix`. A relative term covers f32 arithmetic."""
        tables = self.tables(x, tensor)
        half = float(tables.step) / 2 if precision == "anchor" else float(tables.half_step)
        mean = torch.from_numpy(tables.mean).view(x.shape[0], 1, x.shape[2])
        return half + 2.0**-21 * ((x - mean).abs() + x.abs())


def _spread(found: ChannelStatistics) -> float:
    return float(np.sqrt(found.variance.mean()))


def grid_through_short_vectors(x: Tensor, mean: F32, step: float, beside: float = 0.0) -> F32:
    """Channel means [N] (f32, exact in bf16), each moved by at most half a step so that the grid `mean + q * step` runs
    through the shortest vectors of each head of values x [H, T, D], or `beside` below them.

    Heads with nothing to say attend to an attention sink, of which a text has several: tokens whose value vectors are a
    fraction of the others' length, and nearly the same. Their rounding errors are then the same too, and all that such
    a head puts out; with the grid through them little of it is left, and the other tokens cost what they did.

    The move is a circular mean, of the short vectors' phases in the grid, with the weights |v|^-4.
    """
    heads, tokens, dim = x.shape
    lengths = torch.linalg.vector_norm(x, dim=2, dtype=torch.float32)
    shortest = lengths.topk(min(_SHORT_VECTORS, tokens), dim=1, largest=False).indices
    short = x.gather(1, shortest[:, :, None].expand(-1, -1, dim)).to(torch.float64)
    # In f64, where no square overflows. If those of `lengths` did, the choice was poor, which is no harm.
    length = torch.linalg.vector_norm(short, dim=2, keepdim=True).clamp_(min=1e-300)
    weight = (length / length.amin(1, keepdim=True)) ** -4
    middle = torch.from_numpy(mean).to(x.device).view(heads, dim)
    turn = _turn(short - middle[:, None], weight, step, beside)
    moved = middle + (turn * step).to(torch.float32)
    return round_to(moved, "bf16").to("cpu", torch.float32).reshape(-1).numpy()


def _turn(short: Tensor, weight: Tensor, step: float, beside: float) -> Tensor:
    """Weighted circular mean over tokens (dim 1) of where `short` [B, S, n] lies in its bin, in bins; f64 [B, n]."""
    phase = (short - beside) * (2 * torch.pi / step)
    return torch.atan2((weight * phase.sin()).sum(1), (weight * phase.cos()).sum(1)) / (2 * torch.pi)


def _short_tokens(x: Tensor, found: Tensor) -> tuple[Tensor, Tensor]:
    """Components [blocks, S, n] of the tokens whose values x [H, T, D] are short in some head, f64, and their weights
    [S, 1]: a block may hold several heads, so here a token counts by its shortest one.
    """
    lengths = torch.linalg.vector_norm(x, dim=2, dtype=torch.float32).clamp_(min=1e-30)
    ratio = (lengths / lengths.amin(1, keepdim=True)).amin(0)
    nearest, tokens = ratio.topk(min(_SHORT_VECTORS, x.shape[1]), largest=False)
    return found[:, tokens].to(torch.float64), nearest.to(torch.float64)[:, None] ** -4


@dataclass(frozen=True, kw_only=True)
class Quality(Uniform):
    """A finer anchor and full precision near that of bf16 itself, about 4.6 and 8.1 bits an element."""

    name: ClassVar[str] = "quality"

    key_step: float = 0.115
    value_step: float = 0.245
    radix: int = 11


@dataclass(frozen=True, kw_only=True)
class Fast(Uniform):
    """Full precision at INT8's fidelity in about 6.2 bits an element; an anchor a little coarser than `default`'s."""

    name: ClassVar[str] = "fast"

    key_step: float = 0.19
    value_step: float = 0.41
    radix: int = 5


@dataclass(frozen=True, kw_only=True)
class Compact(Uniform):
    """`default`'s fidelity in about 3.3 and 6.3 bits an element, with a basis of the model (`lynxkv calibrate`)."""

    name: ClassVar[str] = "compact"
    needs_basis: ClassVar[bool] = True

    # Of a smaller spread: on SmolLM2 the same steps as those of `default`.
    key_step: float = 0.25
