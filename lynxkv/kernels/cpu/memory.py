"""Tensors and segment bytes as the flat arrays that compiled kernels take."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lynxkv.kernels.cpu.bits import BF16, BF16_BOUNDED, BF16_IN_F32, FP16, FP16_IN_F32, FP32
from lynxkv.kernels.cpu.finish import BOUND
from lynxkv.kernels.paged import Out

U8 = npt.NDArray[np.uint8]

_KINDS = {
    ("bf16", torch.bfloat16): BF16,
    ("fp16", torch.float16): FP16,
    ("fp32", torch.float32): FP32,
    ("bf16", torch.float32): BF16_IN_F32,
    ("fp16", torch.float32): FP16_IN_F32,
}
_OWN = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


class Strided(NamedTuple):
    """A source [H, T, D] whose last dim is contiguous: its memory as one array, and how far its rows are apart."""

    flat: npt.NDArray[Any]
    head_stride: int
    token_stride: int
    kind: int


class Rows(NamedTuple):
    """A destination whose last dim is contiguous: its memory as one array, and where the rows of its first head start,
    `starts` [T]; those of head h are h * head_stride further.
    """

    flat: npt.NDArray[Any]
    head_stride: int
    starts: npt.NDArray[np.int64]
    kind: int


def destination(out: Out, dtype: str) -> Rows | None:
    """`out` as kernels write it, or None if they cannot: an unusual dtype, or channels apart from each other."""
    kind = _KINDS.get((dtype, out.dtype))
    memory = out if isinstance(out, Tensor) else out.pages
    if kind is None or out.device.type != "cpu" or (memory.stride(-1) != 1 and memory.shape[-1] > 1):
        return None
    if isinstance(out, Tensor):
        starts = np.arange(out.shape[1]) * out.stride(1)
    else:
        page, slot = out.places()
        starts = page * memory.stride(0) + slot * memory.stride(2)
    return Rows(flat=_flat(memory), head_stride=memory.stride(-3), starts=starts, kind=kind)


def bounded(place: Rows, bound: float) -> int:
    """The kind of a destination whose values are at most `bound`: cheaper to round, where that is far from overflow."""
    return BF16_BOUNDED if place.kind == BF16 and bound < BOUND else place.kind


def source(x: Tensor) -> Strided:
    """x as kernels read it; copied only if its dtype or its last stride is none that they know."""
    x = x.to("cpu", x.dtype if x.dtype in _OWN else torch.float32)
    if x.stride(2) != 1 and x.shape[2] > 1:
        x = x.contiguous()
    head_stride, token_stride, _ = x.stride()
    kind = _KINDS[_OWN[x.dtype], x.dtype]
    return Strided(flat=_flat(x), head_stride=head_stride, token_stride=token_stride, kind=kind)


class _Memory:
    """All memory between the first and the last element of a tensor, by numpy's array protocol.

    torch's own way there is four operations, each of which lets go of the interpreter lock: where segments are decoded
    on several threads, each one waits for it four times.
    """

    def __init__(self, x: Tensor) -> None:
        extent = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
        self.tensor = x
        self.__array_interface__ = {
            "version": 3,
            "data": (x.data_ptr(), False),
            "shape": (extent,),
            "typestr": "<f4" if x.dtype == torch.float32 else "<u2",
        }


def _flat(x: Tensor) -> npt.NDArray[Any]:
    """The memory of x as one array: f32, or u16 for 16-bit floats. The array keeps x."""
    if not x.numel():
        return np.empty(0, np.float32 if x.dtype == torch.float32 else np.uint16)
    return np.asarray(_Memory(x))


def read_only(data: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The same array, contiguous, aligned and never writable: one compiled kernel then serves bytes from anywhere."""
    if not (data.flags.c_contiguous and data.flags.aligned):
        data = np.require(data, requirements=["C", "A"])
    view = data.view()
    view.flags.writeable = False
    return view
