"""Must-reject vectors for SPEC 5.1.3 and 8: values and zstd frames under honest digests."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np

from format_spec.generator.broken import BARE, Hook, Vector, patch, small, small_fixed, split, vector
from format_spec.generator.caches import cache, coding, latent
from format_spec.generator.formulas import Formulas
from format_spec.generator.writer import (
    CacheDraft,
    Draft,
    zstd_frame,
)


def contents() -> Iterator[Vector]:
    """Values that checked bytes must not hold."""

    def escapes(*pairs: tuple[int, int]) -> Hook:
        """Replace the escapes of the first segment."""

        def hook(drafts: list[Draft]) -> None:
            stored = next(draft for draft in drafts if draft.name.endswith(".latent.anchor")).segments[0]
            stored.data = stored.data[:16] + b"".join(struct.pack("<Ii", *pair) for pair in pairs)
            stored.raw_bytes = len(stored.data)

        return hook

    nan, inf = struct.pack("<f", np.nan), struct.pack("<f", -np.inf)
    bf16_nan, bf16_inf, fp16_inf = b"\xc0\x7f", b"\x80\xff", b"\x00\x7c"
    for name, clause, why, hook in (
        ("content-mean-nan", "8.6", "NaN", patch(".latent.mean", 6, bf16_nan)),
        ("content-mean-infinite", "8.6", "-infinity", patch(".latent.mean", 0, bf16_inf)),
        ("content-sink-nan", "8.6", "NaN", patch(".latent.sink", 2, bf16_nan)),
        ("content-sink-infinite", "8.6", "-infinity", patch(".latent.sink", 6, bf16_inf)),
        ("content-step-nan", "8.6", "NaN", patch("steps", 0, nan)),
        ("content-step-infinite", "8.6", "infinity", patch("steps", 4, struct.pack("<f", np.inf))),
        ("content-step-zero", "8.4", "a step of 0", patch("steps", 0, bytes(4))),
        ("content-half-step-zero", "8.4", "a half-step of 0", patch("steps", 4, bytes(4))),
        ("content-step-negative", "8.4", "a negative step", patch("steps", 3, b"\xbd")),
        ("content-order-twice", "8.4", "one channel twice", patch(".latent.order", 2, b"\x00\x00")),
        ("content-order-outside", "8.4", "channel N", patch(".latent.order", 0, b"\x04\x00")),
        ("content-escape-missing", "8.4", "a symbol 255 without escape", patch(".latent.anchor", 5, b"\xff")),
        ("content-escape-without-symbol", "8.4", "no symbol 255", escapes((3, 500))),
    ):
        yield vector(name, clause, why, small(), arrays=hook)

    def two_escapes() -> CacheDraft:
        q = lambda y, t, z: np.where((t == 1) & (y % 2 == 0), 300 + y, t - 2)  # noqa: E731
        own = coding("entropy", radix=1, segment_tokens=4, sink_tokens=1)
        return cache([own], [latent(1, 4)], stop=5, formulas=Formulas(q=q))

    for name, why, pairs in (
        ("content-escape-elsewhere", "at a symbol below 255", ((1, 300), (10, 302))),
        ("content-escapes-too-few", "one escape for two symbols", ((1, 300),)),
        ("content-escapes-too-many", "three escapes for two symbols", ((1, 300), (9, 302), (10, 7))),
        ("content-escapes-decreasing", "positions out of order", ((9, 302), (1, 300))),
        ("content-escapes-twice", "one position twice", ((1, 300), (1, 302))),
        ("content-escape-outside", "a position past the last symbol", ((1, 300), (16, 302))),
        ("content-escape-far-outside", "a position of 2^32 - 1", ((1, 300), (2**32 - 1, 302))),
        ("content-escape-2-18", "2^18", ((1, 2**18), (9, 302))),
        ("content-escape-minus-2-18", "-2^18", ((1, -(2**18)), (9, 302))),
        ("content-escape-minus-2-31", "-2^31, which has no absolute value in i32", ((1, -(2**31)), (9, 302))),
    ):
        yield vector(name, "8.4", why, two_escapes(), arrays=escapes(*pairs))

    # R = 5 in codes of 7 bits; 4 tokens make 2 codes a row: planes of 4, 2 and 1 bytes a row.
    for name, why, hook in (
        # All bits of row 0's first code: the low halves of bytes 0, 16 and 24.
        ("content-residual-code-125", "a code of 127, not below 5^3", ones_in_first_code),
        ("content-residual-digits-past-end", "a digit for token 4 of 4", digit_past_end),
        ("content-residual-codes-past-end", "a third code in a row of two", patch(".latent.residual", 2, b"\x01")),
    ):
        yield vector(name, "8.4", why, split(), role="residual", arrays=hook)

    mixed = [coding("entropy"), coding("raw")]
    layers = [
        {"kind": "full", "tensors": {n: {"heads": 1, "head_dim": 1, "coding": c} for n, c in (("k", 0), ("v", 1))}}
    ]
    hook = patch("steps", 12, struct.pack("<f", 1.0))
    yield vector("content-steps-of-raw", "4.1", "steps for a raw tensor", cache(mixed, layers, stop=1), arrays=hook)

    # An anchor segment of 4 tokens: page mean and scale 12 bytes each, chunk scales and offsets 24 each, then rows.
    for name, clause, why, hook in (
        ("content-codebook-nan", "8.6", "NaN", patch("book.anchor", 8, nan)),
        ("content-page-mean-nan", "8.6", "NaN", patch(".latent.anchor", 4, nan)),
        ("content-page-scale-infinite", "8.6", "-infinity", patch(".latent.anchor", 12, inf)),
        ("content-chunk-scale-nan", "8.6", "NaN", patch(".latent.anchor", 24, nan, segment=1)),
        ("content-chunk-offset-infinite", "8.6", "-infinity", patch(".latent.anchor", 24 + 24 + 20, inf)),
        # D = 3: a row of 4-bit codes is 4 bytes, of which byte 3 holds codes 3 and 7.
        ("content-codes-past-end", "8.1", "code 3 of a row of 3", patch(".latent.anchor", -1, b"\x01")),
    ):
        yield vector(name, clause, why, small_fixed(), arrays=hook)
    hook = patch("book.full", 1020, inf)
    whole = small_fixed(residual_bits=4)
    yield vector("content-codebook-full-infinite", "8.6", "-infinity", whole, arrays=hook)
    hook = patch(".latent.residual", -1, b"\x10")
    name = "content-fixed-residual-codes-past-end"
    yield vector(name, "8.1", "code 7 of a row of 3", small_fixed(residual_bits=4), role="residual", arrays=hook)
    byte = small_fixed(chunk_dtype="u8")
    yield vector("content-scale-book-nan", "8.6", "NaN", byte, arrays=patch("book.scale", 1020, nan))
    byte = small_fixed(chunk_dtype="u8")
    yield vector("content-offset-book-infinite", "8.6", "-infinity", byte, arrays=patch("book.offset", 0, inf))
    unused = cache([coding("raw"), coding("fixed", residual_bits=0, chunk_dtype="f32")], [latent(1, 1)], stop=1)
    hook = patch("book.anchor", 0, nan)
    yield vector("content-codebook-unused-nan", "8.6", "NaN in a codebook nothing uses", unused, arrays=hook)
    for dtype, data in (("bf16", bf16_nan), ("fp16", fp16_inf), ("fp32", nan)):
        plain = cache([coding("raw", segment_tokens=2)], [latent(1, 2)], stop=5, dtype=dtype)
        hook = patch(".latent.raw", 0, data, segment=1)
        yield vector(f"content-raw-{dtype}", "8.6", "not finite", plain, arrays=hook)


def ones_in_first_code(drafts: list[Draft]) -> None:
    """Set every bit of the first code of the first residual segment."""
    raw = bytearray(drafts[0].segments[0].data)
    raw[0] |= 0x0F
    raw[4 * 4] |= 0x03
    raw[4 * 6] |= 0x01
    drafts[0].segments[0].data = bytes(raw)


def digit_past_end(drafts: list[Draft]) -> None:
    """Codes of 4 tokens hold digits (0, 2, 4) and (1, 3, 5): add digit 4, worth 25, to a code that leaves room."""
    raw = bytearray(drafts[0].segments[0].data)
    # The first code is d[0] + 5 * d[2]; write 25 = 0b0011001 over it.
    raw[0] = raw[0] & 0xF0 | 0b0011
    raw[16] = raw[16] & 0xFC | 0b00
    raw[24] = raw[24] & 0xFE | 0b1
    drafts[0].segments[0].data = bytes(raw)


def frames() -> Iterator[Vector]:
    """Frames whose digest is right and whose content is not."""

    def first(change: Hook) -> CacheDraft:
        def compress(part: str, number: int, raw: bytes) -> bytes | None:
            return change(raw) if part == "anchor" and number == 0 else None

        own = coding("entropy", radix=1, segment_tokens=4)
        return cache([own], [latent(1, 4)], stop=5, compress=compress, identity=BARE)

    def no_size(raw: bytes) -> bytes:
        frame = zstd_frame(raw, size_bytes=4, window_log=10)
        return frame[:4] + b"\x00" + frame[5:6] + frame[10:]

    def with_dictionary(raw: bytes) -> bytes:
        frame = zstd_frame(raw)
        return frame[:4] + bytes([frame[4] | 1]) + b"\x07" + frame[5:]

    def bad_checksum(raw: bytes) -> bytes:
        frame = zstd_frame(raw)
        return frame[:4] + bytes([frame[4] | 4]) + frame[5:] + b"\x00\x01\x02\x03"

    skippable = b"\x50\x2a\x4d\x18" + struct.pack("<I", 4) + bytes(4)
    for name, why, change in (
        ("content-zstd-not-a-frame", "no zstd frame", lambda raw: b"not a zstd frame"),
        ("content-zstd-cut", "the last byte is missing", lambda raw: zstd_frame(raw)[:-1]),
        ("content-zstd-without-content-size", "no content size", no_size),
        ("content-zstd-smaller-than-stated", "fewer bytes than stated", lambda raw: zstd_frame(raw[:-1], stated=16)),
        ("content-zstd-size-not-raw-bytes", "the size is not raw_bytes", lambda raw: zstd_frame(raw + bytes(8))),
        ("content-zstd-bomb", "states 16 bytes, is 64 KiB", lambda raw: zstd_frame(bytes(1 << 16), stated=16)),
        ("content-zstd-window", "16 MiB", lambda raw: zstd_frame(raw, size_bytes=4, window_log=24)),
        ("content-zstd-dictionary", "a dictionary", with_dictionary),
        ("content-zstd-checksum", "a wrong checksum", bad_checksum),
        ("content-zstd-two-frames", "two frames", lambda raw: zstd_frame(raw) + zstd_frame(raw)),
        ("content-zstd-bytes-after", "a byte after the frame", lambda raw: zstd_frame(raw) + b"\x00"),
        ("content-zstd-skippable-first", "a skippable frame", lambda raw: skippable + zstd_frame(raw)),
        ("content-zstd-skippable-last", "a skippable frame", lambda raw: zstd_frame(raw) + skippable),
    ):
        yield vector(name, "5.1.3", why, first(change))
    empty = first(lambda raw: b"")
    yield vector("header-zstd-empty", "5.1", "no stored bytes", empty)
