"""Must-reject vectors for SPEC 8.7 and 9.3: exact arrays and logits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from format_spec.generator.broken import (
    BARE,
    Hook,
    Vector,
    array_start,
    change,
    drop,
    entry,
    flip,
    inside,
    named,
    patch,
    put,
    small,
    split,
    swap,
    vector,
    without,
)
from format_spec.generator.caches import cache, coding, digest, latent, layer
from format_spec.generator.formulas import Formulas
from format_spec.generator.writer import CacheDraft, Draft, Stored, typed, zstd_frame


def exact() -> CacheDraft:
    """One tensor with residual codes and exact arrays, three segments each: entries 0 to 2 and 3 to 5 of the index."""
    return split(radix=2, exact=True)


def exact_arrays() -> Iterator[Vector]:
    """Arrays, index entries and what the Anchor says of them."""
    pair = split(layer, radix=2, exact=True)
    spare = Draft(name="layer.0.latent.exact", dtype="U8", shape=[], segments=[], packed=True)
    spare.segments = [
        Stored(data=bytes(size), raw_bytes=size, first_token=4 * i) for i, size in enumerate((32, 32, 16))
    ]
    for name, clause, why, draft, hook in (
        ("order", "4.6", "V before K", pair, swap(".k.exact", ".v.exact")),
        ("before-residual", "4.6", "an exact array before residual codes", exact(), swap(".exact", ".residual")),
        ("array-missing", "4.7", "no exact array", exact(), drop(".exact")),
        ("not-called-for", "4.7", "exact arrays though `exact` is false", split(), lambda all: all.append(spare)),
        ("of-another-dtype", "4.1", "U16", exact(), change(".exact", dtype="U16", shape=[96])),
        ("of-two-dimensions", "4.1", "a matrix", exact(), change(".exact", shape=[3, 64])),
        ("segment-missing", "5.1", "two segments instead of three", exact(), lambda all: all[1].segments.pop()),
    ):
        yield vector(f"header-exact-{name}", clause, why, draft, role="residual", arrays=hook)
    for name, why, hook in (
        ("raw-bytes", "8 raw bytes more than 2 * H * t * D", entry(3, raw_bytes=8, compression=1)),
        ("raw-too-few", "2 raw bytes fewer than 2 * H * t * D", entry(3, raw_bytes=-2, compression=1)),
        ("first-token", "another token", entry(4, first_token=1)),
    ):
        yield vector(f"header-exact-index-{name}", "5.1", why, exact(), role="residual", index=hook)

    for name, why, draft, size in (
        ("too-many", "64 bytes too many", exact(), lambda bytes_: bytes_ + 64),
        ("too-few", "64 bytes too few", exact(), lambda bytes_: bytes_ - 64),
        ("none", "0 though there are exact arrays", exact(), lambda bytes_: 0),
        ("without-array", "64 though there are no exact arrays", split(), lambda bytes_: 64),
    ):
        made = vector(
            f"header-exact-bytes-{name}", "6", f"exact_bytes: {why}", draft, document=named("exact_bytes", size)
        )
        yield replace(made, precision="full")
    why = "the field residual.exact_bytes is missing"
    yield vector("header-without-residual-exact_bytes", "6", why, split(), document=without("residual.exact_bytes"))
    why = "no Residual though a coding has exact arrays"
    yield vector("header-residual-null-for-exact", "6", why, small(exact=True), document=put(residual=None))
    residual = {"header_sha256": digest(8), "name": f"residual-{digest(8)[:16]}.safetensors"}
    sinks = cache([coding("entropy", exact=True, sink_tokens=4)], [latent(1, 1)], stop=1, identity=BARE)
    hook = put(residual=residual | {"header_bytes": 640, "bytes": 1024, "exact_bytes": 64})
    yield vector("header-residual-of-sinks", "6", "a Residual though no token is coded", sinks, document=hook)


def exact_contents() -> Iterator[Vector]:
    """Faults that a reader meets at exact precision only."""
    at = array_start("layer.0.latent.exact", 64)(exact(), "residual")
    made = vector("checksum-exact", "5.2", "a bit of the second segment", exact(), role="residual", data=flip(at))
    yield replace(made, precision="exact")
    name = "content-exact-zeros-after-segment"
    made = vector(name, "5.1", "a bit between two segments", exact(), role="residual", data=flip(at - 1))
    yield replace(made, precision="exact", unread=True)

    # Every full value is 1, 0x3F80 or 0x3C00: the numbers z are stored in the order [H, t, D].
    for name, dtype, z in (
        ("infinite-bf16", "bf16", 2 * (0x7F80 - 0x3F80)),
        ("nan-bf16", "bf16", 2 * (0x7FFF - 0x3F80)),
        # From 1 down to -infinity are more than 2^15 steps: s wraps around.
        ("minus-infinity-bf16", "bf16", 2 * (0x7FFF - 0xFF80 - 0x3F80 + 0x10000)),
        ("infinite-fp16", "fp16", 2 * (0x7C00 - 0x3C00)),
        ("minus-nan-fp16", "fp16", 2 * (0x7FFF - 0xFC01 - 0x3C00 + 0x10000)),
    ):

        def one_correction(drafts: list[Draft], z: int = z) -> None:
            patch(".exact", 4, bytes([z % 256]), segment=1)(drafts)
            patch(".exact", 4 + 12, bytes([z // 256]), segment=1)(drafts)

        made = vector(
            f"content-exact-{name}",
            "8.7",
            f"z = {z} leads from 1 to no finite value",
            ones(dtype),
            role="residual",
            arrays=one_correction,
        )
        yield replace(made, precision="exact", decoded=True)

    for name, why, frame in (
        ("not-a-frame", "no zstd frame", lambda raw: b"not a zstd frame"),
        ("cut", "the last byte is missing", lambda raw: zstd_frame(raw)[:-1]),
        ("size-not-raw-bytes", "the size is not raw_bytes", lambda raw: zstd_frame(raw + bytes(2))),
    ):

        def compress(part: str, number: int, raw: bytes, frame: Hook = frame) -> Any:
            return frame(raw) if part == "exact" and number == 1 else None

        own = coding("entropy", exact=True, segment_tokens=4)
        draft = cache([own], [latent(1, 4)], stop=11, compress=compress, identity=BARE)
        made = vector(f"content-exact-zstd-{name}", "5.1.3", why, draft, role="residual")
        yield replace(made, precision="exact")


def ones(dtype: str) -> CacheDraft:
    """Full values of 1 alone, in two segments of 4 tokens of 3 channels."""
    own = coding(
        "fixed",
        anchor_bits=1,
        residual_bits=1,
        chunk_dtype="f32",
        page_tokens=0,
        segment_tokens=4,
        offset=False,
        exact=True,
    )
    formulas = Formulas(book=lambda i, size: 1.0 + 0 * i, chunk_scale=lambda x, c: 1.0, correction=lambda x, t, z: 0)
    return cache([own], [latent(1, 3)], stop=8, dtype=dtype, formulas=formulas, identity=BARE)


def logits() -> Iterator[Vector]:
    """SPEC 9.3: the array and the document's field, one without the other or of another size, and their values."""
    three = typed("logits", "F32", np.zeros(3, np.float32))
    for name, clause, why, hook in (
        ("missing", "4.7", "three logits said to be there", drop("logits")),
        ("order", "4.6", "logits before steps", swap("steps", "logits")),
        ("after-layers", "4.6", "logits after the layers", lambda drafts: drafts.append(drafts.pop(1))),
        ("of-another-dtype", "4.1", "BF16", change("logits", dtype="BF16", shape=[6])),
        ("of-two-dimensions", "4.1", "a row of logits", change("logits", shape=[1, 3])),
    ):
        yield vector(f"header-logits-{name}", clause, why, small(logits=3), arrays=hook)
    hook = lambda drafts: drafts.insert(1, three)  # noqa: E731
    why = "logits though the document has none"
    yield vector("header-logits-not-called-for", "4.7", why, small(), arrays=hook)
    for name, why, path, value in (
        ("of-another-size", "another size of the vocabulary", "logits.tokens", 4),
        ("tokens-0", "no tokens", "logits.tokens", 0),
        ("tokens-over-limit", "2^24 + 1 tokens", "logits.tokens", 2**24 + 1),
        ("tokens-a-string", "a string", "logits.tokens", "3"),
        ("without-tokens", "the size is missing", "logits", {}),
        ("a-number", "a number for an object", "logits", 3),
    ):
        yield vector(f"header-logits-{name}", "9.3", why, small(logits=3), document=inside(path, value))
    for name, why, hook in (
        ("compressed", "compressed logits", entry(1, compression=1)),
        ("first-token", "a token for logits", entry(1, first_token=1)),
    ):
        yield vector(f"header-logits-{name}", "5.1", why, small(logits=3), index=hook)
    for name, bits in (("nan", b"\x00\x00\xc0\x7f"), ("infinite", b"\x00\x00\x80\xff")):
        made = vector(f"content-logits-{name}", "8.6", "not finite", small(logits=3), arrays=patch("logits", 8, bits))
        yield replace(made, unread=True)
    at = array_start("logits")(small(logits=3), "anchor")
    made = vector("checksum-logits", "5.2", "a bit of logits", small(logits=3), data=flip(at))
    yield replace(made, unread=True)
