"""The definition of every coding in plain torch: obvious first, fast second (SPEC 8).

`quantize` takes x [H, T, D] and returns the raw bytes of an anchor and a residual segment; `dequantize` takes
those bytes and writes a destination of any float dtype, [H, T, D] or paged. Full precision is `dequantize` with both,
so that refining is decoding again, in place, from resident anchor bytes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lynxkv.errors import ContentError
from lynxkv.exact import pack_exact as pack_exact
from lynxkv.exact import unpack_exact as unpack_exact
from lynxkv.kernels.paged import Out, write
from lynxkv.kernels.rounding import TORCH_DTYPES, round_to
from lynxkv.kernels.tables import ChannelStatistics, EntropyTables, FixedTables, Tables, Transform
from lynxkv.kernels.transform import values_of
from lynxkv.layout import Coding, EntropyCoding, FixedCoding, RawCoding, TensorSpec
from lynxkv.packing import pack_digits, pack_rows, pack_symbols, unpack_digits, unpack_rows, unpack_symbols

U8 = npt.NDArray[np.uint8]


def quantize(x: Tensor, coding: Coding, tables: Tables) -> tuple[U8, U8 | None]:
    """Raw bytes of the anchor and residual segments that hold x [H, T, D], of any float dtype.

    For raw coding x is in the declared dtype.
    """
    if isinstance(coding, RawCoding):
        return _bytes(x.transpose(0, 1)), None
    x = x.to("cpu", torch.float32)
    if isinstance(coding, FixedCoding) and isinstance(tables, FixedTables):
        return quantize_fixed(x, coding, tables)
    if isinstance(coding, EntropyCoding) and isinstance(tables, EntropyTables):
        return quantize_entropy(x, coding, tables)
    raise TypeError(f"{type(tables).__name__} does not go with {type(coding).__name__}")


def dequantize(
    anchor: U8, residual: U8 | None, coding: Coding, tables: Tables, spec: TensorSpec, dtype: str, out: Out
) -> None:
    """Decode a segment into `out` [H, T, D], at anchor precision if `residual` is None.

    Raises:
        ContentError: codes, escapes or parameters that SPEC 8 forbids.
    """
    tokens = out.shape[1]
    if isinstance(coding, RawCoding):
        values = torch.from_numpy(anchor.copy()).view(TORCH_DTYPES[dtype]).view(tokens, spec.heads, spec.head_dim)
        if not torch.isfinite(values).all():
            raise ContentError("raw values are not finite")
        write(out, values.transpose(0, 1))
        return
    if isinstance(coding, FixedCoding) and isinstance(tables, FixedTables):
        values = dequantize_fixed(anchor, residual, coding, tables, spec, tokens)
    elif isinstance(coding, EntropyCoding) and isinstance(tables, EntropyTables):
        values = dequantize_entropy(anchor, residual, coding, tables, spec, tokens)
    else:
        raise TypeError(f"{type(tables).__name__} does not go with {type(coding).__name__}")
    write(out, round_to(values, dtype))


def place_components(
    sums: Tensor,
    tables: EntropyTables,
    transform: Transform,
    spec: TensorSpec,
    step: float,
    dtype: str,
    out: Out,
) -> None:
    """Store the values of sums [blocks, T, n] (SPEC 8.8) in `out` [H, T, D], on any device."""
    write(out, round_to(values_of(sums, tables, transform, spec, step), dtype))


def channel_statistics(x: Tensor) -> ChannelStatistics:
    """Mean, variance and peak of x [H, T, D], any float dtype; sums in f64, so that no square overflows."""
    rows = x.to(torch.float32).transpose(1, 2).reshape(-1, x.shape[1])
    true_mean = rows.mean(1, dtype=torch.float64).to(torch.float32)
    mean = round_to(true_mean, "bf16").to(torch.float32)
    return ChannelStatistics(
        mean=mean.cpu().numpy(),
        variance=(rows - true_mean[:, None]).to(torch.float64).square().mean(1).cpu().numpy(),
        peak=float((rows - mean[:, None]).abs().max()),
    )


# fixed: codes of fixed width (SPEC 8.3)


def quantize_fixed(x: Tensor, coding: FixedCoding, tables: FixedTables) -> tuple[U8, U8 | None]:
    """Normalise pages and chunks by their extremes, then take the code of the bucket each value falls in."""
    edges, buckets = tables.quantiser()
    heads, tokens, dim = x.shape
    rows = x.transpose(0, 1).reshape(tokens, heads * dim)
    parts: list[U8] = []
    normal = rows
    if coding.page_tokens:
        page = _runs(tokens, coding.page_tokens)
        high, low = _extremes(rows, coding.page_tokens)
        mean = _middle(high, low)
        # No negative zero, see _middle.
        scale = torch.maximum(high - mean, mean - low) + 0.0
        parts += [_bytes(mean), _bytes(scale)]
        normal = torch.where(scale[page] > 0, (rows - mean[page]) / scale[page], 0.0)
    chunk = _runs(tokens, coding.chunk_tokens)
    offset_values: Tensor | None = None
    if coding.offset:
        high, low = _extremes(normal, coding.chunk_tokens)
        if coding.group == "token":
            high, low = high.amax(1, keepdim=True), low.amin(1, keepdim=True)
        offset_codes, offset_values = _chunk_parameter(_middle(high, low), tables.offset, round_up=False)
        normal = normal - offset_values[chunk]
    peak, _ = _extremes(normal.abs(), coding.chunk_tokens)
    if coding.group == "token":
        peak = peak.amax(1, keepdim=True)
    scale_codes, scale_values = _chunk_parameter(peak / tables.peak, tables.scale, round_up=True)
    parts.append(scale_codes)
    if coding.offset:
        parts.append(offset_codes)
    unit = torch.where(scale_values[chunk] > 0, normal / scale_values[chunk], 0.0)
    bucket = torch.searchsorted(torch.from_numpy(edges), unit.contiguous(), right=True)
    codes = buckets[bucket.numpy()].reshape(tokens * heads, dim)
    parts.append(pack_rows(codes >> coding.residual_bits, coding.anchor_bits))
    residual = None
    if coding.residual_bits:
        residual = pack_rows(codes & (2**coding.residual_bits - 1), coding.residual_bits)
    return np.concatenate(parts), residual


def dequantize_fixed(
    anchor: U8, residual: U8 | None, coding: FixedCoding, tables: FixedTables, spec: TensorSpec, tokens: int
) -> Tensor:
    """f32 values [H, T, D] of a fixed-rate segment: `fl(fl(V * scale) + offset)`."""
    part, at = {}, 0
    for name, size in coding.parts(tokens, spec).items():
        part[name] = anchor[at : at + size]
        at += size
    chunk = _runs(tokens, coding.chunk_tokens)
    scale = _chunk_values(part["chunk_scale"], tables.scale, coding, spec)[chunk]
    offset = torch.zeros(1)
    if coding.offset:
        offset = _chunk_values(part["chunk_offset"], tables.offset, coding, spec)[chunk]
    if coding.page_tokens:
        page = _runs(tokens, coding.page_tokens)
        page_scale = _floats(part["page_scale"]).view(-1, spec.channels)[page]
        scale = scale * page_scale
        offset = offset * page_scale + _floats(part["page_mean"]).view(-1, spec.channels)[page]
    rows = tokens * spec.heads
    try:
        codes = unpack_rows(part["codes"], rows, spec.head_dim, coding.anchor_bits)
        table = tables.anchor
        if residual is not None and tables.full is not None:
            low = unpack_rows(residual, rows, spec.head_dim, coding.residual_bits)
            codes, table = (codes << np.uint8(coding.residual_bits)) | low, tables.full
    except ValueError as error:
        raise ContentError(str(error)) from error
    value = torch.from_numpy(table[codes]).view(tokens, spec.channels)
    value = value * scale
    value = value + offset
    return value.view(tokens, spec.heads, spec.head_dim).transpose(0, 1)


def _runs(tokens: int, length: int) -> Tensor:
    return torch.arange(tokens) // length


def _extremes(rows: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Largest and smallest value of each channel in each run of `length` tokens: [runs, N] both."""
    whole = rows.shape[0] // length * length
    runs = rows[:whole].view(-1, length, rows.shape[1])
    high, low = runs.amax(1), runs.amin(1)
    if whole < rows.shape[0]:
        rest = rows[whole:]
        high = torch.cat([high, rest.amax(0, keepdim=True)])
        low = torch.cat([low, rest.amin(0, keepdim=True)])
    return high, low


