"""What kernels are launched with: tile sizes, alignment, bytes on the device, and what comes back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lynxkv.errors import ContentError
from lynxkv.kernels.paged import Out
from lynxkv.kernels.triton.rounding import BF16, BF16_IN_F32, FP16, FP16_IN_F32, FP32

U8 = npt.NDArray[np.uint8]

# No fused multiply-add: every backend rounds each multiply and each add.
EXACT: dict[str, Any] = {"enable_fp_fusion": False}

_KINDS = {
    ("bf16", torch.bfloat16): BF16,
    ("fp16", torch.float16): FP16,
    ("fp32", torch.float32): FP32,
    ("bf16", torch.float32): BF16_IN_F32,
    ("fp16", torch.float32): FP16_IN_F32,
}


@dataclass(frozen=True, kw_only=True)
class Unit:
    """Rows of `count` codes in eight runs of `blocks` * `align` (SPEC 8.1); `align`, a power of two up to 16, is known
    to the compiler, which needs it for vector loads.
    """

    blocks: int
    align: int

    @classmethod
    def of(cls, count: int) -> Unit:
        size = -(-count // 8)
        align = min(16, size & -size)
        return cls(blocks=size // align, align=align)

    @property
    def size(self) -> int:
        return self.blocks * self.align


def kind_of(out: Out, dtype: str) -> Any:
    """What kernels store for `out`; None if they cannot: an unusual dtype, or channels apart from each other."""
    memory = out if isinstance(out, Tensor) else out.pages
    apart = memory.stride(-1) != 1 and memory.shape[-1] > 1
    return None if apart else _KINDS.get((dtype, out.dtype))


def stored_as(out: Out) -> Tensor:
    """The memory of `out` as kernels store to it: 16-bit floats as int16."""
    memory = out if isinstance(out, Tensor) else out.pages
    return memory if out.dtype == torch.float32 else memory.view(torch.int16)


def place_of(out: Out) -> dict[str, Any]:
    """The arguments that say where rows of `out` begin; see `row_start`."""
    if isinstance(out, Tensor):
        none = torch.empty(0, dtype=torch.int64, device=out.device)
        return {
            "head_stride": out.stride(0),
            "token_stride": out.stride(1),
            "table": none,
            "first": 0,
            "page_stride": 0,
            "SLOTS": 0,
        }
    return {
        "head_stride": out.pages.stride(1),
        "token_stride": out.pages.stride(2),
        "table": on_device(out.used, out.device),
        "first": out.first % out.slots,
        "page_stride": out.pages.stride(0),
        "SLOTS": out.slots,
    }


def loaded_as(x: Tensor) -> Tensor:
    """x as kernels load it: bf16 as int16."""
    return x.view(torch.int16) if x.dtype == torch.bfloat16 else x


def on_device(data: npt.NDArray[Any], device: torch.device) -> Tensor:
    """A host array on the device."""
    return torch.from_numpy(np.array(data)).to(device)


def on_host(tensor: Tensor) -> U8:
    """The bytes of a device tensor."""
    flat: U8 = tensor.contiguous().view(-1).view(torch.uint8).cpu().numpy()
    return flat


def power_of_two(value: int, *, most: int = 1 << 30) -> int:
    """The least power of two not below `value`, but no more than `most`."""
    return min(most, 1 << max(0, value - 1).bit_length())


def require(holds: bool, message: str) -> None:
    """Refuse content.

    Raises:
        ContentError: it does not hold.
    """
    if not holds:
        raise ContentError(message)
