"""Launchers of the fixed-rate kernels: shapes, checks, grids."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
from torch import Tensor

from lynxkv.kernels.paged import Out
from lynxkv.kernels.tables import F32, FixedTables
from lynxkv.kernels.triton.fixed import dequantize_fixed_kernel, quantize_fixed_kernel, quantize_token_kernel
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
from lynxkv.kernels.triton.launch_entropy import pack
from lynxkv.layout import FixedCoding, TensorSpec

# Elements of a tile: eight for each of 128 threads, one 16-byte store of 16-bit floats.
BLOCK_ELEMENTS = 1024


def dequantize_fixed(
    anchor: U8,
    residual: U8 | None,
    coding: FixedCoding,
    tables: FixedTables,
    spec: TensorSpec,
    out: Out,
    kind: Any,
) -> None:
    """Decode a segment into `out` [H, T, D], whose elements are what `kind` says.

    Raises:
        ContentError: as the reference; the segment may have been written in part.
    """
    tokens, device = out.shape[1], out.device
    sizes = coding.parts(tokens, spec)
    require(anchor.size == sum(sizes.values()), "an anchor segment has another size")
    edges = np.cumsum([0, *sizes.values()])
    part = {name: anchor[start:stop] for name, start, stop in zip(sizes, edges[:-1], edges[1:], strict=True)}
    low_bits = coding.residual_bits if residual is not None and tables.full is not None else 0
    book = tables.full if low_bits and tables.full is not None else tables.anchor
    require(book.size >= 1 << (coding.anchor_bits + low_bits), "a codebook is too small")
    require(
        not low_bits or (residual is not None and residual.size == coding.residual_bytes(tokens, spec)),
        "a residual segment has another size",
    )
    unit = Unit.of(spec.head_dim)
    block_k = power_of_two(unit.size)
    block_t = max(1, BLOCK_ELEMENTS // block_k)
    found = torch.zeros(2, dtype=torch.int32, device=device)
    dequantize_fixed_kernel[triton.cdiv(tokens, block_t), spec.heads](
        on_device(part["codes"], device),
        on_device(residual if low_bits and residual is not None else anchor[:0], device),
        on_device(book, device),
        _parameter(part["chunk_scale"], tables.scale, device),
        _table(tables.scale, device),
        _parameter(part["chunk_offset"], tables.offset, device),
        _table(tables.offset, device),
        _parameter(part["page_scale"], None, device),
        _parameter(part["page_mean"], None, device),
        stored_as(out),
        found,
        tokens,
        spec.heads,
        spec.head_dim,
        unit.blocks,
        **place_of(out),
        BITS=coding.anchor_bits,
        LOW_BITS=low_bits,
        CHUNK=coding.chunk_tokens,
        PAGE=coding.page_tokens,
        SHARED=coding.group == "token",
        U8=tables.scale is not None,
        OFFSET=coding.offset,
        KIND=kind,
        ALIGN=unit.align,
        BLOCK_T=block_t,
        BLOCK_K=block_k,
        **EXACT,
    )
    require(found.tolist()[1] == 0, "padding codes are not zero")


def can_quantize(coding: FixedCoding) -> bool:
    """Whether there is a kernel: chunks that share parameters among channels are single tokens with f32 parameters."""
    return coding.group == "channel" or (
        coding.chunk_tokens == 1 and not coding.page_tokens and coding.chunk_dtype == "f32"
    )


def quantize_fixed(x: Tensor, coding: FixedCoding, tables: FixedTables) -> tuple[U8, U8 | None]:
    """Anchor and residual bytes of x [H, T, D]."""
    heads, tokens, dim = x.shape
    device = x.device
    sizes = coding.parts(tokens, TensorSpec(heads=heads, head_dim=dim, coding=0))
    part = {name: torch.empty(size, dtype=torch.uint8, device=device) for name, size in sizes.items()}
    u8 = coding.chunk_dtype == "u8"
    scales, offsets = (part[name] if u8 else part[name].view(torch.float32) for name in ("chunk_scale", "chunk_offset"))
    edges, buckets = tables.quantiser()
    all_edges = np.full(255, np.inf, np.float32)
    all_edges[: edges.size] = edges
    all_buckets = np.zeros(256, np.uint8)
    all_buckets[: buckets.size] = buckets
    search = (on_device(all_edges, device), on_device(all_buckets, device))
    codes = torch.empty(tokens * heads, dim, dtype=torch.uint8, device=device)
    strides = (x.stride(0), x.stride(1))
    if coding.group == "token":
        quantize_token_kernel[(tokens,)](
            loaded_as(x),
            codes,
            scales,
            offsets,
            *search,
            float(tables.peak),
            heads,
            dim,
            *strides,
            BF16_BITS=x.dtype == torch.bfloat16,
            BLOCK_H=power_of_two(heads),
            BLOCK_D=power_of_two(dim),
            OFFSET=coding.offset,
            **EXACT,
        )
    else:
        chunks = max(1, coding.page_tokens // coding.chunk_tokens)
        block_n, block_c = power_of_two(chunks), power_of_two(coding.chunk_tokens)
        block_d = power_of_two(dim, most=max(1, min(32, 8192 // (block_n * block_c))))
        grid = (triton.cdiv(tokens, chunks * coding.chunk_tokens), heads * triton.cdiv(dim, block_d))
        quantize_fixed_kernel[grid](
            loaded_as(x),
            codes,
            scales,
            _table(tables.scale, device),
            offsets,
            _table(tables.offset, device),
            part["page_scale"].view(torch.float32),
            part["page_mean"].view(torch.float32),
            *search,
            float(tables.peak),
            tokens,
            heads,
            dim,
            *strides,
            CHUNK=coding.chunk_tokens,
            CHUNKS=chunks,
            PAGE=coding.page_tokens,
            U8=u8,
            OFFSET=coding.offset,
            BF16_BITS=x.dtype == torch.bfloat16,
            BLOCK_N=block_n,
            BLOCK_C=block_c,
            BLOCK_D=block_d,
            **EXACT,
        )
    part["codes"] = pack(codes, coding.anchor_bits, shift=coding.residual_bits)
    anchor = np.concatenate([on_host(data) for data in part.values()])
    return anchor, on_host(pack(codes, coding.residual_bits)) if coding.residual_bits else None


def _parameter(stored: U8, table: F32 | None, device: torch.device) -> Tensor:
    """Parameters as they are stored, checked where they are f32."""
    if table is not None:
        return on_device(stored, device)
    values = np.array(stored).view("<f4")
    require(bool(np.isfinite(values).all()), "page or chunk parameters are not finite")
    return on_device(values, device)


def _table(values: F32 | None, device: torch.device) -> Tensor:
    """A table of 8-bit parameters; without one something that is never read."""
    return on_device(values if values is not None else np.zeros(1, np.float32), device)
