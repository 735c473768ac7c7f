"""`fixed`: linear codes of fixed width, for links faster than an entropy decoder (SPEC 8.3).

Each chunk of a channel spans its own range, from an 8-bit offset and scale under a page's f32 normalisation; the levels
of a chunk are even, and the anchor is the middle of the levels it stands for.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np

from lynxkv.codecs.base import SINK_TOKENS, check_sinks, segment_tokens
from lynxkv.codecs.fixed import FixedCodec, check_chunks, offset_table, scale_table
from lynxkv.errors import InputError
from lynxkv.kernels.tables import FixedTables
from lynxkv.layout import FixedCoding, TensorName


@dataclass(frozen=True, kw_only=True)
class Linear(FixedCodec):
    """Even levels over each chunk's range; `anchor_bits` of `anchor_bits + residual_bits` are the anchor."""

    name: ClassVar[str] = "fixed"

    compress: bool = False
    anchor_bits: int = 4
    residual_bits: int = 4
    chunk_tokens: int = 32
    page_tokens: int = 512
    sink_tokens: int = SINK_TOKENS

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.anchor_bits < 1 or self.residual_bits < 0 or self.anchor_bits + self.residual_bits > 8:
            raise InputError(f"cannot split {self.anchor_bits} + {self.residual_bits} bits: 1 to 8 in all")
        check_chunks(self.chunk_tokens, self.page_tokens)
        check_sinks(self.sink_tokens)

    def coding(self, tensor: TensorName, channels: int) -> FixedCoding:
        return FixedCoding(
            anchor_bits=self.anchor_bits,
            residual_bits=self.residual_bits,
            codebook="linear",
            chunk_tokens=self.chunk_tokens,
            page_tokens=self.page_tokens,
            group="channel",
            chunk_dtype="u8",
            offset=True,
            segment_tokens=segment_tokens(channels, self.page_tokens),
            sink_tokens=self.sink_tokens,
        )

    @cached_property
    def fixed_tables(self) -> FixedTables:
        bits = self.anchor_bits + self.residual_bits
        levels = (2 * np.arange(2**bits) + 1) / 2**bits - 1
        anchor = (2 * np.arange(2**self.anchor_bits) + 1) / 2**self.anchor_bits - 1
        return FixedTables(
            anchor=anchor.astype(np.float32),
            full=levels.astype(np.float32) if self.residual_bits else None,
            scale=scale_table(),
            offset=offset_table(),
            edges=((levels[1:] + levels[:-1]) / 2).astype(np.float32),
            buckets=np.arange(2**bits).astype(np.uint8),
        )
