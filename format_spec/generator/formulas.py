"""Tensors by formula for the test vectors: codes, steps, means and tables are small integer formulas of their indices.

Nothing here quantises. What a tensor decodes to is computed beside its bytes from the same numbers, so that the
expected values owe nothing to any reader. SPEC section 8.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from format_spec.generator.bases import Basis
from format_spec.generator.writer import RADIX_GROUPS, Document, Draft, Stored, digit_codes, pack, typed

Ints = npt.NDArray[np.int64]
F32 = npt.NDArray[np.float32]
Bits = npt.NDArray[np.uint16]
Formula = Callable[..., Any]
STORED_DTYPE = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}


@dataclass(frozen=True, kw_only=True)
class Formulas:
    """y: stored row, x: channel, t: coded token, i: table index, p: page, c: chunk, z: number of the tensor.

    `correction` is the number z of SPEC 8.7 before sorting, modulo 2^16; where it leads to no finite value, 0 is taken.
    """

    q: Formula = lambda y, t, z: (7 * t + 3 * y + 5 * z) % 11 - 5
    digit: Formula = lambda y, t, z, radix: (3 * t + 5 * y + t * y + z) % radix
    mean: Formula = lambda x, z: (x % 7 - 3) * 0.125
    steps: Formula = lambda z, radix: (0.0625 * (z + 1), 0.0625 * (z + 1) / (2 * radix))
    escaped: Formula = lambda q, y, t: (q < -127) | (q > 127)
    code: Formula = lambda x, t, z: 5 * t + 3 * x + t * x + z
    book: Formula = lambda i, size: (2 * i + 1 - size) / size
    page_mean: Formula = lambda x, p: (x % 5 - 2) * 0.25 + p
    page_scale: Formula = lambda x, p: 1 + (x + p) % 3 * 0.5
    chunk_scale: Formula = lambda x, c: 0.5 + (c + x) % 4 * 0.125
    chunk_offset: Formula = lambda x, c: ((3 * c + x) % 7 - 3) * 0.0625
    chunk_index: Formula = lambda x, c: (37 * c + 11 * x + 5) % 256
    scale_book: Formula = lambda i: (i + 1) / 64
    offset_book: Formula = lambda i: (i - 128) / 64
    correction: Formula = lambda x, t, z: (5 * t + 3 * x + t * x + z) % 13
    logit: Formula = lambda i: (37 * i % 256 - 128) / 32


Compress = Callable[[str, int, bytes], bytes | None]


def stored_raw(part: str, number: int, raw: bytes) -> bytes | None:
    """Leave every segment uncompressed."""


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """What the formulas of one tensor need to know."""

    z: int
    key: str
    heads: int
    head_dim: int
    coding: Document
    coded: int
    dtype: str
    formulas: Formulas
    compress: Compress
    first: int = 0
    basis: Basis | None = None

    @property
    def channels(self) -> int:
        """N = H * D."""
        return self.heads * self.head_dim

    def segments(self) -> list[tuple[int, int]]:
        """(first token, tokens) of each segment."""
        step = self.coding["segment_tokens"]
        return [(first, min(step, self.coded - first)) for first in range(0, self.coded, step)]

    def stored(self, part: str, segments: list[bytes]) -> Draft:
        """A packed array of these segments, compressed where `compress` says so."""
        out = []
        for number, (raw, (first, _)) in enumerate(zip(segments, self.segments(), strict=True)):
            frame = self.compress(part, number, raw)
            out.append(
                Stored(
                    data=raw if frame is None else frame,
                    raw_bytes=len(raw),
                    first_token=first,
                    compression=0 if frame is None else 1,
                )
            )
        return Draft(name=f"{self.key}.{part}", dtype="U8", shape=[], segments=out, packed=True)


@dataclass(frozen=True, kw_only=True)
class Decoded:
    """Arrays of one tensor and what they decode to, bits [coded tokens, N]."""

    anchor: list[Draft]
    residual: Draft | None
    steps: tuple[float, float]
    at_anchor: npt.NDArray[Any]
    at_full: npt.NDArray[Any]


def book(formulas: Formulas, bits: int) -> F32:
    """A table of 2^bits code values."""
    return f32(formulas.book(np.arange(2**bits), 2**bits))


def over(value: Any, *indices: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A formula's value at every combination of its indices, also those it does not use."""
    return np.broadcast_to(value, np.broadcast_shapes(*(index.shape for index in indices)))


