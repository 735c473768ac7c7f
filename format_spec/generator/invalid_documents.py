"""Must-reject vectors for SPEC 6 to 8: fields missing, mistyped, out of range, or of a later version."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from format_spec.generator.broken import (
    BARE,
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
from format_spec.generator.caches import cache, coding, digest, latent, parent_of
from format_spec.generator.writer import CacheDraft, Document, Files, write

# One field of each object and each type is kept as a vector; the others are made when tested.
FIELDS = [
    *("version", "cache_id", "required", "dtype", "codings", "layers", "residual", "parent", "logits"),
    *("tokens.start", "tokens.sha256", "codec.params", "codings.0.exact", "layers.0.tensors.latent.coding"),
    *("identity.rope", "writer.tool"),
]
OTHER_FIELDS = [
    *("role", "index_sha256", "tokens", "codec", "identity", "writer", "transform", "tokens.stop", "tokens.stored"),
    *("codec.name", "codings.0.scheme", "codings.0.segment_tokens", "codings.0.sink_tokens", "layers.0.kind"),
    *("layers.0.start", "layers.0.stop", "layers.0.tensors", "layers.0.tensors.latent.heads"),
    *("layers.0.tensors.latent.head_dim", "identity.model_id", "identity.revision", "identity.fingerprint"),
    *("identity.tokenizer_sha256", "identity.chat_template_sha256", "identity.turn", "identity.adapter"),
    *("identity.salt_sha256", "writer.version"),
]
FIXED_FIELDS = ["anchor_bits", "codebook", "offset"]
OTHER_FIXED_FIELDS = ["residual_bits", "chunk_tokens", "page_tokens", "group", "chunk_dtype"]
RESIDUAL_FIELDS = ["cache_id", "required"]
OTHER_RESIDUAL_FIELDS = ["version", "role", "index_sha256", "writer"]


def missing(fields: list[str], fixed: list[str], residual: list[str]) -> Iterator[Vector]:
    """Fields missing: of any Anchor, of a fixed coding, of the Residual's document."""
    for path in fields:
        name = f"header-without-{path.replace('.', '-')}"
        yield vector(name, "6", f"the field {path} is missing", tiny(), document=without(path))
    for path in fixed:
        hook = without(f"codings.0.{path}")
        yield vector(f"header-fixed-without-{path}", "8.3", f"{path} is missing", small_fixed(), document=hook)
    for path in residual:
        name = f"header-residual-without-{path}"
        yield vector(name, "7", f"{path} is missing", split(), role="residual", document=without(path))


