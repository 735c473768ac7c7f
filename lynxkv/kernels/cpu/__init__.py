"""The numba backend: the reference's results in one pass over cache-sized tiles, without the interpreter lock."""

from __future__ import annotations

import torch
from torch import Tensor

from lynxkv.kernels import reference
from lynxkv.kernels.cpu import components
from lynxkv.kernels.cpu.entropy_dequantize import dequantize_entropy
from lynxkv.kernels.cpu.entropy_quantize import quantize_entropy
from lynxkv.kernels.cpu.exact import pack_exact, unpack_exact
from lynxkv.kernels.cpu.fixed_dequantize import dequantize_fixed
from lynxkv.kernels.cpu.fixed_quantize import quantize_fixed
from lynxkv.kernels.cpu.memory import U8, destination
from lynxkv.kernels.cpu.statistics import channel_statistics
from lynxkv.kernels.paged import Out, write
from lynxkv.kernels.rounding import TORCH_DTYPES
from lynxkv.kernels.tables import EntropyTables, FixedTables, Tables, Transform
from lynxkv.layout import Coding, EntropyCoding, FixedCoding, RawCoding, TensorSpec


def quantize(x: Tensor, coding: Coding, tables: Tables) -> tuple[U8, U8 | None]:
    """As `reference.quantize`, with the same codes."""
    if isinstance(coding, RawCoding):
        return reference.quantize(x, coding, tables)
    if isinstance(coding, FixedCoding) and isinstance(tables, FixedTables):
        return quantize_fixed(x, coding, tables)
    if isinstance(coding, EntropyCoding) and isinstance(tables, EntropyTables):
        return quantize_entropy(x, coding, tables)
    raise TypeError(f"{type(tables).__name__} does not go with {type(coding).__name__}")


def dequantize(
    anchor: U8, residual: U8 | None, coding: Coding, tables: Tables, spec: TensorSpec, dtype: str, out: Out
) -> None:
    """As `reference.dequantize`, with the same bits."""
    if isinstance(coding, RawCoding):
        reference.dequantize(anchor, residual, coding, tables, spec, dtype, out)
        return
    place = destination(out, dtype)
    if place is None:
        whole = torch.empty(out.shape, dtype=TORCH_DTYPES[dtype])
        dequantize(anchor, residual, coding, tables, spec, dtype, whole)
        write(out, whole)
    elif isinstance(coding, FixedCoding) and isinstance(tables, FixedTables):
        dequantize_fixed(anchor, residual, coding, tables, spec, out.shape[1], place)
    elif isinstance(coding, EntropyCoding) and isinstance(tables, EntropyTables):
        dequantize_entropy(anchor, residual, coding, tables, spec, out.shape[1], place)
    else:
        raise TypeError(f"{type(tables).__name__} does not go with {type(coding).__name__}")


def place_components(
    sums: Tensor,
    tables: EntropyTables,
    transform: Transform,
    spec: TensorSpec,
    step: float,
    dtype: str,
    out: Out,
) -> None:
    """As `reference.place_components`, with the same bits."""
    place = destination(out, dtype)
    if place is None:
        reference.place_components(sums, tables, transform, spec, step, dtype, out)
    else:
        components.place_components(sums.contiguous().numpy(), tables, transform, spec, step, place)


__all__ = ["channel_statistics", "dequantize", "pack_exact", "place_components", "quantize", "unpack_exact"]
