"""`int8` and `int4`: symmetric integers with one f32 scale a token over all heads; whole caches in a single object."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np

from lynxkv.codecs.base import segment_tokens
from lynxkv.codecs.fixed import FixedCodec
from lynxkv.kernels.tables import FixedTables
from lynxkv.layout import FixedCoding, TensorName


@dataclass(frozen=True, kw_only=True)
class IntToken(FixedCodec):
    """Levels -top to top, top = 2^(bits-1) - 1; no sinks are kept, as in the schemes it stands for."""

    bits: ClassVar[int]
    # The schemes it stands for store plain integers; zstd would take int8 to about 6.9 bits on real caches.
    compress: bool = False

    def coding(self, tensor: TensorName, channels: int) -> FixedCoding:
        return FixedCoding(
            anchor_bits=self.bits,
            residual_bits=0,
            codebook=self.name,
            chunk_tokens=1,
            page_tokens=0,
            group="token",
            chunk_dtype="f32",
            offset=False,
            segment_tokens=segment_tokens(channels, 64),
            sink_tokens=0,
        )

    @cached_property
    def fixed_tables(self) -> FixedTables:
        half = 2 ** (self.bits - 1)
        used = np.arange(-half + 1, half)
        return FixedTables(
            anchor=np.arange(-half, half).astype(np.float32),
            edges=(used[:-1] + 0.5).astype(np.float32),
            buckets=(used + half).astype(np.uint8),
            peak=float(half - 1),
        )


@dataclass(frozen=True, kw_only=True)
class Int8(IntToken):
    """8 bits an element."""

    name: ClassVar[str] = "int8"
    bits: ClassVar[int] = 8


@dataclass(frozen=True, kw_only=True)
class Int4(IntToken):
    """4 bits an element."""

    name: ClassVar[str] = "int4"
    bits: ClassVar[int] = 4
