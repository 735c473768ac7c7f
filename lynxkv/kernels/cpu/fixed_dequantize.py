"""Fixed-rate segments to values (SPEC 8.3).

    scale  = fl(s * sigma),  offset = fl(fl(o * sigma) + mu)
    value  = round(fl(fl(codebook[code] * scale) + offset))

Scale and offset of a chunk are worked out once for all its tokens; then each row of codes (a token and a head) is
unpacked, looked up, scaled and stored in one go.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from lynxkv.errors import ContentError
from lynxkv.kernels.cpu.bits import finish_rows, jit
from lynxkv.kernels.cpu.memory import U8, Strided, read_only
from lynxkv.kernels.cpu.packing import clear, unpack_rows
from lynxkv.kernels.cpu.threads import run_split
from lynxkv.kernels.tables import F32, FixedTables
from lynxkv.layout import FixedCoding, TensorSpec

# 16 KiB of f32 values between unpacking and scaling: they stay in the first-level cache.
BLOCK_ELEMENTS = 4096


@jit
def _padding_is_zero(data: Any, rows: int, dim: int, bits: int) -> bool:
    codes = np.empty(-(-dim // 8) * 8, np.uint8)
    for row in range(rows):
        clear(codes)
        unpack_rows(data, rows, len(codes), bits, row, codes)
        for i in range(dim, len(codes)):
            if codes[i]:
                return False
    return True


@jit
def _chunk_row(stored: Any, chunk: int, group: int, row: Any) -> None:
    """A chunk's parameter for every channel: each has its own, or one stands for all."""
    if group == 1:
        for x in range(len(row)):
            row[x] = stored[chunk]
    else:
        own = stored[chunk * group : (chunk + 1) * group]
        for x in range(len(row)):
            row[x] = own[x]


@jit
def _fold_page(scale: Any, offset: Any, page_scale: Any, page_mean: Any) -> None:
    for x in range(len(scale)):
        scale[x] *= page_scale[x]
        offset[x] = offset[x] * page_scale[x] + page_mean[x]


@jit
def _look_up(codes: Any, table: Any, values: Any) -> None:
    for d in range(len(values)):
        values[d] = table[codes[d]]


@jit
def _decode_chunks(
    start: int,
    stop: int,
    chunk_tokens: int,
    page_tokens: int,
    tokens: int,
    codes: Any,
    bits: int,
    residual: Any,
    residual_bits: int,
    table: Any,
    chunk_scale: Any,
    chunk_offset: Any,
    page_scale: Any,
    page_mean: Any,
    heads: int,
    dim: int,
    out: Any,
    head_stride: int,
    token_stride: int,
    kind: int,
) -> None:
    """Tokens [start, stop), of which start begins a chunk. `residual_bits` 0 means anchor precision; absent parameters
    are empty arrays.
    """
    channels = heads * dim
    rows = tokens * heads
    group = len(chunk_scale) // (-(-tokens // chunk_tokens))
    scale = np.empty(channels, np.float32)
    offset = np.empty(channels, np.float32)
    padded = -(-dim // 8) * 8
    block_tokens = min(chunk_tokens, max(1, BLOCK_ELEMENTS // (heads * padded)))
    block_codes = np.empty(block_tokens * heads * padded, np.uint8)
    block_values = np.empty(len(block_codes), np.float32)
    for first in range(start, stop, chunk_tokens):
        chunk = first // chunk_tokens
        _chunk_row(chunk_scale, chunk, group, scale)
        if len(chunk_offset):
            _chunk_row(chunk_offset, chunk, group, offset)
        else:
            for x in range(channels):
                offset[x] = 0
        if page_tokens:
            at = first // page_tokens * channels
            _fold_page(scale, offset, page_scale[at : at + channels], page_mean[at : at + channels])
        chunk_stop = min(first + chunk_tokens, stop)
        for token in range(first, chunk_stop, block_tokens):
            size = min(block_tokens, chunk_stop - token) * heads * padded
            row_codes, values = block_codes[:size], block_values[:size]
            clear(row_codes)
            unpack_rows(codes, rows, padded, bits, token * heads, row_codes)
            if residual_bits:
                unpack_rows(residual, rows, padded, residual_bits, token * heads, row_codes)
            _look_up(row_codes, table, values)
            at = token * token_stride
            finish_rows(values, scale, offset, heads, out, at, head_stride, token_stride, kind)


def dequantize_fixed(
    anchor: U8,
    residual: U8 | None,
    coding: FixedCoding,
    tables: FixedTables,
    spec: TensorSpec,
    tokens: int,
    out: Strided,
) -> None:
    """Decode a segment of `tokens` tokens; nothing is written before all of it has been checked.

    Raises:
        ContentError: as the reference.
    """
    part = _parts(anchor, coding, spec, tokens)
    table, low, low_bits = tables.anchor, _EMPTY_U8, 0
    if residual is not None and tables.full is not None:
        if residual.size != coding.residual_bytes(tokens, spec):
            raise ContentError(f"a residual segment has {residual.size} bytes")
        table, low, low_bits = tables.full, read_only(residual), coding.residual_bits
    if table.size < 1 << (coding.anchor_bits + low_bits):
        raise ContentError(f"a codebook has {table.size} values")
    codes = read_only(part["codes"])
    rows = tokens * spec.heads
    if spec.head_dim % 8:
        for data, bits in ((codes, coding.anchor_bits), (low, low_bits)):
            if not _padding_is_zero(data, rows, spec.head_dim, bits):
                raise ContentError("padding codes are not zero")
    chunk_scale = _values(part["chunk_scale"], tables.scale)
    chunk_offset = _values(part["chunk_offset"], tables.offset)
    page_scale, page_mean = _values(part["page_scale"], None), _values(part["page_mean"], None)
    book = read_only(table.astype(np.float32, copy=False))

    def decode(start: int, stop: int) -> None:
        _decode_chunks(
            start,
            stop,
            coding.chunk_tokens,
            coding.page_tokens,
            tokens,
            codes,
            coding.anchor_bits,
            low,
            low_bits,
            book,
            chunk_scale,
            chunk_offset,
            page_scale,
            page_mean,
            spec.heads,
            spec.head_dim,
            out.flat,
            out.head_stride,
            out.token_stride,
            out.kind,
        )

    run_split(decode, tokens, unit=coding.chunk_tokens, elements=tokens * spec.channels)


def _parts(anchor: U8, coding: FixedCoding, spec: TensorSpec, tokens: int) -> dict[str, U8]:
    sizes = coding.parts(tokens, spec)
    if anchor.size != sum(sizes.values()):
        raise ContentError(f"an anchor segment has {anchor.size} bytes, not {sum(sizes.values())}")
    part, at = {}, 0
    for name, size in sizes.items():
        part[name] = anchor[at : at + size]
        at += size
    return part


def _values(stored: U8, table: F32 | None) -> npt.NDArray[np.float32]:
    """Parameters as f32, looked up or as they are stored."""
    if table is not None and stored.size:
        return read_only(table.astype(np.float32, copy=False)[stored])
    values = read_only(stored.view("<f4") if stored.size else _EMPTY_F32)
    if not np.isfinite(values).all():
        raise ContentError("page or chunk parameters are not finite")
    return values


_EMPTY_U8 = read_only(np.empty(0, np.uint8))
_EMPTY_F32 = read_only(np.empty(0, np.float32))
