"""Kernels: KV tensors to segment bytes and back (SPEC 8), one signature over three backends.

`reference` (plain torch) is the definition, `cpu` is numba, `triton` is for GPUs. Decoding is bit-equal across them; so
is encoding, as it happens. The tensor's device chooses; LYNXKV_BACKEND overrides it. Bytes are numpy arrays in host
memory, tensors are torch's. numba and triton are imported by the first call that needs them, not by this module.
"""

from __future__ import annotations

import os
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Protocol, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lynxkv.errors import InputError
from lynxkv.kernels.paged import Out, Paged
from lynxkv.kernels.products import exact_product
from lynxkv.kernels.tables import ChannelStatistics, EntropyTables, FixedTables, Rope, Tables, Transform, tables_at
from lynxkv.kernels.transform import index_tables, spec_of_components, to_components
from lynxkv.layout import Coding, TensorSpec

U8 = npt.NDArray[np.uint8]
U16 = npt.NDArray[np.uint16]

BACKENDS = ("reference", "cpu", "triton")
_NEEDS = {"cpu": "numba", "triton": "triton"}
_OF_DEVICE = {"cpu": "cpu", "cuda": "triton"}


class Backend(Protocol):
    """What the module `lynxkv.kernels.<name>` offers."""

    def quantize(self, x: Tensor, coding: Coding, tables: Tables) -> tuple[U8, U8 | None]: ...

    def dequantize(
        self, anchor: U8, residual: U8 | None, coding: Coding, tables: Tables, spec: TensorSpec, dtype: str, out: Out
    ) -> None: ...

    def place_components(
        self,
        sums: Tensor,
        tables: EntropyTables,
        transform: Transform,
        spec: TensorSpec,
        step: float,
        dtype: str,
        out: Out,
    ) -> None: ...

    def channel_statistics(self, x: Tensor) -> ChannelStatistics: ...

    def pack_exact(self, original: U16, full: U16, dtype: str) -> U8: ...

    def unpack_exact(self, raw: U8, full: U16, dtype: str) -> U16: ...


def quantize(x: Tensor, coding: Coding, tables: Tables) -> tuple[U8, U8 | None]:
    """Raw bytes of the anchor and residual segments that hold x [H, T, D], any float dtype and strides.

    For raw coding x is in the declared dtype. The residual is None where the coding has none.

    Raises:
        InputError: LYNXKV_BACKEND names no usable backend.
    """
    if isinstance(tables, EntropyTables) and tables.transform is not None:
        x, tables = to_components(x, tables, tables.transform)
    return backend(x.device.type).quantize(x, coding, tables)


def dequantize(
    anchor: U8, residual: U8 | None, coding: Coding, tables: Tables, spec: TensorSpec, dtype: str, out: Out
) -> None:
    """Decode a segment in place into `out`, a tensor [H, T, D] of any float dtype and strides, or pages of an engine:
    at anchor precision without `residual`, in full with it. Refining is the latter, from the anchor bytes kept since
    the former.

    Values are rounded to the declared `dtype` first, whatever that of `out` is.

    Raises:
        ContentError: codes, escapes or parameters that SPEC 8 forbids.
        InputError: LYNXKV_BACKEND names no usable backend.
    """
    own = backend(out.device.type)
    transform = tables.transform if isinstance(tables, EntropyTables) else None
    if not isinstance(tables, EntropyTables) or transform is None:
        own.dequantize(anchor, residual, coding, tables, spec, dtype, out)
        return
    index = torch.empty(transform.blocks, out.shape[1], transform.size, device=out.device)
    inner = spec_of_components(transform, spec)
    own.dequantize(anchor, residual, coding, index_tables(tables), inner, "fp32", index)
    step = float(tables.step if residual is None else tables.half_step)
    own.place_components(exact_product(index, transform.basis), tables, transform, spec, step, dtype, out)


def channel_statistics(x: Tensor) -> ChannelStatistics:
    """Mean, variance and peak of the channels of x [H, T, D], any float dtype and strides.

    Backends may differ in the last bits of their sums: a quantiser's choice, which decoding does not depend on.

    Raises:
        InputError: LYNXKV_BACKEND names no usable backend.
    """
    x = to_kernel_device(x)
    return backend(x.device.type).channel_statistics(x)


def to_kernel_device(x: Tensor) -> Tensor:
    """x where quantisers can have it: on a device that there are kernels for as it is, else in host memory."""
    return x if x.device.type in _OF_DEVICE else x.cpu()


def pack_exact(original: U16, full: U16, dtype: str) -> U8:
    """The raw bytes of an exact segment from the 16-bit patterns of both, flat and in the order [H, t, D].

    Raises:
        InputError: LYNXKV_BACKEND names no usable backend.
    """
    return backend().pack_exact(original, full, dtype)


def unpack_exact(raw: U8, full: U16, dtype: str) -> U16:
    """The original's 16-bit patterns, from the full values' and the raw bytes of an exact segment.

    Raises:
        ValueError: a result is not finite.
        InputError: LYNXKV_BACKEND names no usable backend.
    """
    return backend().unpack_exact(raw, full, dtype)


def backend(device: str = "cpu") -> Backend:
    """The backend for tensors on this type of device.

    Raises:
        InputError: LYNXKV_BACKEND is not one of `BACKENDS`, or that backend cannot work here.
    """
    wanted = os.environ.get("LYNXKV_BACKEND", "")
    if wanted:
        return named_backend(wanted)
    name = _OF_DEVICE.get(device, "reference")
    return _load(name if _missing(name) is None else "reference")


def named_backend(name: str) -> Backend:
    """The backend of this name.

    Raises:
        InputError: it is not one of `BACKENDS`, or cannot work here.
    """
    if name not in BACKENDS:
        raise InputError(f"there is no kernel backend {name!r}", hint=f"choose one of {', '.join(BACKENDS)}")
    missing = _missing(name)
    if missing is not None:
        raise InputError(
            f"the kernel backend {name} cannot work: {missing}", hint="without LYNXKV_BACKEND one that works is chosen"
        )
    return _load(name)


@cache
def _missing(name: str) -> str | None:
    """Why this backend cannot be imported."""
    package = _NEEDS.get(name)
    if package and find_spec(package) is None:
        return f"{package} is not installed"
    if name == "triton" and not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        return "there is no GPU, and TRITON_INTERPRET is not 1"
    return None


@cache
def _load(name: str) -> Backend:
    return cast(Backend, import_module(f"lynxkv.kernels.{name}"))


__all__ = [
    "BACKENDS",
    "ChannelStatistics",
    "EntropyTables",
    "FixedTables",
    "Out",
    "Paged",
    "Rope",
    "Tables",
    "Transform",
    "backend",
    "channel_statistics",
    "dequantize",
    "named_backend",
    "pack_exact",
    "quantize",
    "tables_at",
    "to_kernel_device",
    "unpack_exact",
]
