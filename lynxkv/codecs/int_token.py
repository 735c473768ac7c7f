"""`int8` and `int4`: integers between each token's extremes over all heads; whole caches in a single object."""

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
    """2^bits levels from a token's smallest value to its largest, with an f32 scale and offset a token.

    No sinks are kept, as in the schemes it stands for.
    """

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
            offset=True,
            segment_tokens=segment_tokens(channels, 64),
            sink_tokens=0,
        )

    @cached_property
    def fixed_tables(self) -> FixedTables:
        levels = np.arange(2**self.bits)
        middle = (2**self.bits - 1) / 2
        return FixedTables(
            anchor=(levels - middle).astype(np.float32),
            edges=(levels[1:] - 0.5 - middle).astype(np.float32),
            buckets=levels.astype(np.uint8),
            peak=middle,
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