def _middle(high: Tensor, low: Tensor) -> Tensor:
    """Halves first: the sum of two large values would overflow. Adding 0 leaves no negative zero, so that it does not
    matter which of two zeros was found to be an extreme.
    """
    return high / 2 + low / 2 + 0.0


def _chunk_parameter(value: Tensor, table: npt.NDArray[np.float32] | None, *, round_up: bool) -> tuple[U8, Tensor]:
    """Stored bytes of a chunk parameter and the value they decode to; `round_up`: never below `value`."""
    if table is None:
        return _bytes(value), value
    entries = torch.from_numpy(table)
    index = torch.searchsorted(entries, value.contiguous()).clamp_(max=len(table) - 1)
    if not round_up:
        below = (index - 1).clamp_(min=0)
        index = torch.where((value - entries[below]).abs() < (entries[index] - value).abs(), below, index)
    return _bytes(index.to(torch.uint8)), entries[index]


def _chunk_values(data: U8, table: npt.NDArray[np.float32] | None, coding: FixedCoding, spec: TensorSpec) -> Tensor:
    width = spec.channels if coding.group == "channel" else 1
    values = _floats(data) if table is None else torch.from_numpy(table[data])
    return values.view(-1, width)


# entropy: uniform steps, one byte a symbol (SPEC 8.4)