def f32(values: Any) -> F32:
    """As f32, one rounding."""
    return np.asarray(values, np.float32)


def plain_values(dtype: str, shape: tuple[int, ...], z: int) -> npt.NDArray[Any]:
    """Sink and raw values: multiples of 1/32 in [-4, 4), exact in every dtype."""
    count = int(np.prod(shape))
    values = f32(((np.arange(count) * 37 + z) % 256 - 128) / 32).reshape(shape)
    return values if dtype == "fp32" else to_bits(values, dtype)


def to_bits(values: F32, dtype: str) -> Bits:
    """SPEC 8.5 by comparing neighbours: the nearer of the two numbers around each value, ties to the even one."""
    with np.errstate(over="ignore", invalid="ignore"):
        if dtype == "fp16":
            most = np.float32(65504)
            bits = np.clip(values, -most, most).astype(np.float16).view(np.uint16)
        else:
            below = (np.ascontiguousarray(values).view(np.uint32) >> 16).astype(np.uint16)
            above = below + np.uint16(1)
            exact = values.astype(np.float64)
            down, up = np.abs(exact - bf16(below)), np.abs(exact - bf16(above))
            odd_tie = (down == up) & (below % 2 == 1)
            bits = np.where((up < down) | odd_tie, above, below)
            bits = np.where((bits & 0x7FFF) >= 0x7F80, (bits & 0x8000) | 0x7F7F, bits)
    return np.where(np.isnan(values), 0, bits).astype(np.uint16)


