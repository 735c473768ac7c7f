"""Fixed-rate segments to values (SPEC 8.3).

    scale  = fl(s * sigma),  offset = fl(fl(o * sigma) + mu)
    value  = round(fl(fl(codebook[code] * scale) + offset))

Scale and offset of a chunk are worked out once for all its tokens. Rows of codes are unpacked in blocks that stay in
the first-level cache; the rest happens in registers.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from lynxkv.errors import ContentError
from lynxkv.kernels.cpu.bits import helper, jit
from lynxkv.kernels.cpu.finish import EVEN, GATHERED, PERMUTED, finish_codes
from lynxkv.kernels.cpu.lanes import LANES
from lynxkv.kernels.cpu.memory import U8, Rows, bounded, read_only
from lynxkv.kernels.cpu.packing import unpack_rows
from lynxkv.kernels.cpu.threads import run_split
from lynxkv.kernels.tables import F32, FixedTables
from lynxkv.layout import FixedCoding, TensorSpec

BLOCK_ELEMENTS = 1 << 14


@jit
def _padding_is_zero(data: Any, rows: int, dim: int, bits: int) -> bool:
    codes = np.empty(-(-dim // 8) * 8, np.uint8)
    for row in range(rows):
        unpack_rows(data, rows, len(codes), bits, row, codes, True)
        for i in range(dim, len(codes)):
            if codes[i]:
                return False
    return True


@helper
def _chunk_rows(as_f32: Any, as_u8: Any, table: Any, first: int, count: int, parameter: Any) -> None:
    """Stored parameters [first, first + count), f32 or indices into the table."""
    if len(table):
        own_u8 = as_u8[first : first + count]
        for x in range(count):
            parameter[x] = table[own_u8[x]]
    else:
        own_f32 = as_f32[first : first + count]
        for x in range(count):
            parameter[x] = own_f32[x]


@helper
def _token_parameters(as_f32: Any, as_u8: Any, table: Any, token: int, chunk_tokens: int, parameter: Any) -> None:
    """The parameters of the chunks that the tokens from `token` on are in: stored ones, f32 or indices."""
    chunk, left = token // chunk_tokens, chunk_tokens - token % chunk_tokens
    for i in range(len(parameter)):
        parameter[i] = table[as_u8[chunk]] if len(table) else as_f32[chunk]
        left -= 1
        if left == 0:
            chunk, left = chunk + 1, chunk_tokens


@helper
def _fold_page(scale: Any, offset: Any, page_scale: Any, page_mean: Any) -> None:
    for x in range(len(page_scale)):
        scale[x] *= page_scale[x]
        offset[x] = offset[x] * page_scale[x] + page_mean[x]


@jit
def _decode_blocks(
    start: int,
    stop: int,
    chunk_tokens: int,
    page_tokens: int,
    tokens: int,
    codes: Any,
    bits: int,
    residual: Any,
    residual_bits: int,
    book: Any,
    even: Any,
    how: int,
    scale_f32: Any,
    scale_u8: Any,
    scale_table: Any,
    offset_f32: Any,
    offset_u8: Any,
    offset_table: Any,
    has_offset: bool,
    shared: bool,
    page_scale: Any,
    page_mean: Any,
    heads: int,
    dim: int,
    out: Any,
    head_stride: int,
    starts: Any,
    kind: int,
) -> None:
    """Tokens [start, stop), of which start begins a chunk. `residual_bits` 0 means anchor precision; absent parameters
    are empty arrays. `shared`: the channels of a chunk have one scale and offset.
    """
    channels = heads * dim
    rows = tokens * heads
    padded = -(-dim // 8) * 8
    block_tokens = max(1, BLOCK_ELEMENTS // (heads * padded))
    block_codes = np.zeros(block_tokens * heads * padded + LANES, np.uint8)
    # Where neither a channel nor a page has parameters of its own, one number a token will do.
    a_token = shared and not page_tokens
    width = block_tokens if a_token else channels
    scale = np.zeros(width + LANES, np.float32)
    offset = np.zeros(width + LANES, np.float32)
    token, ready = start, start
    while token < stop:
        end = min(token + block_tokens, stop)
        if a_token:
            own_scale, own_offset = scale[: end - token], offset[: end - token]
            _token_parameters(scale_f32, scale_u8, scale_table, token, chunk_tokens, own_scale)
            if has_offset:
                _token_parameters(offset_f32, offset_u8, offset_table, token, chunk_tokens, own_offset)
        else:
            chunk = token // chunk_tokens
            end = min(end, (chunk + 1) * chunk_tokens)
            if token == ready:
                ready = (chunk + 1) * chunk_tokens
                first, count = (chunk, 1) if shared else (chunk * channels, channels)
                _chunk_rows(scale_f32, scale_u8, scale_table, first, count, scale)
                if has_offset:
                    _chunk_rows(offset_f32, offset_u8, offset_table, first, count, offset)
                else:
                    offset[:] = 0
                if shared:
                    scale[1:] = scale[0]
                    offset[1:] = offset[0]
                if page_tokens:
                    at = token // page_tokens * channels
                    _fold_page(scale, offset, page_scale[at : at + channels], page_mean[at : at + channels])
        own = block_codes[: (end - token) * heads * padded]
        unpack_rows(codes, rows, padded, bits, token * heads, own, True)
        if residual_bits:
            unpack_rows(residual, rows, padded, residual_bits, token * heads, own, False)
        places = starts[token:end]
        finish_codes(own, padded, book, even, how, scale, offset, a_token, heads, dim, out, head_stride, places, kind)
        token = end


def dequantize_fixed(
    anchor: U8,
    residual: U8 | None,
    coding: FixedCoding,
    tables: FixedTables,
    spec: TensorSpec,
    tokens: int,
    out: Rows,
) -> None:
    """Decode a segment of `tokens` tokens; nothing is written before all of it has been checked.

    Raises:
        ContentError: as the reference.
    """
    part = _parts(anchor, coding, spec, tokens)
    book: Literal["anchor", "full"] = "anchor"
    table, low, low_bits = tables.anchor, _EMPTY_U8, 0
    if residual is not None and tables.full is not None:
        if residual.size != coding.residual_bytes(tokens, spec):
            raise ContentError(f"a residual segment has {residual.size} bytes")
        book, table, low, low_bits = "full", tables.full, read_only(residual), coding.residual_bits
    if table.size < 1 << (coding.anchor_bits + low_bits):
        raise ContentError(f"a codebook has {table.size} values")
    codes = read_only(part["codes"])
    rows = tokens * spec.heads
    if spec.head_dim % 8:
        for data, bits in ((codes, coding.anchor_bits), (low, low_bits)):
            if bits and not _padding_is_zero(data, rows, spec.head_dim, bits):
                raise ContentError("padding codes are not zero")
    scale, offset = (_Parameter.of(part[f"chunk_{name}"], name, tables) for name in _CHUNK_PARAMETERS)
    sigma, mean = _Parameter.plain(part["page_scale"]), _Parameter.plain(part["page_mean"])
    even = tables.even[book]
    how = EVEN if even is not None else PERMUTED if table.size <= LANES else GATHERED
    # Sixteen entries are read as one.
    entries = read_only(table if table.size >= LANES else np.resize(table, LANES))
    page_reach = sigma.reach if coding.page_tokens else 1.0
    farthest = (tables.reach[book] * scale.reach + offset.reach) * page_reach + mean.reach
    kind = bounded(out, farthest)

    def decode(start: int, stop: int) -> None:
        _decode_blocks(
            start,
            stop,
            coding.chunk_tokens,
            coding.page_tokens,
            tokens,
            codes,
            coding.anchor_bits,
            low,
            low_bits,
            entries,
            even or _NOT_EVEN,
            how,
            scale.as_f32,
            scale.as_u8,
            scale.table,
            offset.as_f32,
            offset.as_u8,
            offset.table,
            coding.offset,
            coding.group == "token",
            sigma.as_f32,
            mean.as_f32,
            spec.heads,
            spec.head_dim,
            out.flat,
            out.head_stride,
            out.starts,
            kind,
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


class _Parameter(NamedTuple):
    """Page or chunk parameters: f32, or u8 indices into a table; `reach` is the largest magnitude they can have."""

    as_f32: npt.NDArray[np.float32]
    as_u8: U8
    table: npt.NDArray[np.float32]
    reach: float

    @classmethod
    def plain(cls, stored: U8) -> _Parameter:
        """Values as they are."""
        if not stored.size:
            return _ABSENT
        values = stored.view("<f4")
        reach = float(np.abs(values).max())
        if not np.isfinite(reach):
            raise ContentError("page or chunk parameters are not finite")
        return cls(as_f32=read_only(values), as_u8=_EMPTY_U8, table=_EMPTY_F32, reach=reach)

    @classmethod
    def of(cls, stored: U8, name: Literal["scale", "offset"], tables: FixedTables) -> _Parameter:
        """Values, or indices into this table where there is one."""
        table: F32 | None = getattr(tables, name)
        if table is None or not stored.size:
            return cls.plain(stored)
        if table.size < 256:
            raise ContentError(f"a table of parameters has {table.size} values")
        values = read_only(table.astype(np.float32, copy=False))
        return cls(as_f32=_EMPTY_F32, as_u8=read_only(stored), table=values, reach=tables.reach[name])


_CHUNK_PARAMETERS: tuple[Literal["scale"], Literal["offset"]] = ("scale", "offset")
_EMPTY_U8 = read_only(np.empty(0, np.uint8))
_EMPTY_F32 = read_only(np.empty(0, np.float32))
_ABSENT = _Parameter(as_f32=_EMPTY_F32, as_u8=_EMPTY_U8, table=_EMPTY_F32, reach=0.0)
_NOT_EVEN = (np.float32(0), np.float32(0))
