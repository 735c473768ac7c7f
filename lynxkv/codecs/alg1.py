"""`alg1`: Algorithm 1 of the Lynx paper (arXiv 2607.01831), with its top level repaired.

A normalised value x is companded, y = ln(1 + alpha |x|) / ln(1 + alpha), and rounded to the level I = round(y * top).
The anchor keeps the sign and V_mag = (I + 2^(r-1) - 1) >> r, the residual V_res = 2^r * V_mag - I.

As printed, top is 127 and V_mag runs to 8, which does not fit 4 bits with the sign. With
top = (2^(a-1) - 1) * 2^r + 2^(r-1), 120 for 4 + 4 bits, V_mag needs a - 1 bits and V_res lies in [-2^(r-1), 2^(r-1)).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt

from lynxkv.codecs.base import SINK_TOKENS, check_sinks, segment_tokens
from lynxkv.codecs.fixed import FixedCodec, check_chunks, expand, offset_table, scale_table
from lynxkv.errors import InputError
from lynxkv.kernels.tables import FixedTables
from lynxkv.layout import FixedCoding, TensorName


def top_level(anchor_bits: int, residual_bits: int) -> int:
    """The largest level I whose anchor fits `anchor_bits` and residual `residual_bits`."""
    if residual_bits == 0:
        return (1 << (anchor_bits - 1)) - 1
    return (((1 << (anchor_bits - 1)) - 1) << residual_bits) + (1 << (residual_bits - 1))


def split_level(
    level: npt.NDArray[np.int64], residual_bits: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """(V_mag, V_res) of levels I >= 0 (Algorithm 1); without residual bits V_mag is the level."""
    if residual_bits == 0:
        return level, np.zeros_like(level)
    v_mag = (level + 2 ** (residual_bits - 1) - 1) >> residual_bits
    return v_mag, (v_mag << residual_bits) - level


@dataclass(frozen=True, kw_only=True)
class Alg1(FixedCodec):
    """Algorithm 1 with any split of 8 bits, any alpha, chunk C and page P; scales in f32 or in 8 bits.

    With `residual_bits` 0 it is the paper's whole cache in `anchor_bits` bits.
    """

    name: ClassVar[str] = "alg1"

    anchor_bits: int = 4
    residual_bits: int = 4
    alpha: float = 2.0
    chunk_tokens: int = 32
    page_tokens: int = 256
    chunk_dtype: Literal["f32", "u8"] = "u8"
    sink_tokens: int = SINK_TOKENS

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.anchor_bits < 2 or self.residual_bits < 0 or self.anchor_bits + self.residual_bits > 8:
            raise InputError(f"cannot split {self.anchor_bits} + {self.residual_bits} bits: 2 + 0 to 8 in all")
        if not 0 < self.alpha <= 1e6:
            raise InputError(f"alpha is {self.alpha}, not in (0, 1e6]")
        check_chunks(self.chunk_tokens, self.page_tokens)
        check_sinks(self.sink_tokens)

    def coding(self, tensor: TensorName, channels: int) -> FixedCoding:
        return FixedCoding(
            anchor_bits=self.anchor_bits,
            residual_bits=self.residual_bits,
            codebook="alg1",
            chunk_tokens=self.chunk_tokens,
            page_tokens=self.page_tokens,
            group="channel",
            chunk_dtype=self.chunk_dtype,
            offset=True,
            segment_tokens=segment_tokens(channels, self.page_tokens),
            sink_tokens=self.sink_tokens,
        )

    @cached_property
    def fixed_tables(self) -> FixedTables:
        a, r = self.anchor_bits, self.residual_bits
        top = top_level(a, r)
        # Code = sign bit, V_mag, then V_res + 2^(r-1).
        half = 2**r // 2
        code = np.arange(2 ** (a + r))
        sign = np.where(code >> (a + r - 1), -1.0, 1.0)
        v_mag = (code >> r) & (2 ** (a - 1) - 1)
        v_res = (code & (2**r - 1)) - half
        level = np.maximum(0, (v_mag << r) - v_res)
        levels = np.arange(top + 1)
        mag, res = split_level(levels, r)
        positive = (mag << r) | (res + half)
        edges = expand(levels[:-1] + 0.5, top, self.alpha)
        u8 = self.chunk_dtype == "u8"
        return FixedTables(
            anchor=expand(sign * (v_mag << r), top, self.alpha)[:: 2**r].copy(),
            full=expand(sign * level, top, self.alpha) if r else None,
            scale=scale_table() if u8 else None,
            offset=offset_table() if u8 else None,
            edges=np.concatenate([-edges[::-1], np.zeros(1, np.float32), edges]),
            buckets=np.concatenate([positive[::-1] | 2 ** (a + r - 1), positive]).astype(np.uint8),
        )
