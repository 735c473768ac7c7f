"""What the fixed-rate codecs share: companded codebooks, edges, 8-bit chunk parameters, the error bound (SPEC 8.3)."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lynxkv.codecs.base import ANYWHERE, Codec, Place, check_range
from lynxkv.errors import InputError
from lynxkv.kernels.tables import F32, FixedTables
from lynxkv.layout import FixedCoding, Precision, TensorName

# 8-bit chunk scales: zero, then 255 steps of this ratio. They round up, and the largest is above 1, because rounding
# a chunk's offset can move its extremes beyond the page's: nothing clips.
SCALE_RATIO = 2.0 ** (1 / 16)


def scale_table() -> F32:
    """Values of 8-bit chunk scales: 0, then geometric from 2^-15.8 over 1 to 2^(1/16)."""
    return np.concatenate([[0.0], SCALE_RATIO ** np.arange(-253.0, 2.0)]).astype(np.float32)


def offset_table() -> F32:
    """Values of 8-bit chunk offsets: -1 over 0 to 1 in steps of 1/127. A chunk as wide as its page has offset 0."""
    return ((np.arange(256) - 127) / 127).astype(np.float32)


MAX_PAGE_TOKENS = 1 << 16


def check_chunks(chunk_tokens: int, page_tokens: int) -> None:
    """Refuse, with an InputError, chunks that do not fill pages, and pages that would make giant segments."""
    check_range("page_tokens", page_tokens, 1, MAX_PAGE_TOKENS)
    if chunk_tokens < 1 or page_tokens % chunk_tokens:
        raise InputError(f"chunks of {chunk_tokens} tokens do not fill pages of {page_tokens}")


def expand(level: npt.NDArray[Any], top: int, alpha: float) -> F32:
    """Inverse of the companding y = ln(1 + alpha |x|) / ln(1 + alpha), for y = |level| / top, with the level's sign."""
    magnitude = np.expm1(np.abs(level) / top * np.log1p(alpha)) / alpha
    signed: F32 = np.copysign(magnitude, level).astype(np.float32)
    return signed


@dataclass(frozen=True, kw_only=True)
class FixedCodec(Codec):
    """Base of the fixed-rate codecs: a subclass gives `coding` and `fixed_tables`."""

    @abstractmethod
    def coding(self, tensor: TensorName, channels: int) -> FixedCoding:
        """How segments of a tensor of N channels are stored."""

    @property
    @abstractmethod
    def fixed_tables(self) -> FixedTables:
        """Codebooks with the quantiser's edges; the same for every tensor."""

    def codebooks(self) -> dict[str, F32]:
        coding, tables = self.coding("k", 64), self.fixed_tables
        parts = {"anchor": tables.anchor, "full": tables.full, "scale": tables.scale, "offset": tables.offset}
        return {f"{coding.codebook}.{part}": values for part, values in parts.items() if values is not None}

    def tables(self, x: Tensor, tensor: TensorName, place: Place = ANYWHERE) -> FixedTables:
        return self.fixed_tables

    def error_bound(self, x: Tensor, tensor: TensorName, precision: Precision) -> Tensor:
        """The farthest a value can lie from its code's, in units of its chunk's scale.

        The scale is the chunk's largest magnitude about its offset; 8-bit parameters make it up to 2^(1/16) larger,
        after an offset that is up to 1/254 of the page's scale away from the middle.
        """
        coding, tables = self.coding(tensor, x.shape[0] * x.shape[2]), self.fixed_tables
        edges, buckets = tables.quantiser()
        if precision == "full" and tables.full is not None:
            values = tables.full[buckets]
        else:
            values = tables.anchor[buckets >> coding.residual_bits]
        low = np.concatenate([[-tables.peak], edges])
        high = np.concatenate([edges, [tables.peak]])
        farthest = float(np.maximum(values - low, high - values).max()) / tables.peak
        reach = _half_range(x, coding)
        if coding.chunk_dtype == "u8":
            page = _run_extreme(x.abs(), coding.page_tokens, coding.group)
            reach = (reach + page * 2 / 254) * SCALE_RATIO + page * float(scale_table()[1])
        # f32 arithmetic: relative to the largest value near by, and the spacing of subnormals.
        near = _run_extreme(x.abs(), coding.page_tokens or coding.chunk_tokens, coding.group)
        return farthest * reach + 2.0**-20 * near + 2.0**-146


def _half_range(x: Tensor, coding: FixedCoding) -> Tensor:
    high = _run_extreme(x, coding.chunk_tokens, coding.group)
    low = -_run_extreme(-x, coding.chunk_tokens, coding.group)
    return (high - low) / 2 if coding.offset else torch.maximum(high.abs(), low.abs())


def _run_extreme(x: Tensor, length: int, group: str) -> Tensor:
    """Largest value of each run of `length` tokens, by channel or over all, spread back to x's shape [H, T, D]."""
    out = torch.empty_like(x)
    for start in range(0, x.shape[1], length):
        run = x[:, start : start + length]
        out[:, start : start + length] = run.amax(1, keepdim=True) if group == "channel" else run.amax((0, 1, 2))
    return out
