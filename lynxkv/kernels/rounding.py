"""From f32 to the declared dtype (SPEC 8.5), in integers where a cast could differ between machines."""

from __future__ import annotations

import torch
from torch import Tensor

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_F32_INFINITY = 0x7F800000
_BF16_MAX = 0x7F7F
_F16_MAX = 65504.0


def round_to(values: Tensor, dtype: str) -> Tensor:
    """f32 `values` rounded to nearest even, saturating; NaN becomes +0. fp32 is returned as it is."""
    if dtype == "fp32":
        return values
    if dtype == "fp16":
        half = torch.nan_to_num(values, nan=0.0, posinf=_F16_MAX, neginf=-_F16_MAX).to(torch.float16)
        return half.clamp_(-_F16_MAX, _F16_MAX)
    bits = values.view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    rounded = (magnitude + 0x7FFF + ((magnitude >> 16) & 1)) >> 16
    # The sum overflows int32 only where the magnitude is a NaN's, which is zero either way.
    rounded = rounded.clamp_(max=_BF16_MAX) | ((bits >> 16) & 0x8000)
    rounded = torch.where(magnitude > _F32_INFINITY, 0, rounded)
    return rounded.to(torch.int16).view(torch.bfloat16)
