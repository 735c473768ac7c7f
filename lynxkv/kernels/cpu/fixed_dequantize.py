"""Fixed-rate segments to values (SPEC 8.3).

    scale  = fl(s * sigma),  offset = fl(fl(o * sigma) + mu)
    value  = round(fl(fl(codebook[code] * scale) + offset))

Scale and offset of a chunk are worked out once for all its tokens; then each row of codes (a token and a head) is
unpacked, looked up, scaled and stored in one go.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from lynxkv.errors import ContentError
from lynxkv.kernels.cpu.bits import helper, jit, wide_vectors
from lynxkv.kernels.cpu.finish import finish_values
from lynxkv.kernels.cpu.memory import U8, Rows, bounded, read_only
from lynxkv.kernels.cpu.packing import clear, unpack_rows
from lynxkv.kernels.cpu.threads import run_split
from lynxkv.kernels.tables import F32, FixedTables
from lynxkv.layout import FixedCoding, TensorSpec

# Codes between unpacking and scaling stay in the first-level cache.
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


@helper
def _chunk_row(as_f32: Any, as_u8: Any, table: Any, chunk: int, group: int, row: Any) -> None:
    """A chunk's parameter for every channel, stored as f32 or as indices; each has its own, or one stands for all."""
    if group == 1:
        value = table[as_u8[chunk]] if len(table) else as_f32[chunk]
        for x in range(len(row)):
            row[x] = value
    elif len(table):
        own_u8 = as_u8[chunk * group : (chunk + 1) * group]
        for x in range(len(row)):
            row[x] = table[own_u8[x]]
    else:
        own_f32 = as_f32[chunk * group : (chunk + 1) * group]
        for x in range(len(row)):
            row[x] = own_f32[x]


@helper
def _fold_page(scale: Any, offset: Any, page_scale: Any, page_mean: Any) -> None:
    for x in range(len(scale)):
        scale[x] *= page_scale[x]
        offset[x] = offset[x] * page_scale[x] + page_mean[x]


def _permute(_context: Any, table: Any, codes: Any, _index: Any, values: Any) -> Any:
    """values[i : i + 16] = table[codes[i : i + 16]], for a table of 16: LLVM makes it one permutation of a register,
    where a loop loads each value by itself (0.05 and 0.22 ns an element). Other processors get those loads.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        def vector_at(number: int, index: Any, element: Any) -> Any:
            array = context.make_array(signature.args[number])(context, builder, arguments[number])
            pointer = builder.gep(array.data, [index])
            return builder.bitcast(pointer, ir.VectorType(element, 16).as_pointer())

        zero, index = ir.Constant(arguments[2].type, 0), arguments[2]
        entries = builder.load(vector_at(0, zero, ir.FloatType()), align=4)
        picks = builder.zext(
            builder.load(vector_at(1, index, ir.IntType(8)), align=1), ir.VectorType(ir.IntType(32), 16)
        )
        picked = ir.Constant(ir.VectorType(ir.FloatType(), 16), ir.Undefined)
        for lane in range(16):
            number = ir.Constant(ir.IntType(32), lane)
            value = builder.extract_element(entries, builder.extract_element(picks, number))
            picked = builder.insert_element(picked, value, number)
        builder.store(picked, vector_at(3, index, ir.FloatType()), align=4)
        return context.get_dummy_value()

    return types.void(table, codes, types.intp, values), generate


_permute_16: Any = intrinsic(_permute)


@helper
def _look_up(codes: Any, table: Any, values: Any) -> None:
    wide_vectors()
    if len(table) == 16:
        whole = len(values) // 16 * 16
        for i in range(0, whole, 16):
            _permute_16(table, codes, i, values)
        for i in range(whole, len(values)):
            values[i] = table[codes[i]]
    else:
        for i in range(len(values)):
            values[i] = table[codes[i]]


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
    scale_f32: Any,
    scale_u8: Any,
    scale_table: Any,
    offset_f32: Any,
    offset_u8: Any,
    offset_table: Any,
    has_offset: bool,
    group: int,
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
    are empty arrays.
    """
    channels = heads * dim
    rows = tokens * heads
    scale = np.empty(channels, np.float32)
    offset = np.empty(channels, np.float32)
    padded = -(-dim // 8) * 8
    block_tokens = min(chunk_tokens, max(1, BLOCK_ELEMENTS // (heads * padded)))
    block_codes = np.empty(block_tokens * heads * padded, np.uint8)
    block_values = np.empty(len(block_codes), np.float32)
    for first in range(start, stop, chunk_tokens):
        chunk = first // chunk_tokens
        _chunk_row(scale_f32, scale_u8, scale_table, chunk, group, scale)
        if has_offset:
            _chunk_row(offset_f32, offset_u8, offset_table, chunk, group, offset)
        else:
            for x in range(channels):
                offset[x] = 0
        if page_tokens:
            at = first // page_tokens * channels
            _fold_page(scale, offset, page_scale[at : at + channels], page_mean[at : at + channels])
        chunk_stop = min(first + chunk_tokens, stop)
        for token in range(first, chunk_stop, block_tokens):
            own = starts[token : min(token + block_tokens, chunk_stop)]
            size = len(own) * heads * padded
            row_codes, values = block_codes[:size], block_values[:size]
            clear(row_codes)
            unpack_rows(codes, rows, padded, bits, token * heads, row_codes)
            if residual_bits:
                unpack_rows(residual, rows, padded, residual_bits, token * heads, row_codes)
            _look_up(row_codes, table, values)
            finish_values(values, padded, scale, offset, heads, out, 0, head_stride, own, kind)


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
    scale, offset = _Parameter.of(part["chunk_scale"], tables.scale), _Parameter.of(part["chunk_offset"], tables.offset)
    sigma, mean = _Parameter.of(part["page_scale"], None), _Parameter.of(part["page_mean"], None)
    book = read_only(table.astype(np.float32, copy=False))
    page_reach = sigma.reach if coding.page_tokens else 1.0
    farthest = (_reach(book) * scale.reach + offset.reach) * page_reach + mean.reach
    kind = bounded(out, farthest)

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
            scale.as_f32,
            scale.as_u8,
            scale.table,
            offset.as_f32,
            offset.as_u8,
            offset.table,
            coding.offset,
            spec.channels if coding.group == "channel" else 1,
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


@dataclass(frozen=True, kw_only=True)
class _Parameter:
    """Page or chunk parameters: f32, or u8 indices into a table; `reach` is the largest magnitude they can have."""

    as_f32: npt.NDArray[np.float32]
    as_u8: U8
    table: npt.NDArray[np.float32]
    reach: float

    @classmethod
    def of(cls, stored: U8, table: F32 | None) -> _Parameter:
        if table is not None and stored.size:
            values = read_only(table.astype(np.float32, copy=False))
            if values.size < 256:
                raise ContentError(f"a table of parameters has {values.size} values")
            return cls(as_f32=_EMPTY_F32, as_u8=read_only(stored), table=values, reach=_reach(values))
        values = read_only(stored.view("<f4") if stored.size else _EMPTY_F32)
        reach = _reach(values)
        if not np.isfinite(reach):
            raise ContentError("page or chunk parameters are not finite")
        return cls(as_f32=values, as_u8=_EMPTY_U8, table=_EMPTY_F32, reach=reach)


def _reach(values: npt.NDArray[np.float32]) -> float:
    """The largest magnitude, NaN if there is one among them."""
    return max(float(values.max()), -float(values.min())) if values.size else 0.0


_EMPTY_U8 = read_only(np.empty(0, np.uint8))
_EMPTY_F32 = read_only(np.empty(0, np.float32))
