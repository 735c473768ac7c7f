"""Must-reject vectors for SPEC 4: lengths, padding, offsets, and what strict JSON forbids."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

from format_spec.generator.broken import (
    Hook,
    Vector,
    names_of,
    replaced,
    split,
    tiny,
    vector,
)
from format_spec.generator.writer import (
    Document,
)


def containers() -> Iterator[Vector]:
    """Lengths, padding, offsets."""
    for name, why, size in (
        ("truncated-empty", "no bytes at all", 0),
        ("truncated-in-length", "7 of the 8 bytes of n", 7),
        ("truncated-in-header", "cut inside the header", 200),
        ("truncated-in-data", "the last byte is missing", -1),
    ):
        yield vector(name, "4.1", why, tiny(), file=cut(size))
    for name, why, size in (
        ("truncated-residual-in-header", "cut inside the header", 100),
        ("truncated-residual-in-data", "the last byte is missing", -1),
    ):
        yield vector(name, "4.1", why, split(), role="residual", file=cut(size))

    def length(n: int) -> Hook:
        return lambda stored: struct.pack("<Q", n) + stored[8:]

    yield vector("header-length-2-63", "10", "n = 2^63", tiny(), file=length(2**63))
    yield vector("header-length-over-limit", "10", "n just over 16 MiB", tiny(), file=length((16 << 20) + 56))
    yield vector("truncated-length-past-end", "4.1", "n past the end of the object", tiny(), file=length(8192 - 8))
    yield vector("truncated-array-past-end", "4.5", "the last array ends after the object", tiny(), entries=grow_last)
    yield vector("header-bytes-after-arrays", "4.5", "64 zeros more", tiny(), file=lambda stored: stored + bytes(64))

    for name, why, change in (
        ("header-not-padded", "8 + n is no multiple of 64", lambda text: text + b" "),
        ("header-padded-with-newlines", "newlines after the object", lambda text: text.rstrip() + b"\n" * 64),
        ("header-text-after-object", "a second object", lambda text: text.rstrip() + b" {}"),
        ("header-space-before-object", "a space before the object", lambda text: b" " + text.rstrip()),
        ("header-byte-order-mark", "a byte order mark", lambda text: b"\xef\xbb\xbf" + text.rstrip()),
        ("header-not-utf-8", "a byte that is not UTF-8", lambda text: text.replace(b"header_sha", b"h\xffader_sha", 1)),
        ("header-not-an-object", "a list", lambda text: b"[1, 2]"),
        ("header-not-json", "the closing brace is missing", lambda text: text.rstrip()[:-1]),
        ("header-of-spaces", "nothing but padding", lambda text: b" " * 56),
    ):
        yield vector(name, "4.2", why, tiny(), header=reframe(change, padded=name != "header-not-padded"))

    for name, why, edit in (
        ("header-gap", "64 bytes that no array has", move_from(2, 64)),
        ("header-overlap", "an array starts inside another", move_start(2, -64)),
        ("header-reversed-offsets", "start above stop", swap_offsets),
        ("header-first-array-not-at-0", "the first array starts at 64", move_from(0, 64)),
        ("header-two-arrays-in-one-place", "two arrays at the same bytes", same_place),
        ("header-offset-negative", "an offset of -64", set_offsets("header_sha256", [-64, 0])),
        ("header-offset-float", "an offset of 64.0", set_offsets("header_sha256", [0, 64.0])),
        ("header-three-offsets", "three offsets", set_offsets("header_sha256", [0, 64, 64])),
        ("header-offsets-missing", "an array without data_offsets", lambda body: body["index"].pop("data_offsets")),
        ("header-shape-huge", "a huge shape and few bytes", set_shape([2**40, 2**12])),
        # 2^64 + 64 bytes: as a 64-bit product it is 64.
        ("header-shape-wraps", "a product that is right modulo 2^64", set_shape([320, 107367629, 536903681])),
        ("header-shape-negative", "-8 times -8", set_shape([-8, -8])),
        ("header-shape-boolean", "true in a shape", set_shape([True, 64])),
        ("header-array-empty", "an array of no bytes", add_empty),
        ("header-dtype-unknown", "a dtype not of section 4.1", lambda body: body["index"].update(dtype="I8")),
    ):
        yield vector(name, "4.3", why, tiny(), entries=edit)


def cut(size: int) -> Hook:
    """Keep `size` bytes; -1 loses the last one."""
    return lambda stored: stored[:size]


def reframe(change: Hook, *, padded: bool) -> Hook:
    """Change the header's text, pad it and state its length again."""

    def hook(header: bytes) -> bytes:
        text: bytes = change(header[8:])
        if padded:
            text += b" " * (-(8 + len(text)) % 64)
        return struct.pack("<Q", len(text)) + text

    return hook


def grow_last(body: Document) -> None:
    """The last array, a pad, ends 64 bytes later."""
    last = body[names_of(body)[-1]]
    last["data_offsets"][1] += 64
    last["shape"] = [last["shape"][0] + 64]


