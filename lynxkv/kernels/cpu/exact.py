"""From full precision to the original and back (SPEC 8.7): corrections are sorted by the exponent of the full value.

Sorting is counting, so one pass over the full values says where each exponent's corrections begin, and a second one
writes or reads them there.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lynxkv.exact import EXPONENT, U8, U16
from lynxkv.kernels.cpu.bits import helper, jit
from lynxkv.kernels.cpu.memory import read_only


@helper
def _begin(full: Any, shift: int, mask: int) -> Any:
    """Where the corrections of each exponent begin."""
    starts = np.zeros(mask + 2, np.int64)
    for i in range(len(full)):
        starts[((full[i] >> shift) & mask) + 1] += 1
    for e in range(mask):
        starts[e + 1] += starts[e]
    return starts


@helper
def _ordinal(pattern: Any) -> Any:
    """Integers that follow the order of the values; -0 is just below +0."""
    wide = np.int64(pattern)
    return wide if wide < 0x8000 else 0x7FFF - wide


@jit
def _pack(original: Any, full: Any, shift: int, mask: int, raw: Any) -> None:
    place = _begin(full, shift, mask)
    for i in range(len(full)):
        exponent = (full[i] >> shift) & mask
        at = place[exponent]
        place[exponent] = at + 1
        # Differences are taken in 16 bits, and wrap.
        difference = np.int64(np.int16(_ordinal(original[i]) - _ordinal(full[i])))
        z = (difference << 1) ^ (difference >> 15)
        raw[at] = np.uint8(z & 0xFF)
        raw[len(full) + at] = np.uint8((z >> 8) & 0xFF)


@jit
def _unpack(raw: Any, full: Any, shift: int, mask: int, original: Any) -> bool:
    place = _begin(full, shift, mask)
    finite = True
    for i in range(len(full)):
        exponent = (full[i] >> shift) & mask
        at = place[exponent]
        place[exponent] = at + 1
        z = np.int64(raw[at]) | np.int64(raw[len(full) + at]) << 8
        ordinal = np.int64(np.int16(_ordinal(full[i]) + ((z >> 1) ^ -(z & 1))))
        pattern = ordinal if ordinal >= 0 else 0x7FFF - ordinal
        original[i] = np.uint16(pattern)
        finite &= ((pattern >> shift) & mask) != mask
    return finite


def pack_exact(original: U16, full: U16, dtype: str) -> U8:
    """As `lynxkv.exact.pack_exact`."""
    raw = np.empty(2 * full.size, np.uint8)
    _pack(read_only(original), read_only(full), *EXPONENT[dtype], raw)
    return raw


def unpack_exact(raw: U8, full: U16, dtype: str) -> U16:
    """As `lynxkv.exact.unpack_exact`.

    Raises:
        ValueError: a result is not finite.
    """
    original = np.empty(full.size, np.uint16)
    if not _unpack(read_only(raw), read_only(full), *EXPONENT[dtype], original):
        raise ValueError("a corrected value is not finite")
    return original
