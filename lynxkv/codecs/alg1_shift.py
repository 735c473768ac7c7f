"""`alg1-shift`: the shifted variant in the Lynx paper's appendix (arXiv 2607.01831).

Q = clip(round(y * 127), -127, 127) with y companded and signed, anchor Q >> 4, residual Q & 15: 4 + 4 bits as they
stand. The anchor decodes to the middle of the sixteen levels it stands for.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np

from lynxkv.codecs.base import SINK_TOKENS, check_sinks, segment_tokens
from lynxkv.codecs.fixed import FixedCodec, check_chunks, expand
from lynxkv.errors import InputError
from lynxkv.kernels.tables import FixedTables
from lynxkv.layout import FixedCoding, TensorName

TOP = 127


@dataclass(frozen=True, kw_only=True)
class Alg1Shift(FixedCodec):
    """The appendix's parameters: alpha 100, chunks of 16 tokens, f32 scales."""

    name: ClassVar[str] = "alg1-shift"

    alpha: float = 100.0
    chunk_tokens: int = 16
    page_tokens: int = 256
    sink_tokens: int = SINK_TOKENS

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.alpha <= 1e6:
            raise InputError(f"alpha is {self.alpha}, not in (0, 1e6]")
        check_chunks(self.chunk_tokens, self.page_tokens)
        check_sinks(self.sink_tokens)

    def coding(self, tensor: TensorName, channels: int) -> FixedCoding:
        return FixedCoding(
            anchor_bits=4,
            residual_bits=4,
            codebook="alg1-shift",
            chunk_tokens=self.chunk_tokens,
            page_tokens=self.page_tokens,
            group="channel",
            chunk_dtype="f32",
            offset=True,
            segment_tokens=segment_tokens(channels, self.page_tokens),
            sink_tokens=self.sink_tokens,
        )

    @cached_property
    def fixed_tables(self) -> FixedTables:
        # Code = Q + 128: anchor (Q >> 4) + 8, residual Q & 15.
        level = np.arange(-128, 128)
        used = np.arange(-TOP, TOP + 1)
        middle = np.arange(-8, 8) * 16 + 7.5
        return FixedTables(
            anchor=expand(middle, TOP, self.alpha),
            full=expand(level.astype(np.float64), TOP, self.alpha),
            edges=expand(used[:-1] + 0.5, TOP, self.alpha),
            buckets=(used + 128).astype(np.uint8),
        )
