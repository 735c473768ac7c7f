"""What checked bytes may hold (SPEC 8), without decoding them: numpy only, so that `check` stays light."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from lynxkv.errors import ChecksumError, ContentError, FormatError
from lynxkv.format.index import Segment
from lynxkv.layout import CacheHeader, EntropyCoding, FixedCoding
from lynxkv.packing import unpack_digits, unpack_rows, unpack_symbols

U8 = npt.NDArray[np.uint8]


def check_content(header: CacheHeader, segment: Segment, raw: U8) -> None:
    """Refuse a segment whose content the SPEC forbids.

    Raises:
        ContentError: values that are not finite, an order that is no permutation, codes or escapes out of range.
        ChecksumError: token ids without the stated digest.
    """
    try:
        _CHECKS[segment.plan.part](header, segment, raw)
    except ValueError as error:
        if isinstance(error, FormatError):
            raise
        raise ContentError(f"{segment.plan.name}: {error}") from error


def _finite(dtype: str, raw: U8) -> None:
    if dtype == "F32":
        finite = np.isfinite(raw.view("<f4")).all()
    else:
        exponent = 0x7F80 if dtype == "BF16" else 0x7C00
        finite = not np.any((raw.view("<u2") & exponent) == exponent)
    if not finite:
        raise ValueError("a value is not finite")


def _values(header: CacheHeader, segment: Segment, raw: U8) -> None:
    _finite(segment.plan.dtype, raw)


def _steps(header: CacheHeader, segment: Segment, raw: U8) -> None:
    _finite("F32", raw)
    for ref, row in zip(header.tensors, raw.view("<f4").reshape(-1, 2), strict=True):
        if not isinstance(ref.coding, EntropyCoding):
            if row.any():
                raise ValueError(f"{ref.key} has steps but is not entropy-coded")
        elif ref.coded_tokens and not (row > 0).all():
            raise ValueError(f"the steps of {ref.key} are not positive")


def _order(header: CacheHeader, segment: Segment, raw: U8) -> None:
    order = raw.view("<u2")
    if not np.array_equal(np.sort(order), np.arange(order.size)):
        raise ValueError("the channel order is not a permutation")


def _anchor(header: CacheHeader, segment: Segment, raw: U8) -> None:
    ref, plan = segment.coded
    if isinstance(ref.coding, EntropyCoding):
        unpack_symbols(raw, ref.spec.channels * plan.tokens)
    elif isinstance(ref.coding, FixedCoding):
        sizes = ref.coding.parts(plan.tokens, ref.spec)
        codes = sum(sizes.values()) - sizes["codes"]
        parameters = codes if ref.coding.chunk_dtype == "f32" else sizes["page_mean"] + sizes["page_scale"]
        _finite("F32", raw[:parameters])
        unpack_rows(raw[codes:], plan.tokens * ref.spec.heads, ref.spec.head_dim, ref.coding.anchor_bits)


def _residual(header: CacheHeader, segment: Segment, raw: U8) -> None:
    ref, plan = segment.coded
    if isinstance(ref.coding, EntropyCoding):
        unpack_digits(raw, ref.spec.channels, plan.tokens, ref.coding.radix)
    elif isinstance(ref.coding, FixedCoding):
        unpack_rows(raw, plan.tokens * ref.spec.heads, ref.spec.head_dim, ref.coding.residual_bits)


def _token_ids(header: CacheHeader, segment: Segment, raw: U8) -> None:
    if hashlib.sha256(raw.data).hexdigest() != header.tokens.sha256:
        raise ChecksumError("the token ids do not have the stated digest")


def _anything(header: CacheHeader, segment: Segment, raw: U8) -> None:
    """Digests are compared elsewhere; what exact corrections lead to is seen when they are applied."""


_CHECKS: dict[str, Callable[[CacheHeader, Segment, U8], None]] = {
    "prefix": _anything,
    "codebook": _values,
    "steps": _steps,
    "logits": _values,
    "sink": _values,
    "mean": _values,
    "order": _order,
    "anchor": _anchor,
    "raw": _values,
    "residual": _residual,
    "exact": _anything,
    "token_ids": _token_ids,
}