def move_from(number: int, by: int) -> Hook:
    """Move the arrays from `number` on."""

    def hook(body: Document) -> None:
        for name in names_of(body)[number:]:
            body[name]["data_offsets"] = [at + by for at in body[name]["data_offsets"]]

    return hook


def move_start(number: int, by: int) -> Hook:
    """Move the start of one array; its shape follows."""

    def hook(body: Document) -> None:
        entry = body[names_of(body)[number]]
        entry["data_offsets"][0] += by
        entry["dtype"], entry["shape"] = "U8", [entry["data_offsets"][1] - entry["data_offsets"][0]]

    return hook


def swap_offsets(body: Document) -> None:
    """Start and stop of the index change places."""
    body["index"]["data_offsets"].reverse()


def same_place(body: Document) -> None:
    """The index is entered twice."""
    body["index-again"] = body["index"]


def set_offsets(name: str, offsets: list[Any]) -> Hook:
    """Give an array other offsets."""
    return lambda body: body[name].update(data_offsets=offsets)


def set_shape(shape: list[Any]) -> Hook:
    """Give `header_sha256` another shape."""
    return lambda body: body["header_sha256"].update(shape=shape)


def add_empty(body: Document) -> None:
    """A sink array of no tokens."""
    at = body["index"]["data_offsets"][1]
    body["layer.0.latent.sink"] = {"dtype": "BF16", "shape": [0, 1, 1], "data_offsets": [at, at]}


def json_texts() -> Iterator[Vector]:
    """What strict JSON forbids, in header and document."""
    for name, why, hook in (
        ("header-duplicate-array", "an array entered twice", replaced('"index":', '"index":0,"index":')),
        ("header-duplicate-metadata", "__metadata__ twice", replaced("{", '{"__metadata__":{},')),
        ("header-nan", "NaN in the header", replaced("[64]", "[NaN]")),
        ("header-infinity", "-Infinity in the header", replaced("[0,64]", "[-Infinity,64]")),
        ("header-nesting-9", "nine levels", replaced("[64]", "[[[[[[[64]]]]]]]")),
        ("header-nesting-2000", "lists 2,000 deep", replaced("[64]", "[" * 2_000)),
        ("header-unclosed-string", "a string without end", replaced("{", '{"' + '\\"' * 400)),
        ("header-integer-huge", "an integer of 5,000 digits", replaced("[64]", "[" + "9" * 5000 + "]")),
        ("header-lone-surrogate-name", "half a surrogate pair", replaced("header_sha256", "header_sha256\\ud800")),
        ("header-metadata-missing", "no __metadata__", replaced("__metadata__", "__netadata__")),
        ("header-metadata-without-lynxkv", "not a lynxkv shard", replaced('"lynxkv"', '"kvlynx"')),
        ("header-metadata-not-strings", "a number in __metadata__", replaced('{"lynxkv"', '{"format":1,"lynxkv"')),
    ):
        yield vector(name, "4.2", why, tiny(), header_text=hook)
    for name, why, hook in (
        ("header-document-duplicate-key", "the same key twice", replaced("{", '{"version":"1.0",')),
        ("header-document-duplicate-escaped", "again, escaped", replaced("{", '{"\\u0076ersion":"1.0",')),
        ("header-document-duplicate-nested", "in an inner object", replaced('"start":0', '"start":0,"start":0')),
        ("header-document-nan", "NaN", replaced("{", '{"unknown":NaN,')),
        ("header-document-infinity", "Infinity", replaced("{", '{"unknown":[Infinity],')),
        ("header-document-float-infinite", "a number beyond f64", replaced("{", '{"unknown":-1e999,')),
        ("header-document-nesting-17", "17 levels", replaced("{", '{"unknown":' + "[" * 16 + "]" * 16 + ",")),
        ("header-document-trailing-text", "a second document", lambda text: text + "{}"),
        ("header-document-leading-newline", "a newline before the object", lambda text: "\n" + text),
        ("header-document-trailing-newline", "a newline after the object", lambda text: text + "\n"),
        ("header-document-not-an-object", "a list", lambda text: "[]"),
        ("header-document-not-json", "nothing", lambda text: ""),
        ("header-document-integer-2-53", "an integer of 2^53", replaced("{", f'{{"unknown":{2**53},')),
        ("header-document-integer-minus-2-53", "-2^53", replaced("{", f'{{"unknown":{-(2**53)},')),
        ("header-document-string-4097", "4,097 characters", replaced("{", '{"unknown":"' + "x" * 4097 + '",')),
        ("header-document-key-4097", "a key of 4,097 characters", replaced("{", '{"' + "x" * 4097 + '":0,')),
        ("header-document-lone-surrogate", "half a pair", replaced("{", '{"unknown":["\\udc00"],')),
        ("header-document-surrogate-adapter", "half a pair", replaced('"adapter":null', '"adapter":"\\ud800"')),
        ("header-document-control-character", "a raw newline in a string", replaced("by-formula", "by-\nformula")),
    ):
        yield vector(name, "4.2", why, tiny(), document_text=hook)
