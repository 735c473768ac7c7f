"""The Triton backend, for NVIDIA and AMD: the reference's results, from segment bytes straight to the cache.

Without a GPU it runs under TRITON_INTERPRET=1, which has to be set before triton is imported; slow, but to the bit.
Checks that need every code run in the kernels, so a refused segment may have been written in part.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from lynxkv.kernels import reference
from lynxkv.kernels.paged import Out, write
from lynxkv.kernels.rounding import TORCH_DTYPES
from lynxkv.kernels.tables import EntropyTables, FixedTables, Tables
from lynxkv.kernels.triton.launch import U8, kind_of
from lynxkv.kernels.triton.launch_entropy import dequantize_entropy, quantize_entropy
from lynxkv.kernels.triton.launch_fixed import can_quantize, dequantize_fixed, quantize_fixed
from lynxkv.layout import Coding, EntropyCoding, FixedCoding, RawCoding, TensorSpec

# Sums in f64, and corrections that lie in host memory: not worth a kernel.
channel_statistics, pack_exact, unpack_exact = (
    reference.channel_statistics,
    reference.pack_exact,
    reference.unpack_exact,
)
# A matrix product's neighbour: a few passes of torch's own kernels, each of which rounds once.
place_components = reference.place_components

# While it runs a kernel, the interpreter replaces functions of Triton's language for the whole process.
_one_at_a_time = threading.RLock() if os.environ.get("TRITON_INTERPRET") == "1" else nullcontext()


@contextmanager
def _at(device: torch.device) -> Iterator[None]:
    """Kernels are launched on the device that is current, wherever their tensors are: on that of these then."""
    with _one_at_a_time, torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        yield


def quantize(x: Tensor, coding: Coding, tables: Tables) -> tuple[U8, U8 | None]:
    """As `reference.quantize`, with the same codes."""
    if isinstance(coding, RawCoding):
        return reference.quantize(x, coding, tables)
    if x.dtype not in TORCH_DTYPES.values():
        x = x.to(torch.float32)
    if x.stride(2) != 1:
        x = x.contiguous()
    if isinstance(coding, FixedCoding) and isinstance(tables, FixedTables):
        if not can_quantize(coding):
            return reference.quantize(x, coding, tables)
        with _at(x.device):
            return quantize_fixed(x, coding, tables)
    if isinstance(coding, EntropyCoding) and isinstance(tables, EntropyTables):
        with _at(x.device):
            return quantize_entropy(x, coding, tables)
    raise TypeError(f"{type(tables).__name__} does not go with {type(coding).__name__}")


def dequantize(
    anchor: U8, residual: U8 | None, coding: Coding, tables: Tables, spec: TensorSpec, dtype: str, out: Out
) -> None:
    """As `reference.dequantize`, with the same bits."""
    if isinstance(coding, RawCoding):
        reference.dequantize(anchor, residual, coding, tables, spec, dtype, out)
        return
    kind = kind_of(out, dtype)
    if kind is None:
        whole = torch.empty(out.shape, dtype=TORCH_DTYPES[dtype], device=out.device)
        dequantize(anchor, residual, coding, tables, spec, dtype, whole)
        write(out, whole)
    elif isinstance(coding, FixedCoding) and isinstance(tables, FixedTables):
        with _at(out.device):
            dequantize_fixed(anchor, residual, coding, tables, spec, out, kind)
    elif isinstance(coding, EntropyCoding) and isinstance(tables, EntropyTables):
        with _at(out.device):
            dequantize_entropy(anchor, residual, coding, tables, spec, dtype, out, kind)
    else:
        raise TypeError(f"{type(tables).__name__} does not go with {type(coding).__name__}")


__all__ = ["channel_statistics", "dequantize", "pack_exact", "place_components", "quantize", "unpack_exact"]