def bf16(bits: Bits) -> npt.NDArray[np.float64]:
    """The values of bf16 bits; what follows the largest finite one counts as 2^128."""
    magnitude = (bits & 0x7FFF).astype(np.float64)
    exponent = np.maximum(magnitude // 128, 1)
    significand = magnitude % 128 + np.where(magnitude >= 128, 128, 0)
    values: npt.NDArray[np.float64] = np.where(bits >= 0x8000, -1.0, 1.0) * significand * np.exp2(exponent - 134)
    return values


def raw(tensor: Tensor) -> Decoded:
    """SPEC 8.2."""
    shape = (tensor.coded, tensor.heads, tensor.head_dim)
    values = plain_values(tensor.dtype, shape, tensor.z + 1)
    data = values.astype("<f4" if tensor.dtype == "fp32" else "<u2")
    segments = []
    for first, t in tensor.segments():
        part = data[first : first + t].tobytes()
        segments.append(Stored(data=part, raw_bytes=len(part), first_token=first))
    draft = Draft(name=f"{tensor.key}.raw", dtype=STORED_DTYPE[tensor.dtype], shape=list(shape), segments=segments)
    return Decoded(anchor=[draft], residual=None, steps=(0.0, 0.0), at_anchor=values, at_full=values)


def fixed(tensor: Tensor) -> Decoded:
    """SPEC 8.3."""
    own, make, n = tensor.coding, tensor.formulas, tensor.channels
    a, r, pages, chunks = own["anchor_bits"], own["residual_bits"], own["page_tokens"], own["chunk_tokens"]
    t, x = np.arange(tensor.coded)[:, None], np.arange(n)[None, :]
    whole = over(make.code(x, t, tensor.z), x, t) % 2 ** (a + r)
    codes, more = whole >> r, whole & (2**r - 1)
    g = x if own["group"] == "channel" else np.zeros((1, 1), np.int64)

    def chunk(name: str, at: Ints) -> tuple[npt.NDArray[Any], F32]:
        """Stored form and values of the chunk parameter `name` of the chunks `at`."""
        if own["chunk_dtype"] == "u8":
            index = over(make.chunk_index(g, at + (name == "offset")), g, at).astype(np.uint8)
            table = f32((make.scale_book if name == "scale" else make.offset_book)(np.arange(256)))
            return index, table[index]
        values = f32(over((make.chunk_scale if name == "scale" else make.chunk_offset)(g, at), g, at))
        return values.astype("<f4"), values

    anchors, residuals = [], []
    for first, count in tensor.segments():
        rows = slice(first, first + count)
        parts = b""
        if pages:
            p = np.arange(first // pages, -(-(first + count) // pages))[:, None]
            for formula in (make.page_mean, make.page_scale):
                parts += over(formula(x, p), x, p).astype("<f4").tobytes()
        c = np.arange(first // chunks, -(-(first + count) // chunks))[:, None]
        for name in ("scale", "offset") if own["offset"] else ("scale",):
            parts += chunk(name, c)[0].tobytes()
        shape = (count * tensor.heads, tensor.head_dim)
        anchors.append(parts + pack(codes[rows].reshape(shape), a))
        residuals.append(pack(more[rows].reshape(shape), r) if r else b"")
    scale = chunk("scale", t // chunks)[1]
    offset = chunk("offset", t // chunks)[1] if own["offset"] else np.float32(0)
    with np.errstate(over="ignore", invalid="ignore"):
        if pages:
            mu, sigma = f32(make.page_mean(x, t // pages)), f32(make.page_scale(x, t // pages))
            scale, offset = scale * sigma, offset * sigma + mu
        at_anchor = to_bits(book(make, a)[codes] * scale + offset, tensor.dtype)
        at_full = to_bits(book(make, a + r)[whole] * scale + offset, tensor.dtype)
    has_residual = r > 0 and tensor.coded > 0
    return Decoded(
        anchor=[tensor.stored("anchor", anchors)] if tensor.coded else [],
        residual=tensor.stored("residual", residuals) if has_residual else None,
        steps=(0.0, 0.0),
        at_anchor=at_anchor,
        at_full=at_full if has_residual else at_anchor,
    )


def entropy(tensor: Tensor) -> Decoded:
    """SPEC 8.4."""
    make, n, radix = tensor.formulas, tensor.channels, tensor.coding["radix"]
    y, t = np.arange(n)[:, None], np.arange(tensor.coded)[None, :]
    q = over(make.q(y, t, tensor.z), y, t).astype(np.int64)
    digits = over(make.digit(y, t, tensor.z, radix), y, t).astype(np.int64)
    escaped = make.escaped(q, y, t)
    step, half_step = (np.float32(value) for value in make.steps(tensor.z, radix))
    multiplier = next(m for m in (3, 5, 7, 11, 1) if np.gcd(m, n) == 1)
    order = (multiplier * np.arange(n) + tensor.z) % n
    mean = to_bits(f32(make.mean(np.arange(n), tensor.z)), "bf16")
    mean_values = f32(bf16(mean)) * f32(1)
    mean_values = np.where(mean == 0x8000, np.float32(-0.0), mean_values)
    anchors, residuals = [], []
    for first, count in tensor.segments():
        columns = slice(first, first + count)
        part, out = q[:, columns].reshape(-1), escaped[:, columns].reshape(-1)
        symbols = np.where(out, 255, part + 127).astype(np.uint8)
        escapes = np.zeros(int(out.sum()), np.dtype([("position", "<u4"), ("value", "<i4")]))
        escapes["position"], escapes["value"] = np.flatnonzero(out), part[out]
        anchors.append(symbols.tobytes() + escapes.tobytes())
        if radix > 1:
            residuals.append(pack(digit_codes(digits[:, columns], radix), RADIX_GROUPS[radix][1]))
    values = {}
    for precision, factors, factor in (
        ("anchor", q, step),
        ("full", 2 * (q * radix + digits) - (radix - 1), half_step),
    ):
        by_channel = np.zeros((tensor.coded, n), np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            if tensor.basis is not None:
                by_channel = transformed(tensor, tensor.basis, order, factors, factor, mean_values)
            else:
                by_channel[:, order] = (f32(factors) * factor + mean_values[order][:, None]).T
        values[precision] = to_bits(by_channel, tensor.dtype)
    has_residual = radix > 1 and tensor.coded > 0
    side = [
        typed(f"{tensor.key}.mean", "BF16", mean.reshape(tensor.heads, tensor.head_dim)),
        typed(f"{tensor.key}.order", "U16", order),
    ]
    return Decoded(
        anchor=[*side, tensor.stored("anchor", anchors)] if tensor.coded else [],
        residual=tensor.stored("residual", residuals) if has_residual else None,
        steps=(float(step), float(half_step)) if tensor.coded else (0.0, 0.0),
        at_anchor=values["anchor"],
        at_full=values["full"] if has_residual else values["anchor"],
    )


def transformed(
    tensor: Tensor, basis: Basis, order: Ints, factors: Ints, factor: np.float32, mean: npt.NDArray[Any]
) -> F32:
    """SPEC 8.8: values [coded tokens, N] from the whole numbers of components, a token and a channel at a time."""
    rows = basis.matrix(tensor.channels, tensor.z).astype(np.int64)
    n = rows.shape[1]
    component = np.zeros((tensor.coded, tensor.channels), np.int64)
    component[:, order] = factors.T
    sums = np.zeros_like(component)
    for channel in range(tensor.channels):
        block, c = divmod(channel, n)
        for y in range(n):
            sums[:, channel] += component[:, block * n + y] * rows[block, y, c]
    value = sums.astype(np.float32) * factor + f32(mean)
    turned = basis.turned(
        value.reshape(tensor.coded, tensor.heads, tensor.head_dim), tensor.key.split(".")[2], tensor.first
    )
    return turned.reshape(tensor.coded, tensor.channels)


def exact(tensor: Tensor, full: Bits) -> tuple[Draft, Bits]:
    """SPEC 8.7, one number at a time: the array, and what it makes of the full values [coded tokens, N]."""
    t, x = np.arange(tensor.coded)[:, None], np.arange(tensor.channels)[None, :]
    wanted = over(tensor.formulas.correction(x, t, tensor.z), x, t).astype(np.int64) % 2**16
    lowest_exponent_bit, exponents = {"bf16": (7, 256), "fp16": (10, 32)}[tensor.dtype]
    original = full.copy()
    segments = []
    for first, count in tensor.segments():
        by_exponent: list[list[int]] = [[] for _ in range(exponents)]
        for head in range(tensor.heads):
            for token in range(first, first + count):
                for channel in range(head * tensor.head_dim, (head + 1) * tensor.head_dim):
                    before, z = int(full[token, channel]), int(wanted[token, channel])
                    after = corrected(before, z)
                    if (after >> lowest_exponent_bit) % exponents == exponents - 1:
                        z, after = 0, before
                    original[token, channel] = after
                    by_exponent[(before >> lowest_exponent_bit) % exponents].append(z)
        in_order = [z for same_exponent in by_exponent for z in same_exponent]
        segments.append(bytes(z % 256 for z in in_order) + bytes(z // 256 for z in in_order))
    return tensor.stored("exact", segments), original


def corrected(bits: int, z: int) -> int:
    """The pattern that z leads to from `bits`: |s| steps up or down the ring of the 2^16 patterns in their order."""
    s = z // 2 if z % 2 == 0 else -(z + 1) // 2
    # In rising order the patterns are 0xFFFF down to 0x8000, then 0 up to 0x7FFF.
    place = (bits + 0x8000 if bits < 0x8000 else 0xFFFF - bits) + s
    place %= 0x10000
    return place - 0x8000 if place >= 0x8000 else 0xFFFF - place