def parents() -> Iterator[Vector]:
    """SPEC 9.4: what a cache says of the caches it continues, broken."""
    raw, few = [coding("raw")], [latent(1, 1)]
    first = write(cache(raw, few, stop=2, identity=BARE))
    second = write(cache(raw, few, start=2, stop=3, identity=BARE, parent=parent_of([("parent.lynx", first, 2)])))
    beside = {"parent.lynx": first, "parent-copied.lynx": first, "parent-of-two.lynx": second}

    def child(spans: list[tuple[str, Files, int]], layers: list[Document] = few, **fields: Any) -> CacheDraft:
        start = spans[-1][2]
        return cache(raw, layers, start=start, stop=start + 1, identity=BARE, parent=parent_of(spans), **fields)

    one = [("parent.lynx", first, 2)]
    for path, value, why in (
        ("parent", [], "a list for an object"),
        ("parent.precision", "raw", "an unknown precision"),
        ("parent.tokens_sha256", "none", "no digest"),
        ("parent.spans", [], "no span"),
        ("parent.spans.0", "parent.lynx", "a string for an object"),
        ("parent.spans.0.stop", 0, "an empty span"),
        ("parent.spans.0.stop", 1, "an end before the start of the cache"),
        ("parent.spans.0.stop", 3, "an end after the start of the cache"),
        ("parent.spans.0.header_sha256", "none", "no digest"),
        ("parent.spans.0.name", "../parent.lynx", "a path"),
        ("parent.spans.0.name", "https://example.org/parent.lynx", "a URL"),
        ("parent.spans.0.name", "..%2fparent.lynx", "an escaped path"),
        ("parent.spans.0.name", ".lynx", "no name"),
        ("parent.spans.0.name", "parent", "no cache"),
        ("parent.spans.0.name", "x" * 251 + ".lynx", "a name that is too long"),
    ):
        slug = "-".join((path.replace(".", "-"), *why.split()))
        yield vector(f"header-{slug}", "9.4", f"{path}: {why}", child(one), document=inside(path, value))
    for path, value, why in (
        ("part_of", [], "a list for an object"),
        ("part_of.name", "https://example.org/whole.lynx", "a URL"),
        ("part_of.stop", 3, "a whole that is no longer than the part"),
    ):
        slug = "-".join((path.replace("_", "-").replace(".", "-"), *why.split()))
        draft = child(one, part_of={"name": "whole.lynx", "stop": 9})
        yield vector(f"header-{slug}", "9.5", f"{path}: {why}", draft, document=inside(path, value))
    window = [latent(1, 1, kind="sliding", window=4)]
    draft = cache(raw, window, stop=2, identity=BARE, part_of={"name": "whole.lynx", "stop": 9})
    yield vector("header-part-of-a-sliding-layer", "9.5", "a sliding layer in a chain", draft)
    yield vector("header-parent-twice", "9.4", "a span comes before itself", child([*one, ("parent.lynx", first, 3)]))
    many = child([(f"{stop}.lynx", first, stop) for stop in range(1, 257)])
    yield vector("header-parent-spans-256", "10", "256 spans", many)
    yield vector("header-parent-of-a-sliding-layer", "9.4", "a sliding layer in a chain", child(one, window))
    for name, why, draft in (
        ("replaced", "the parent is another than the one that was continued", child([("parent.lynx", second, 2)])),
        ("too-short", "the parent ends before its stop", child([("parent.lynx", first, 3)])),
        ("starts-elsewhere", "the only span does not start at 0", child([("parent-of-two.lynx", second, 3)])),
        (
            "of-another-chain",
            "a span that continues the same cache under another name",
            child([("parent-copied.lynx", first, 2), ("parent-of-two.lynx", second, 3)]),
        ),
        ("of-another-shape", "another head dim", child(one, [latent(1, 2)])),
        ("of-another-dtype", "another dtype", child(one, dtype="fp16")),
    ):
        yield replace(vector(f"binding-parent-{name}", "9.4", why, draft), beside=beside)


def over_64_mib(index: bytearray) -> None:
    """A compressed anchor segment of 2^20 + 1 tokens of 64 channels; before it come steps, mean and order."""
    struct.pack_into("<I", index, 3 * 64 + 12, 64 * (2**20 + 1))
    index[3 * 64 + 24] = 1


def incomplete() -> Iterator[Vector]:
    """The missing fields that are not kept."""
    yield from missing(OTHER_FIELDS, OTHER_FIXED_FIELDS, OTHER_RESIDUAL_FIELDS)
    for path in ("name", "header_sha256", "header_bytes", "bytes"):
        hook = without(f"residual.{path}")
        yield vector(f"header-without-residual-{path}", "6", f"residual.{path} is missing", split(), document=hook)
    for path in ("segment_tokens", "sink_tokens", "radix"):
        hook = without(f"codings.0.{path}")
        yield vector(f"header-entropy-without-{path}", "8.4", f"{path} is missing", small(), document=hook)


