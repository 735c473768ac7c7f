"""From full precision to the original, bit by bit (SPEC 8.7), in numpy: the definition, which `kernels` speed up."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

U8 = npt.NDArray[np.uint8]
U16 = npt.NDArray[np.uint16]

EXPONENT = {"bf16": (7, 0xFF), "fp16": (10, 0x1F)}
"""Of a pattern: how far the exponent is shifted, and its mask."""


def pack_exact(original: U16, full: U16, dtype: str) -> U8:
    """The raw bytes of an exact segment from the 16-bit patterns of both, flat and in the order [H, t, D]."""
    difference = (_ordinal(original) - _ordinal(full)).astype(np.int16)
    z = ((difference << 1) ^ (difference >> 15)).view(np.uint16)[_order(full, dtype)]
    return np.concatenate([z.astype(np.uint8), (z >> 8).astype(np.uint8)])


def unpack_exact(raw: U8, full: U16, dtype: str) -> U16:
    """The original's patterns, from the full value's.

    Raises:
        ValueError: a result is not finite.
    """
    count = full.size
    z = np.empty(count, np.uint16)
    z[_order(full, dtype)] = raw[:count] | raw[count:].astype(np.uint16) << 8
    difference = ((z >> 1) ^ -(z & 1)).view(np.int16)
    ordinal = (_ordinal(full) + difference).astype(np.int16)
    original = np.where(ordinal >= 0, ordinal, 0x7FFF - ordinal.astype(np.int32)).astype(np.uint16)
    shift, mask = EXPONENT[dtype]
    if np.any((original >> shift) & mask == mask):
        raise ValueError("a corrected value is not finite")
    return original


def _ordinal(pattern: U16) -> npt.NDArray[np.int32]:
    """Integers that follow the order of the values; -0 is just below +0."""
    wide = pattern.astype(np.int32)
    return np.where(wide < 0x8000, wide, 0x7FFF - wide)


def _order(full: U16, dtype: str) -> npt.NDArray[np.intp]:
    """Elements by exponent: within one, the differences spread alike, and an entropy coder adapts to each."""
    shift, mask = EXPONENT[dtype]
    return np.argsort(((full >> shift) & mask).astype(np.uint8), kind="stable")
