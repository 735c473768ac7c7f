"""Quantise any KV tensor without files: the codecs as plain functions."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lynxkv.codecs import Codec, get_codec
from lynxkv.errors import InputError, NonFiniteError
from lynxkv.format.limits import MAX_CHANNELS
from lynxkv.kernels import Tables
from lynxkv.kernels import dequantize as dequantize_segment
from lynxkv.kernels import quantize as quantize_segment
from lynxkv.kernels.rounding import TORCH_DTYPES, round_to
from lynxkv.layout import Coding, Dtype, Precision, TensorName, TensorSpec

DTYPE_NAMES: dict[torch.dtype, Dtype] = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
}


@dataclass(frozen=True, kw_only=True)
class Quantized:
    """A quantised tensor: raw bytes at both precisions, and what decodes them.

    `shape` is that of the tensor [..., T, D]; leading dims count as heads. `dtype` is what decoding rounds to.
    """

    anchor: npt.NDArray[np.uint8]
    residual: npt.NDArray[np.uint8] | None
    coding: Coding
    tables: Tables
    shape: tuple[int, ...]
    dtype: Dtype


def quantize(x: Tensor, codec: str | Codec = "default", *, tensor: TensorName = "k") -> Quantized:
    """Quantise x [..., T, D] (float32, bfloat16 or float16) as one segment; sink tokens are not treated apart.

    `tensor` says whether x holds keys or values, for codecs that treat them differently.

    Raises:
        InputError: another dtype, fewer than two dims, no elements, or more than 65,536 channels (heads times D), which
            no coding counts further than; an unknown codec.
        NonFiniteError: x holds NaN or infinity.
    """
    method = get_codec(codec)
    if x.ndim < 2 or not x.numel() or x.dtype not in DTYPE_NAMES:
        raise InputError(f"cannot quantise {x.dtype} {tuple(x.shape)}", hint="give floats [..., tokens, head_dim]")
    heads = x.detach().reshape(-1, *x.shape[-2:])
    if heads.shape[0] * heads.shape[2] > MAX_CHANNELS:
        raise InputError(
            f"{heads.shape[0]} heads of {heads.shape[2]} are over {MAX_CHANNELS} channels",
            hint="quantise layer by layer, or sequence by sequence",
        )
    if not math.isfinite(_reach(heads)):
        raise NonFiniteError("the tensor holds NaN or infinity")
    coding = method.coding(tensor, heads.shape[0] * heads.shape[2])
    tables = method.tables(heads, tensor)
    anchor, residual = quantize_segment(heads, coding, tables)
    return Quantized(
        anchor=anchor,
        residual=residual,
        coding=coding,
        tables=tables,
        shape=tuple(x.shape),
        dtype=DTYPE_NAMES[x.dtype],
    )


def dequantize(quantized: Quantized, precision: Precision = "full") -> Tensor:
    """The tensor [..., T, D] at anchor or full precision, in the dtype it had.

    Raises:
        InputError: another precision; exact arrays are a matter of stored caches.
        ContentError: the bytes are not what the coding allows.
    """
    if precision not in ("anchor", "full"):
        raise InputError(f"precision is {precision!r}", hint="use anchor or full")
    *lead, tokens, dim = quantized.shape
    heads = int(np.prod(lead)) if lead else 1
    out = torch.empty(heads, tokens, dim, dtype=TORCH_DTYPES[quantized.dtype])
    residual = quantized.residual if precision == "full" else None
    spec = TensorSpec(heads=heads, head_dim=dim, coding=0)
    dequantize_segment(quantized.anchor, residual, quantized.coding, quantized.tables, spec, quantized.dtype, out)
    return out.view(quantized.shape)


def to_original(x: Tensor, dtype: Dtype, *, where: str) -> Tensor:
    """x rounded to the declared dtype: what the SPEC calls the original.

    Raises:
        NonFiniteError: x holds NaN or infinity, or is beyond the dtype's range.
    """
    # Checked before any cast: a float64 value may be finite and still be beyond f32.
    reach = _reach(x)
    if not math.isfinite(reach):
        raise NonFiniteError(
            f"{where} holds NaN or infinity",
            hint="it was so before encoding: check the weights, and compute the cache in float32 or bfloat16",
        )
    if reach > torch.finfo(TORCH_DTYPES[dtype]).max:
        raise NonFiniteError(f"{where} exceeds the range of {dtype}", hint="use bf16, or raw with fp32")
    if x.dtype == TORCH_DTYPES[dtype]:
        return x
    wide = x.to(torch.float32)
    return wide if dtype == "fp32" else round_to(wide, dtype)


def _reach(x: Tensor) -> float:
    """The largest magnitude in x [H, T, D], NaN if there is one.

    Head by head: of what is not contiguous, torch takes a copy.
    """
    extremes = [torch.stack(torch.aminmax(part)) for part in x]
    return float(torch.stack(extremes).abs().max())


__all__ = ["DTYPE_NAMES", "Quantized", "dequantize", "quantize", "to_original"]