def documents() -> Iterator[Vector]:
    """Fields missing, of a wrong type, out of range, or of a later version."""
    yield from missing(FIELDS, FIXED_FIELDS, RESIDUAL_FIELDS)
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
        ("tokens.sha256", None, "no digest of ids that are stored"),
        ("codings", {}, "an object for a list"),
        ("codings.0", "raw", "a string for an object"),
        ("codings.0.scheme", "lossless", "an unknown scheme"),
        ("codings.0.segment_tokens", 0, "segments of no tokens"),
        ("codings.0.segment_tokens", 64.0, "a number with a point"),
        ("codings.0.sink_tokens", 1, "sinks with raw coding"),
        ("codings.0.exact", True, "exact arrays with raw coding"),
        ("codings.0.exact", 0, "0 for false"),
        ("layers", [], "no layers"),
        ("layers.0.kind", "chunked", "an unknown kind"),
        ("layers.0.kind", "sliding", "a sliding layer without window"),
        ("layers.0.window", 8, "a window in a full layer"),
        ("layers.0.start", True, "true for 1"),
        ("layers.0.stop", 2, "a layer that ends after the tokens"),
        ("layers.0.tensors", {"k": {"heads": 1, "head_dim": 1, "coding": 0}}, "k without v"),
        ("layers.0.tensors.v", {"heads": 1, "head_dim": 1, "coding": 0}, "latent beside v"),
        ("layers.0.tensors.latent.heads", 0, "no heads"),
        ("layers.0.tensors.latent.heads", 4097, "too many heads"),
        ("layers.0.tensors.latent.head_dim", 4097, "a head dim over the limit"),
        ("layers.0.tensors.latent", {"heads": 257, "head_dim": 256, "coding": 0}, "too many channels"),
        ("layers.0.tensors.latent.coding", 1, "a coding that is not there"),
        ("layers.0.tensors.latent.coding", -1, "a negative index"),
        ("identity.turn", "closed", "an unknown turn"),
        ("identity.fingerprint", "none", "no digest"),
        ("identity.rope", 10000.0, "a number for an object"),
        ("residual", {}, "an empty object"),
        ("residual", "none", "a string"),
        ("writer", "lynxkv", "a string for an object"),
    ):
        slug = "-".join(filter(None, (path.replace(".", "-"), "-".join(why.replace(",", "").split()))))
        yield vector(f"header-{slug}", "6", f"{path}: {why}", tiny(), document=inside(path, value))
    for version in ("0.1", "2.0", "1", "1.00", "1.0.0", " 1.0"):
        name = f"unsupported-version-{version.strip().replace('.', '-')}{'-spaced' * version.startswith(' ')}"
        yield vector(name, "6", f"version {version!r}", tiny(), document=put(version=version))
    yield vector("unsupported-required", "6", "an unknown feature", tiny(), document=put(required=["deltas"]))
    # Whatever else a later version may change, its name comes first.
    later = put(version="2.0", tokens=None, codings=None, layers=[])
    yield vector("unsupported-version-of-another-shape", "6", "version 2.0", tiny(), document=later)

    many = [coding("raw") for _ in range(65)]
    yield vector("header-codings-65", "10", "65 codings", cache(many, [latent(1, 1)], stop=1))
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
        "one segment of 64 bytes more than 64 MiB after decompression, as its shape has it",
        cache([coding("entropy", radix=1, segment_tokens=2**21)], [latent(1, 64)], stop=1, known=False),
        document=lambda body: [inside(path, 2**20 + 1)(body) for path in ("tokens.stop", "layers.0.stop")],
        index=over_64_mib,
    )
    for path, value, why in (
        ("sink_tokens", 1025, "too many sinks"),
        ("radix", 0, "no radix"),
        ("radix", 33, "a radix over the limit"),
        ("radix", "5", "a string"),
    ):
        name = f"header-entropy-{'-'.join(why.split())}"
        yield vector(name, "8", f"{path}: {why}", small(), document=inside(f"codings.0.{path}", value))
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
    yield vector("header-codebook-of-two-shapes", "4.6", "one name, two tables", cache(books, [latent(1, 1)], stop=1))
    hook = put(dtype="fp32")
    entropy = cache([coding("entropy")], [latent(1, 1)], stop=1)
    yield vector("header-fp32-entropy", "6", "fp32 with entropy coding", entropy, document=hook)

    sliding = cache([coding("raw")], [latent(1, 1, kind="sliding", window=8, start=6)], start=5, stop=9)
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

    hook = put(role="anchor")
    yield vector("header-residual-role", "7", "the wrong role", split(), role="residual", document=hook)
    hook = put(version="0.0")
    yield vector("unsupported-residual-version", "7", "version 0.0", split(), role="residual", document=hook)
    hook = put(required=["x"])
    yield vector("unsupported-residual-required", "7", "a feature", split(), role="residual", document=hook)
