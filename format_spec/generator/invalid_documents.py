"""Must-reject vectors for SPEC 6 to 8: fields missing, mistyped, out of range, or of a later version."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from format_spec.generator.broken import (
    Vector,
    inside,
    put,
    small,
    small_fixed,
    split,
    tiny,
    vector,
    without,
)
from format_spec.generator.formulas import cache, coding, digest, layer
from format_spec.generator.writer import (
    Document,
)

FIELDS = [
    *("version", "role", "cache_id", "required", "index_sha256", "dtype", "tokens", "codec", "codings", "layers"),
    *("residual", "identity", "writer", "parent", "transform", "logits", "tokens.start", "tokens.sha256"),
    *("tokens.stored", "codec.name", "codec.params", "codings.0.scheme", "codings.0.segment_tokens"),
    *("codings.0.sink_tokens", "layers.0.kind", "layers.0.start", "layers.0.stop", "layers.0.tensors"),
    *("layers.0.tensors.k.heads", "layers.0.tensors.v.coding", "identity.fingerprint", "identity.turn"),
    *("identity.rope", "writer.tool"),
]
FIXED_FIELDS = [
    *("anchor_bits", "residual_bits", "codebook", "chunk_tokens", "page_tokens", "group", "chunk_dtype", "offset"),
]


def documents() -> Iterator[Vector]:
    """Fields missing, of a wrong type, out of range, or of a later version."""
    for path in FIELDS:
        name = f"header-without-{path.replace('.', '-')}"
        yield vector(name, "6", f"the field {path} is missing", tiny(), document=without(path))
    for path, value, why in (
        ("version", 0.1, "a number"),
        ("role", "residual", "the wrong role"),
        ("required", "none", "a string"),
        ("dtype", "fp8", "an unknown dtype"),
        ("cache_id", digest(9).upper(), "upper-case digits"),
        ("tokens.start", -1, "a negative position"),
        ("tokens.start", 1, "an empty range"),
        ("tokens.stop", 2**31, "a position over the limit"),
        ("tokens.stored", 1, "1 for true"),
        ("tokens.sha256", "00", "a short digest"),
        ("codings", {}, "an object for a list"),
        ("codings.0", "raw", "a string for an object"),
        ("codings.0.scheme", "lossless", "an unknown scheme"),
        ("codings.0.segment_tokens", 0, "segments of no tokens"),
        ("codings.0.segment_tokens", 64.0, "a number with a point"),
        ("codings.0.sink_tokens", 1, "sinks with raw coding"),
        ("layers", [], "no layers"),
        ("layers.0.kind", "chunked", "an unknown kind"),
        ("layers.0.kind", "sliding", "a sliding layer without window"),
        ("layers.0.window", 8, "a window in a full layer"),
        ("layers.0.start", True, "true for 1"),
        ("layers.0.stop", 2, "a layer that ends after the tokens"),
        ("layers.0.tensors", {"k": {"heads": 1, "head_dim": 1, "coding": 0}}, "k without v"),
        ("layers.0.tensors.latent", {"heads": 1, "head_dim": 1, "coding": 0}, "latent beside k and v"),
        ("layers.0.tensors.k.heads", 0, "no heads"),
        ("layers.0.tensors.k.heads", 4097, "too many heads"),
        ("layers.0.tensors.k.head_dim", 4097, "a head dim over the limit"),
        ("layers.0.tensors.k", {"heads": 257, "head_dim": 256, "coding": 0}, "too many channels"),
        ("layers.0.tensors.k.coding", 1, "a coding that is not there"),
        ("layers.0.tensors.k.coding", -1, "a negative index"),
        ("identity.turn", "closed", "an unknown turn"),
        ("identity.fingerprint", "none", "no digest"),
        ("identity.rope", 10000.0, "a number for an object"),
        ("residual", {}, "an empty object"),
        ("residual", "none", "a string"),
        ("writer", "lynxkv", "a string for an object"),
    ):
        slug = "-".join(filter(None, (path.replace(".", "-"), "-".join(why.replace(",", "").split()))))
        yield vector(f"header-{slug}", "6", f"{path}: {why}", tiny(), document=inside(path, value))
    for feature in ("parent", "transform", "logits"):
        name = f"unsupported-{feature}"
        yield vector(name, "6", f"{feature} is not null", tiny(), document=inside(feature, {}))
    yield vector("unsupported-version", "6", "version 0.2", tiny(), document=put(version="0.2"))
    yield vector("unsupported-required", "6", "an unknown feature", tiny(), document=put(required=["deltas"]))
    # Whatever else a later version may change, its name comes first.
    later = put(version="1.0", tokens=None, codings=None, layers=[])
    yield vector("unsupported-version-of-another-shape", "6", "version 1.0", tiny(), document=later)

    many = [coding("raw") for _ in range(65)]
    yield vector("header-codings-65", "10", "65 codings", cache(many, [layer(1, 1)], stop=1))
    yield vector(
        "header-segments-over-limit",
        "10",
        "2^31 - 1 segments in a small object, not to be listed one by one",
        tiny(),
        document=lambda body: [
            inside("tokens.stop", 2**31 - 1)(body),
            inside("layers.0.stop", 2**31 - 1)(body),
            inside("codings.0.segment_tokens", 1)(body),
        ],
    )
    yield vector(
        "header-raw-bytes-over-limit",
        "10",
        "one segment of over 64 MiB, as the document has it",
        tiny(),
        document=lambda body: [inside("layers.0.tensors.k", {"heads": 16, "head_dim": 4096, "coding": 0})(body)],
    )
    for path, value, why in (
        ("sink_tokens", 1025, "too many sinks"),
        ("radix", 0, "no radix"),
        ("radix", 33, "a radix over the limit"),
        ("radix", "5", "a string"),
    ):
        name = f"header-entropy-{'-'.join(why.split())}"
        yield vector(name, "8", f"{path}: {why}", small(), document=inside(f"codings.0.{path}", value))
    for path in FIXED_FIELDS:
        hook = without(f"codings.0.{path}")
        yield vector(f"header-fixed-without-{path}", "8.3", f"{path} is missing", small_fixed(), document=hook)
    for path, value, why in (
        ("anchor_bits", 0, "no anchor bits"),
        ("anchor_bits", 9, "nine anchor bits"),
        ("residual_bits", 5, "nine bits together"),
        ("residual_bits", -1, "negative bits"),
        ("codebook", "", "an empty name"),
        ("codebook", "../book", "a path"),
        ("codebook", "Book", "a capital"),
        ("codebook", "b" * 33, "a long name"),
        ("chunk_tokens", 0, "chunks of no tokens"),
        ("chunk_tokens", 3, "pages that are not whole chunks"),
        ("page_tokens", -2, "negative pages"),
        ("segment_tokens", 6, "segments that are not whole pages"),
        ("group", "head", "an unknown group"),
        ("chunk_dtype", "f16", "an unknown chunk dtype"),
        ("offset", 1, "one for true"),
    ):
        name = f"header-fixed-{'-'.join(why.split())}"
        yield vector(name, "8.3", f"{path}: {why}", small_fixed(), document=inside(f"codings.0.{path}", value))
    odd = small_fixed(page_tokens=0)
    hook = inside("codings.0.segment_tokens", 3)
    yield vector("header-fixed-segments-not-whole-chunks", "8.3", "no pages", odd, document=hook)
    books = [coding("fixed", codebook="one"), coding("fixed", codebook="one", anchor_bits=5, residual_bits=3)]
    yield vector("header-codebook-of-two-shapes", "4.6", "one name, two tables", cache(books, [layer(1, 1)], stop=1))
    hook = put(dtype="fp32")
    entropy = cache([coding("entropy")], [layer(1, 1)], stop=1)
    yield vector("header-fp32-entropy", "6", "fp32 with entropy coding", entropy, document=hook)

    sliding = cache([coding("raw")], [layer(1, 1, kind="sliding", window=8, start=6)], start=5, stop=9)
    for path, value, why in (
        ("start", 4, "a sliding layer that starts before the tokens"),
        ("start", 9, "a sliding layer of no tokens"),
        ("stop", 8, "a sliding layer that ends before the tokens"),
        ("window", 0, "a window of no tokens"),
        ("kind", "full", "a full layer that starts after the tokens"),
    ):
        name = f"header-{'-'.join(why.removeprefix('a ').split())}"

        def full(body: Document, path: str = path, value: Any = value) -> None:
            body["layers"][0][path] = value
            if path == "kind":
                del body["layers"][0]["window"]

        yield vector(name, "6.1", why, sliding, document=full)

    for path in ("role", "cache_id", "required", "index_sha256", "writer"):
        name = f"header-residual-without-{path}"
        yield vector(name, "7", f"{path} is missing", split(), role="residual", document=without(path))
    hook = put(role="anchor")
    yield vector("header-residual-role", "7", "the wrong role", split(), role="residual", document=hook)
    hook = put(version="0.0")
    yield vector("unsupported-residual-version", "7", "version 0.0", split(), role="residual", document=hook)
    hook = put(required=["x"])
    yield vector("unsupported-residual-required", "7", "a feature", split(), role="residual", document=hook)
