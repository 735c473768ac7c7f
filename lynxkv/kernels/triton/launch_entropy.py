"""Launchers of the entropy kernels: shapes, checks, grids, escapes."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton
from torch import Tensor

from lynxkv.kernels.paged import Out, scatter
from lynxkv.kernels.rounding import round_to
from lynxkv.kernels.tables import EntropyTables
from lynxkv.kernels.triton.entropy import dequantize_entropy_kernel, quantize_entropy_kernel
from lynxkv.kernels.triton.launch import (
    EXACT,
    U8,
    Unit,
    loaded_as,
    on_device,
    on_host,
    place_of,
    power_of_two,
    require,
    stored_as,
)
from lynxkv.kernels.triton.planes import pack_kernel
from lynxkv.layout import ESCAPE_BYTES, EntropyCoding, TensorSpec
from lynxkv.packing import INDEX_LIMIT, SYMBOL_ESCAPE, radix_group, unpack_digits

# 4096 bytes a tile, 32 for each of 128 threads: two vector loads of 16.
BLOCK_TOKENS = 64
# Half of that with the Residual: registers do not suffice for 64 where a code holds three digits.
BLOCK_TOKENS_REFINING = 32
BLOCK_CHANNELS = 64


def dequantize_entropy(
    anchor: U8,
    residual: U8 | None,
    coding: EntropyCoding,
    tables: EntropyTables,
    spec: TensorSpec,
    dtype: str,
    out: Out,
    kind: Any,
) -> None:
    """Decode a segment into `out` [H, T, D], whose elements are what `kind` says.

    Raises:
        ContentError: as the reference; the segment may have been written in part.
    """
    tokens, count = out.shape[1], spec.channels * out.shape[1]
    radix = coding.radix if residual is not None else 1
    group, bits = radix_group(radix) if radix > 1 else (1, 0)
    require(anchor.size >= count and (anchor.size - count) % ESCAPE_BYTES == 0, "escapes are not whole")
    require(
        residual is None or residual.size == coding.residual_bytes(tokens, spec), "a residual segment has another size"
    )
    escapes = anchor[count:].copy().view([("position", "<u4"), ("value", "<i4")])
    positions = escapes["position"].astype(np.int64)
    in_order = bool(np.all(np.diff(positions) > 0)) and bool(np.all(positions < count))
    require(in_order and bool(np.all(anchor[positions] == SYMBOL_ESCAPE)), "escapes are not at the escape symbols")
    require(bool(np.all(np.abs(escapes["value"].astype(np.int64)) < INDEX_LIMIT)), "an escape is out of range")
    per_row = -(-tokens // group)
    unit = Unit.of(per_row)
    found = torch.zeros(2, dtype=torch.int32, device=out.device)
    block_d = power_of_two(spec.head_dim, most=BLOCK_CHANNELS)
    span, block_t = (tokens, BLOCK_TOKENS) if radix == 1 else (unit.size, BLOCK_TOKENS_REFINING)
    dequantize_entropy_kernel[triton.cdiv(span, block_t), spec.heads * triton.cdiv(spec.head_dim, block_d)](
        on_device(anchor[:count], out.device),
        on_device(residual if residual is not None else anchor[:0], out.device),
        _rows(tables, out.device),
        on_device(tables.mean, out.device),
        stored_as(out),
        found,
        float(tables.step if residual is None else tables.half_step),
        tokens,
        per_row,
        unit.blocks,
        spec.channels,
        spec.head_dim,
        **place_of(out),
        RADIX=radix,
        GROUP=group,
        BITS=bits,
        LIMIT=radix**group,
        KIND=kind,
        ALIGN=unit.align,
        BLOCK_T=block_t,
        BLOCK_D=block_d,
        **EXACT,
    )
    seen, forbidden = found.tolist()
    require(seen == len(positions), "escapes are not at the escape symbols")
    require(forbidden == 0, "a residual code or its padding is out of range")
    if positions.size:
        _patch(positions, escapes["value"], residual, coding, tables, spec, dtype, out)


def _patch(
    positions: npt.NDArray[np.int64],
    values: npt.NDArray[np.int32],
    residual: U8 | None,
    coding: EntropyCoding,
    tables: EntropyTables,
    spec: TensorSpec,
    dtype: str,
    out: Out,
) -> None:
    """Values of the escapes, few as they are, worked out on the host."""
    tokens = out.shape[1]
    row, token = positions // tokens, positions % tokens
    index, step = values.astype(np.int64), tables.step
    if residual is not None:
        digits = unpack_digits(residual, spec.channels, tokens, coding.radix)[row, token].astype(np.int64)
        index, step = 2 * (index * coding.radix + digits) - (coding.radix - 1), tables.half_step
    channel = tables.order.astype(np.int64)[row]
    value = torch.from_numpy(index.astype(np.float32)) * float(step)
    value = value + torch.from_numpy(tables.mean[channel])
    head, d = (torch.from_numpy(part).to(out.device) for part in np.divmod(channel, spec.head_dim))
    at = torch.from_numpy(token).to(out.device)
    scatter(out, head, at, d, round_to(value, dtype).to(out.device, out.dtype))


def quantize_entropy(x: Tensor, coding: EntropyCoding, tables: EntropyTables) -> tuple[U8, U8 | None]:
    """Anchor and residual bytes of x [H, T, D]."""
    heads, tokens, dim = x.shape
    channels, radix = heads * dim, coding.radix
    symbols = torch.empty(channels, tokens, dtype=torch.uint8, device=x.device)
    digits = torch.empty(channels if radix > 1 else 0, tokens, dtype=torch.uint8, device=x.device)
    block_d = power_of_two(dim, most=BLOCK_CHANNELS)
    quantize_entropy_kernel[triton.cdiv(tokens, BLOCK_TOKENS), heads * triton.cdiv(dim, block_d)](
        loaded_as(x),
        _rows(tables, x.device),
        on_device(tables.mean, x.device),
        symbols,
        digits,
        float(tables.step),
        tokens,
        dim,
        x.stride(0),
        x.stride(1),
        RADIX=radix,
        BF16_BITS=x.dtype == torch.bfloat16,
        BLOCK_T=BLOCK_TOKENS,
        BLOCK_D=block_d,
        **EXACT,
    )
    anchor = np.concatenate([on_host(symbols), _escapes(x, symbols, tables)])
    if radix == 1:
        return anchor, None
    group, bits = radix_group(radix)
    return anchor, on_host(pack(digits, bits, radix=radix, group=group))


def pack(digits: Tensor, bits: int, *, shift: int = 0, radix: int = 1, group: int = 1) -> Tensor:
    """Rows of digits [rows, count] packed: of each code of `group` digits the `bits` above `shift`."""
    rows, count = digits.shape
    per_row = -(-count // group)
    unit = Unit.of(per_row)
    packed = torch.empty(rows * unit.size * bits, dtype=torch.uint8, device=digits.device)
    block_k = power_of_two(unit.size, most=128)
    block_r = 1024 // block_k
    pack_kernel[triton.cdiv(rows, block_r), triton.cdiv(unit.size, block_k)](
        digits,
        packed,
        rows,
        count,
        per_row,
        unit.blocks,
        SHIFT=shift,
        BITS=bits,
        RADIX=radix,
        GROUP=group,
        ALIGN=unit.align,
        BLOCK_R=block_r,
        BLOCK_K=block_k,
    )
    return packed


def _escapes(x: Tensor, symbols: Tensor, tables: EntropyTables) -> U8:
    """Position and index of each symbol that is an escape."""
    row, token = torch.nonzero(symbols == SYMBOL_ESCAPE, as_tuple=True)
    channel = torch.from_numpy(tables.order.astype(np.int64)).to(x.device)[row]
    value = x[channel // x.shape[2], token, channel % x.shape[2]].cpu().to(torch.float32)
    mean = torch.from_numpy(tables.mean)[channel.cpu()]
    pairs = torch.empty(len(value), 2, dtype=torch.int32)
    pairs[:, 0] = (row * symbols.shape[1] + token).cpu().to(torch.int32)
    pairs[:, 1] = torch.round((value - mean) / float(tables.step)).to(torch.int32)
    return on_host(pairs)


def _rows(tables: EntropyTables, device: torch.device) -> Tensor:
    """The row of each channel."""
    order = tables.order.astype(np.int64)
    rows = np.zeros_like(order)
    rows[order] = np.arange(order.size)
    return on_device(rows, device)
