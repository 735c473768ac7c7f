"""Must-reject vectors for SPEC 4.6 and 5: array lists, index entries, digests and binding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from format_spec.generator.broken import (
    Hook,
    Vector,
    array_start,
    change,
    drop,
    entry,
    flip,
    inside,
    named,
    names_of,
    put,
    small,
    split,
    swap,
    tiny,
    vector,
)
from format_spec.generator.caches import cache, coding, digest, latent, layer
from format_spec.generator.formulas import Formulas
from format_spec.generator.writer import (
    Document,
    Draft,
    Stored,
    typed,
    write,
)


def array_lists() -> Iterator[Vector]:
    """Arrays in another order, missing, unknown, of another dtype or shape, wrong pads."""

    extra = typed("layer.7.latent.sink", "U8", np.zeros(64, np.uint8))
    for name, why, hook in (
        ("header-order-of-arrays", "order before mean", swap(".latent.mean", ".latent.order")),
        ("header-array-missing", "no means", drop(".latent.mean")),
        ("header-steps-missing", "no steps", drop("steps")),
        ("header-token-ids-missing", "ids said to be stored", drop("token_ids")),
        ("header-array-not-called-for", "an array nobody asked for", lambda drafts: drafts.append(extra)),
        ("header-array-twice-named", "a second mean", change(".latent.order", name="layer.0.latent.mean-")),
        ("header-array-of-another-dtype", "means as F16", change(".latent.mean", dtype="F16")),
        ("header-array-of-another-shape", "means as [D, H]", change(".latent.mean", shape=[4, 1])),
        ("header-array-of-two-dimensions", "anchor segments as a matrix", change(".latent.anchor", shape=[3, 64])),
    ):
        yield vector(name, "4.6", why, small(), arrays=hook)
    hook = swap(".k.raw", ".v.raw")
    pair = cache([coding("raw")], [layer(1, 1)], stop=1)
    yield vector("header-values-before-keys", "4.6", "V before K", pair, arrays=hook)
    hook = swap(".k.residual", ".v.residual")
    yield vector("header-residual-order", "4.6", "V before K", split(layer), role="residual", arrays=hook)
    hook = drop(".v.residual")
    yield vector("header-residual-array-missing", "4.7", "no V", split(layer), role="residual", arrays=hook)

    def sinks(drafts: list[Draft]) -> None:
        drafts.insert(0, typed("layer.0.latent.sink", "BF16", np.zeros((1, 1, 1), np.uint16)))

    yield vector("header-sink-not-called-for", "4.1", "a sink array where S = 0", tiny(), arrays=sinks)
    yield vector(
        "header-prefix-after-start",
        "4.1",
        "prefix digests with tokens.start > 0",
        cache([coding("raw", segment_tokens=512)], [latent(1, 1)], start=1, stop=258),
        arrays=lambda drafts: drafts.insert(0, typed("prefix_sha256", "U8", np.zeros((1, 32), np.uint8))),
    )
    yield vector(
        "header-prefix-of-unknown-ids",
        "4.1",
        "prefix digests though tokens.sha256 is null",
        cache([coding("raw", segment_tokens=512)], [latent(1, 1)], stop=256, known=False),
        arrays=lambda drafts: drafts.insert(0, typed("prefix_sha256", "U8", np.zeros((1, 32), np.uint8))),
    )
    block = cache([coding("raw", segment_tokens=512)], [latent(1, 1)], stop=256)
    yield vector("header-prefix-missing", "4.1", "256 tokens and no digests", block, arrays=drop("prefix_sha256"))

    def rename(old: str, new: str) -> Hook:
        def hook(body: Document) -> None:
            items = [(new if name == old else name, entry) for name, entry in body.items()]
            body.clear()
            body.update(items)

        return hook

    for name, why, hook in (
        ("header-pads-from-1", "the first pad is pad.1", rename("pad.0", "pad.9")),
        ("header-pad-of-another-dtype", "U16", lambda body: body["pad.0"].update(dtype="U16", shape=[31])),
        ("header-pad-of-128", "a pad too long", long_pad),
    ):
        yield vector(name, "4.3", why, tiny(), entries=hook)
    yield vector("header-pad-missing", "4.3", "the next array starts at no multiple of 64", tiny(), entries=no_pad)


def long_pad(body: Document) -> None:
    """The last pad and the array before it in one."""
    *_, array, pad = names_of(body)
    body[pad]["data_offsets"][0] = body[array]["data_offsets"][0]
    body[pad]["shape"] = [64]
    del body[array]


def no_pad(body: Document) -> None:
    """The array after the first pad takes its bytes."""
    names = names_of(body)
    after = body[names[names.index("pad.0") + 1]]
    after["data_offsets"][0] = body["pad.0"]["data_offsets"][0]
    after["dtype"], after["shape"] = "U8", [after["data_offsets"][1] - after["data_offsets"][0]]
    del body["pad.0"]


def indexes() -> Iterator[Vector]:
    """Entries that point elsewhere or claim other sizes. Entry 4 of `small` is its first anchor segment."""

    def swapped(index: bytearray) -> None:
        index[4 * 64 : 6 * 64] = index[5 * 64 : 6 * 64] + index[4 * 64 : 5 * 64]

    def same(index: bytearray) -> None:
        index[5 * 64 : 6 * 64] = index[4 * 64 : 5 * 64]

    # 4 channels of 4 tokens: 16 symbols, so at most 16 + 128 raw bytes.
    for name, why, hook in (
        ("header-index-offset-outside", "a segment behind the data region", entry(4, offset=1 << 40)),
        ("header-index-offset-2-64", "an offset that wraps", entry(4, offset=-(1 << 20))),
        ("header-index-offset-elsewhere", "64 bytes later", entry(4, offset=64)),
        ("header-index-unaligned", "1 byte later", entry(5, offset=1)),
        ("header-index-stored-bytes", "a segment that ends after its array", entry(6, stored_bytes=64)),
        ("header-index-stored-4-gib", "stored_bytes of 4 GiB", entry(4, stored_bytes=-17)),
        ("header-index-raw-bytes", "8 raw bytes more than stored", entry(4, raw_bytes=8)),
        ("header-index-raw-4-gib", "4 GiB after decompression", entry(4, raw_bytes=-17, compression=1)),
        ("header-index-half-an-escape", "4 bytes for an escape", entry(4, raw_bytes=4, compression=1)),
        ("header-index-escapes-over-symbols", "17 escapes", entry(4, raw_bytes=136, compression=1)),
        ("header-index-raw-too-few", "fewer raw bytes than symbols", entry(4, raw_bytes=-8, compression=1)),
        ("header-index-array", "another array", entry(4, array=1)),
        ("header-index-first-token", "another token", entry(5, first_token=1)),
        ("header-index-first-token-of-sinks", "a token for a sink array", entry(1, first_token=1)),
        ("header-index-compression-2", "an unknown compression", entry(4, compression=2)),
        ("header-index-sink-compressed", "a compressed sink array", entry(1, compression=1)),
        ("header-index-reserved", "a reserved byte", entry(4, reserved=1)),
        ("header-index-entries-swapped", "segments out of order", swapped),
        ("header-index-entry-twice", "one segment twice", same),
    ):
        yield vector(name, "5.1", why, small(), index=hook)

    def segments(ending: str, change: Hook) -> Hook:
        return lambda drafts: change(next(draft for draft in drafts if draft.name.endswith(ending)).segments)

    for role, ending in (("anchor", ".latent.anchor"), ("residual", ".latent.residual")):
        hook = segments(ending, lambda stored: stored.pop())
        name = f"header-{'' if role == 'anchor' else 'residual-'}segment-missing"
        yield vector(name, "5.1", "two segments instead of three", split(), role=role, arrays=hook)
    hook = segments(
        ".latent.anchor", lambda stored: stored.append(Stored(data=bytes(16), raw_bytes=16, first_token=12))
    )
    yield vector("header-segment-too-many", "5.1", "four segments instead of three", small(), arrays=hook)

    def cut(stored: list[Stored]) -> None:
        whole = stored[0].data
        stored[:] = [
            Stored(data=whole[:6], raw_bytes=6),
            Stored(data=whole[6:], raw_bytes=len(whole) - 6, first_token=3),
        ]

    draft = cache([coding("raw", segment_tokens=8)], [latent(1, 1)], stop=8)
    yield vector(
        "header-raw-cut-elsewhere", "5.1", "segments of another size", draft, arrays=segments(".latent.raw", cut)
    )
    hook = entry(0, raw_bytes=8)
    name = "header-residual-index-raw-bytes"
    yield vector(name, "5.1", "more than the shapes imply", split(), role="residual", index=hook)


def digests() -> Iterator[Vector]:
    """Bytes changed after their digest was taken."""

    for name, array in (
        ("checksum-steps", "steps"),
        ("checksum-sink", "layer.0.latent.sink"),
        ("checksum-mean", "layer.0.latent.mean"),
        ("checksum-order", "layer.0.latent.order"),
        ("checksum-anchor", "layer.0.latent.anchor"),
        ("checksum-token-ids", "token_ids"),
        ("checksum-index", "index"),
        ("checksum-header-sha256", "header_sha256"),
    ):
        at = array_start(array)(small(), "anchor")
        yield vector(name, "5.2", f"a bit of {array}", small(), data=flip(at))
    at = array_start("layer.0.latent.residual", 64)(split(), "residual")
    name = "checksum-residual"
    yield vector(name, "5.2", "a bit of the second segment", split(), role="residual", data=flip(at))
    name = "checksum-residual-index"
    yield vector(name, "5.2", "a bit of the index", split(), role="residual", data=flip(64 + 40))
    yield vector("checksum-header-sha256-tail", "4.1", "a bit of the 32 zero bytes", tiny(), data=flip(63))
    hook = lambda stored: stored.replace(b"by-formula", b"by-fornula")  # noqa: E731
    yield vector("checksum-header", "5.2", "a letter of the header", tiny(), file=hook)
    hook = put(index_sha256=digest(4))
    yield vector("checksum-index-sha256", "5.1", "another digest of the index", tiny(), document=hook)
    hook = inside("tokens.sha256", digest(5))
    yield vector("checksum-tokens-sha256", "6", "another digest of the ids", tiny(), document=hook)
    block = cache([coding("raw", segment_tokens=512)], [latent(1, 1)], stop=513)
    hook = inside("identity.adapter", "another")
    digests = vector("checksum-prefix-sha256", "9.2", "digests of another adapter", block, document=hook)
    yield replace(digests, unread=True)
    hook = put(cache_id=digest(6))
    yield vector("header-cache-id", "5.3", "a cache_id that is not that of the index", tiny(), document=hook)

    for role, name in (("anchor", "content-zeros-after-segment"), ("residual", "content-residual-zeros-after-segment")):
        at = array_start(f"layer.0.latent.{role}", 63)(split(), role)
        made = vector(name, "5.1", "a bit between two segments", split(), role=role, data=flip(at))
        yield replace(made, unread=True)
    at = array_start("pad.0")(tiny(), "anchor")
    yield replace(vector("content-pad", "4.3", "a bit of a pad array", tiny(), data=flip(at)), unread=True)


def bindings() -> Iterator[Vector]:
    """Residuals that belong elsewhere."""
    other = cache(
        [coding("entropy", segment_tokens=4, sink_tokens=1)],
        [latent(1, 4)],
        stop=11,
        formulas=Formulas(q=lambda y, t, z: (t + y) % 5 - 2),
    )
    files, others = write(split()), write(other)
    name, stored = next(item for item in files.items() if item[0].startswith("residual"))
    foreign = next(data for file, data in others.items() if file.startswith("residual"))
    why = "the Residual of another encode under this one's name"
    yield Vector(
        name="binding-residual-of-another-encode",
        clause="5.3",
        why=why,
        files=files | {name: foreign},
        precision="full",
    )
    hook = put(cache_id=digest(7))
    why = "the Anchor names its header, but it names another Anchor"
    yield vector("binding-residual-cache-id", "5.3", why, split(), role="residual", document=hook)

    for vector_name, field, resize in (
        ("binding-residual-header-bytes", "header_bytes", lambda size: size + 64),
        ("binding-residual-bytes", "bytes", lambda size: size - 64),
    ):
        made = vector(vector_name, "5.3", f"another {field}", split(), document=named(field, resize))
        yield Vector(name=made.name, clause="5.3", why=made.why, files=made.files, precision="full")

    def another(body: Document) -> None:
        body["residual"].update(header_sha256=digest(8), name=f"residual-{digest(8)[:16]}.safetensors")

    made = vector("binding-residual-header-sha256", "5.3", "another header digest", split(), document=another)
    files = {f"residual-{digest(8)[:16]}.safetensors": stored, "anchor.safetensors": made.files["anchor.safetensors"]}
    yield Vector(name=made.name, clause="5.3", why=made.why, files=files, precision="full")

    for vector_name, template in (
        ("header-residual-name-path", "../other.lynx/{name}"),
        ("header-residual-name-url", "https://example.com/{name}"),
        ("header-residual-name-absolute", "/{name}"),
        ("header-residual-name-of-another-digest", "residual-0123456789abcdef.safetensors"),
        ("header-residual-name-anchor", "anchor.safetensors"),
    ):
        hook = named("name", template_hook(template))
        yield vector(vector_name, "5.3", "not residual-, 16 digits, .safetensors", split(), document=hook)
    wrong: list[tuple[str, Any]] = [("header_sha256", "0"), ("header_bytes", -64), ("bytes", 1.5), ("exact_bytes", -64)]
    for field, value in wrong:
        hook = inside(f"residual.{field}", value)
        yield vector(f"header-residual-{field}", "6", "a wrong type or range", split(), document=hook)
    yield vector("header-residual-null", "6", "no Residual though R = 5", split(), document=put(residual=None))
    residual = {"header_sha256": digest(8), "name": f"residual-{digest(8)[:16]}.safetensors"}
    hook = put(residual=residual | {"header_bytes": 640, "bytes": 1024, "exact_bytes": 0})
    yield vector("header-residual-not-called-for", "6", "a Residual though all is raw", tiny(), document=hook)


def template_hook(template: str) -> Hook:
    """Put a name into a template."""
    return lambda name: template.format(name=name)