def quantize_entropy(x: Tensor, coding: EntropyCoding, tables: EntropyTables) -> tuple[U8, U8 | None]:
    """q = rint((x - mean) / step); the residual digit is where in the bin x lies. Nothing clips: outliers escape."""
    heads, tokens, dim = x.shape
    order = torch.from_numpy(tables.order.astype(np.int64))
    mean = torch.from_numpy(tables.mean)
    rows = x.transpose(1, 2).reshape(heads * dim, tokens)
    y = ((rows - mean[:, None]) / float(tables.step))[order]
    q = torch.round(y)
    anchor = pack_symbols(q.to(torch.int32).numpy())
    if coding.radix == 1:
        return anchor, None
    digit = torch.floor((y - q + 0.5) * coding.radix).clamp_(0, coding.radix - 1)
    return anchor, pack_digits(digit.to(torch.uint8).numpy(), coding.radix)


def dequantize_entropy(
    anchor: U8,
    residual: U8 | None,
    coding: EntropyCoding,
    tables: EntropyTables,
    spec: TensorSpec,
    tokens: int,
) -> Tensor:
    """f32 values [H, T, D] of an entropy-coded segment."""
    step = tables.step
    try:
        index = unpack_symbols(anchor, spec.channels * tokens)
        if residual is not None:
            digits = unpack_digits(residual, spec.channels, tokens, coding.radix)
            index = 2 * (index * coding.radix + digits.reshape(-1)) - (coding.radix - 1)
            step = tables.half_step
    except ValueError as error:
        raise ContentError(str(error)) from error
    order = torch.from_numpy(tables.order.astype(np.int64))
    value = torch.from_numpy(index).view(spec.channels, tokens).to(torch.float32)
    value = value * float(step)
    value = value + torch.from_numpy(tables.mean)[order, None]
    rows = torch.empty_like(value)
    rows[order] = value
    return rows.view(spec.heads, spec.head_dim, tokens).transpose(1, 2)


def _bytes(tensor: Tensor) -> U8:
    flat: U8 = tensor.contiguous().view(-1).view(torch.uint8).cpu().numpy()
    return flat


def _floats(data: U8) -> Tensor:
    values = torch.from_numpy(data.copy()).view(torch.float32)
    if not torch.isfinite(values).all():
        raise ContentError("page or chunk parameters are not finite")
    return values
