"""A small reader of lynxkv caches, to read beside SPEC.md: each step stands under the clause it follows.

It is written for clarity, not speed, and shares no code with lynxkv. It needs numpy, and `zstandard` only
where a segment is compressed. `python reference_reader.py NAME.lynx` prints a summary with a digest of each
tensor.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Kind = Literal["truncated", "header", "checksum", "unsupported", "binding", "content"]
Precision = Literal["anchor", "full", "exact"]
PRECISIONS: tuple[Precision, ...] = ("anchor", "full", "exact")
Bytes = npt.NDArray[np.uint8]
Codes = npt.NDArray[np.int64]
F32 = npt.NDArray[np.float32]
Document = dict[str, Any]

ITEM_BYTES = {"U8": 1, "I8": 1, "U16": 2, "BF16": 2, "F16": 2, "U32": 4, "F32": 4}
STORED_DTYPE = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}
HEX = re.compile(r"[0-9a-f]{64}")
# SPEC 10: limits.
MAX_HEADER_BYTES, MAX_ARRAYS, MAX_LAYERS, MAX_CODINGS = 16 << 20, 65_536, 1_024, 64
MAX_HEADS, MAX_HEAD_DIM, MAX_CHANNELS, MAX_TOKENS = 4_096, 4_096, 65_536, 2**31 - 1
MAX_SEGMENTS, MAX_RAW_BYTES, MAX_STRING, MAX_INTEGER = 1 << 20, 64 << 20, 4_096, 2**53
MAX_WINDOW_BYTES, MAX_LOGITS, MAX_PARENT_SPANS, MAX_BASIS_BYTES = 8 << 20, 1 << 24, 255, 4 << 30
# SPEC 9.4: "MUST have 6 to 255 characters, end in `.lynx`, not begin with a dot, and hold no ...".
SIBLING = re.compile(r"(?!\.)[^/\\%?#:*\[\]\x00-\x1f\x7f]{1,250}\.lynx")
EXACT = ".exact"
# SPEC 9.1, without `turn`.
DIGESTS = ("fingerprint", "tokenizer_sha256", "chat_template_sha256", "salt_sha256")
IDENTITY = (*DIGESTS, "model_id", "revision", "rope", "adapter")


class Refused(Exception):
    """The bytes are not what the SPEC allows; `kind` says in what way."""

    def __init__(self, kind: Kind, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind: Kind = kind
        self.message = message


def need(condition: bool, message: str, kind: Kind = "header") -> None:
    """Refuse the cache unless `condition` holds."""
    if not condition:
        raise Refused(kind, message)


@dataclass(frozen=True, kw_only=True)
class Array:
    """An array of a shard; `start` and `stop` count from the start of the data region."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class Shard:
    """A stored object with a checked container: arrays in file order, the document, the data region."""

    header: bytes
    arrays: list[Array]
    document: Document
    data: bytes


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A segment that the document calls for: coded tokens [first_token, first_token + tokens)."""

    first_token: int
    tokens: int
    raw_bytes: int
    max_raw_bytes: int


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """An array that the document calls for; `shape` is None where the index decides the size."""

    name: str
    dtype: str
    shape: tuple[int, ...] | None
    segments: list[Segment]


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """One tensor of one layer: `sinks` sink tokens, then `coded` coded tokens."""

    number: int
    layer: int
    name: str
    heads: int
    head_dim: int
    coding: Document
    sinks: int
    coded: int
    # Position of the first coded token.
    first: int

    @property
    def channels(self) -> int:
        return self.heads * self.head_dim

    @property
    def key(self) -> str:
        return f"layer.{self.layer}.{self.name}"

    @property
    def has_residual(self) -> bool:
        bits, radix = self.coding.get("residual_bits", 0), self.coding.get("radix", 1)
        return self.coded > 0 and (bits > 0 if self.coding["scheme"] == "fixed" else radix > 1)

    @property
    def has_exact(self) -> bool:
        return self.coded > 0 and self.coding["exact"] is True


@dataclass(frozen=True, kw_only=True)
class Basis:
    """SPEC 8.8: rows [blocks, n, n] and name of the rope by tensor, cosines and sines (coarse, fine) by rope."""

    rows: dict[str, npt.NDArray[np.int64]]
    rope_of: dict[str, str | None]
    ropes: dict[str, tuple[F32, F32]]


@dataclass(frozen=True, kw_only=True)
class Cache:
    """A decoded cache: [H, T, D] a tensor, uint16 bits for bf16 and fp16, float32 for fp32."""

    document: Document
    precision: Precision
    layers: list[dict[str, npt.NDArray[Any]]]
    token_ids: npt.NDArray[np.uint32] | None
    logits: F32 | None
    prefix_sha256: bytes


def read(folder: str | Path, precision: Precision = "full") -> Cache:
    """Read a cache folder, and those that it continues, at one precision.

    Anchor precision leaves Residuals alone, full their exact segments.

    Raises:
        Refused: the bytes are not what the SPEC allows.
        OSError: an object of the cache, or a cache that it continues, is missing or cannot be read.
    """
    last, _ = read_one(Path(folder), precision)
    refs = last.document["parent"]["spans"] if last.document["parent"] else []
    spans: list[Cache] = []
    for number, ref in enumerate(refs):
        # SPEC 9.4.1: "`name` is the last part of a prefix `NAME.lynx/` beside this cache".
        span, digest = read_one(Path(folder).parent / ref["name"], precision)
        spans.append(span)
        check_span(span, digest, last.document, number)
    layers, ids = last.layers, last.token_ids
    for ref, span in zip(reversed(refs), reversed(spans), strict=True):
        # SPEC 9.4.5: positions at or after its `stop` "are not part of the chain".
        count = ref["stop"] - span.document["tokens"]["start"]
        layers = [
            {name: np.concatenate([before[name][:, :count], after[name]], axis=1) for name in after}
            for before, after in zip(span.layers, layers, strict=True)
        ]
        if ids is not None:
            ids = None if span.token_ids is None else np.concatenate([span.token_ids[:count], ids])
    if ids is not None and (spans or last.document["tokens"]["start"] == 0):
        check_sequence(last.document, ids, last.prefix_sha256)
    return replace(last, layers=layers, token_ids=ids)


def check_span(span: Cache, digest: str, last: Document, number: int) -> None:
    """SPEC 9.4.2 and 9.4.3: whether a cache is the one at place `number` before the one of document `last`."""
    refs, own = last["parent"]["spans"], span.document
    # "MUST refuse, naming the field, a span whose identity is not this cache's, `turn` aside."
    known = bool(own["identity"]["fingerprint"] and last["identity"]["fingerprint"])
    for name in IDENTITY:
        stated, wanted = own["identity"][name], last["identity"][name]
        # SPEC 9.1: null says nothing but in these two, and names nothing where both sides have a fingerprint.
        unknown = name not in ("adapter", "salt_sha256") and None in (stated, wanted)
        means_nothing = known and name in ("model_id", "revision")
        need(stated == wanted or unknown or means_nothing, f"identity.{name}", "binding")
    need(digest == refs[number]["header_sha256"], "another cache than the one that was continued", "binding")
    start = refs[number - 1]["stop"] if number else 0
    need(own["tokens"]["start"] == start, "a span starts elsewhere", "binding")
    need(own["tokens"]["stop"] >= refs[number]["stop"], "a span is too short", "binding")
    need((own["parent"]["spans"] if own["parent"] else []) == refs[:number], "a span of another chain", "binding")

    def shapes(document: Document) -> list[Any]:
        tensors = [layer["tensors"] for layer in document["layers"]]
        return [{name: (t["heads"], t["head_dim"]) for name, t in layer.items()} for layer in tensors]

    need((own["dtype"], shapes(own)) == (last["dtype"], shapes(last)), "a span of other shape", "binding")
    # SPEC 9.4.4.
    need(all(layer["kind"] == "full" for layer in own["layers"]), "a sliding layer in a chain", "binding")


def read_one(folder: Path, precision: Precision) -> tuple[Cache, str]:
    """Read one cache folder by itself; also returns the SHA-256 of its Anchor's header."""
    anchor = open_shard((folder / "anchor.safetensors").read_bytes(), "anchor")
    document = anchor.document
    check_document(document)
    tensors = list(number_tensors(document))
    segments = check_segments(anchor, wanted_in_anchor(document, tensors))
    # SPEC 5.3: cache_id "is the SHA-256 of the concatenated segment digests of the Anchor's index".
    need(document["cache_id"] == sha256(b"".join(index_digests(anchor))), "cache_id is not that of the index")
    token_ids = check_tokens(document, segments)
    check_tables(segments)
    basis = open_basis(folder.parent, document, tensors) if document["transform"] else None
    if precision != "anchor" and document["residual"]:
        # SPEC 5.3: refuse one "whose `cache_id` or header digest is not the one the Anchor names".
        named = document["residual"]
        path = folder / named["name"]
        stored = path.read_bytes()
        need(len(stored) >= named["bytes"], f"{path.name} is shorter than the Anchor says", "truncated")
        residual = open_shard(stored, "residual")
        size = len(residual.header) + len(residual.data)
        need(sha256(residual.header) == named["header_sha256"], "the Residual's header", "binding")
        need(residual.document["cache_id"] == document["cache_id"], "a Residual of another cache", "binding")
        need(len(residual.header) == named["header_bytes"] and size == named["bytes"], "its sizes", "binding")
        unread = None if precision == "exact" else EXACT
        segments |= check_segments(residual, wanted_in_residual(tensors), unread=unread)
        # SPEC 6: `exact_bytes`, "those of the object from the start of the first `exact` array to its end".
        start = next((array.start for array in residual.arrays if array.name.endswith(EXACT)), len(residual.data))
        need(named["exact_bytes"] == len(residual.data) - start, "exact_bytes")
    layers: list[dict[str, npt.NDArray[Any]]] = [{} for _ in document["layers"]]
    for tensor in tensors:
        layers[tensor.layer][tensor.name] = decode_tensor(tensor, document["dtype"], segments, precision, basis)
    logits = floats(segments["logits"][0], "logits") if "logits" in segments else None
    cache = Cache(
        document=document,
        precision=precision,
        layers=layers,
        token_ids=token_ids,
        logits=logits,
        prefix_sha256=segments.get("prefix_sha256", [b""])[0],
    )
    return cache, sha256(anchor.header)


# -- SPEC 4: the container --


def sha256(data: bytes) -> str:
    """SPEC 2.5: in lower-case hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def roundup(value: int, multiple: int) -> int:
    """SPEC 2.3: "the least multiple of `multiple` not below `value`"."""
    return -(-value // multiple) * multiple


def parse_json(text: str, max_depth: int) -> Document:
    """SPEC 4.2: no duplicate keys, no deep nesting, no NaN or Infinity, nothing but spaces after the object."""
    need(text.startswith("{"), "does not start with an object")
    depth = 0
    # Strings are matched possessively and an unclosed one to its end, so that hostile text takes linear time.
    for mark in re.finditer(r'"(?:[^"\\]++|\\.)*+"?|[\[\]{}]', text, re.DOTALL):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(mark.group(), 0)
        need(depth <= max_depth, f"nesting deeper than {max_depth}")

    def pairs(items: list[tuple[str, Any]]) -> Document:
        need(len(dict(items)) == len(items), "a duplicate key")
        return dict(items)

    def integer(digits: str) -> int:
        # SPEC 10: integers, |x| < 2^53.
        need(len(digits) <= 17 and abs(int(digits)) < MAX_INTEGER, "an integer out of range")
        return int(digits)

    def number(digits: str) -> float:
        need(bool(np.isfinite(float(digits))), "a number beyond f64")
        return float(digits)

    def constant(name: str) -> Any:
        raise Refused("header", f"the constant {name}")

    try:
        value = json.loads(
            text, object_pairs_hook=pairs, parse_int=integer, parse_float=number, parse_constant=constant
        )
        text.encode()
    except ValueError as error:
        raise Refused("header", f"not JSON: {error}") from error
    need(isinstance(value, dict) and text.rstrip(" ").endswith("}"), "not one object")
    return dict(value)


def open_container(stored: bytes) -> tuple[bytes, list[Array], Document, bytes]:
    """Check a container: header, arrays, the text of the document as JSON, the data region."""
    # SPEC 4.1: "u64 header length n, n bytes of JSON, then the data region".
    need(len(stored) >= 8, "no header", "truncated")
    n = int.from_bytes(stored[:8], "little")
    need(n <= MAX_HEADER_BYTES, f"a header of {n} bytes")
    need(8 + n <= len(stored), "shorter than its header", "truncated")
    header, data = stored[: 8 + n], stored[8 + n :]
    # SPEC 4.2: "UTF-8 JSON, one object, padded with spaces so that 8 + n is a multiple of 64".
    need((8 + n) % 64 == 0, "header padding")
    try:
        text = header[8:].decode("utf-8")
    except UnicodeDecodeError as error:
        raise Refused("header", "not UTF-8") from error
    entries = parse_json(text, max_depth=8)
    # SPEC 4.4: "`__metadata__` MUST hold the key `lynxkv`, whose string is one JSON document".
    metadata = entries.pop("__metadata__", None)
    need(isinstance(metadata, dict) and all(isinstance(v, str) for v in metadata.values()), "__metadata__")
    need("lynxkv" in metadata, "not a lynxkv shard")
    # SPEC 4.3: "Arrays MUST fill the data region without overlap or gap".
    need(len(entries) <= MAX_ARRAYS, "too many arrays")
    arrays = sorted((parse_array(*entry) for entry in entries.items()), key=lambda a: (a.start, a.stop))
    need(bool(arrays) and arrays[0].start == 0, "the first array does not start at 0")
    need(all(a.stop == b.start for a, b in pairwise(arrays)), "a gap or an overlap")
    # SPEC 4.5: "The size of the object MUST be 8 + n + the end of the last array."
    need(len(data) >= arrays[-1].stop, "shorter than its arrays", "truncated")
    need(len(data) == arrays[-1].stop, "bytes after the last array")
    return header, arrays, parse_json(metadata["lynxkv"], max_depth=16), data


def open_shard(stored: bytes, role: str) -> Shard:
    """Check the container of a shard, its header digest and the fields that both documents have."""
    header, arrays, document, data = open_container(stored)
    # SPEC 4.1, table: "SHA-256 of the shard's bytes [0, 8 + n), then 32 zero bytes".
    first = arrays[0]
    need((first.name, first.dtype, first.shape) == ("header_sha256", "U8", (64,)), "no header_sha256")
    need(data[:64] == hashlib.sha256(header).digest() + bytes(32), "header_sha256", "checksum")
    check_version(document, role)
    hexadecimal(document, "cache_id")
    hexadecimal(document, "index_sha256")
    return Shard(header=header, arrays=arrays, document=document, data=data)


def check_version(document: Document, role: str) -> None:
    """SPEC 6: an unknown version or required feature is refused by name, before fields of a meaning unknown."""
    field(document, "version", str)
    # "A reader of this text reads every 1.MINOR".
    readable = re.fullmatch("1\\.(0|[1-9][0-9]{0,5})", document["version"]) is not None
    need(readable, f"version {document['version']}", "unsupported")
    required = field(document, "required", list)
    unknown = [name for name in required if name != "transform" or role != "anchor"]
    need(not unknown, f"the required feature {unknown[:1]}", "unsupported")
    need(field(document, "role", str) == role, f"role is not {role}")
    writer = field(document, "writer", dict)
    field(writer, "tool", str)
    field(writer, "version", str)
    check_strings(document)


def parse_array(name: str, entry: Any) -> Array:
    """One entry of the header; SPEC 12: "shape times item size is not the byte range" is refused."""
    need(isinstance(entry, dict) and set(entry) == {"dtype", "shape", "data_offsets"}, f"entry of {name}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    need(isinstance(dtype, str) and dtype in ITEM_BYTES, f"dtype of {name}")
    for sizes in (shape, offsets):
        need(isinstance(sizes, list) and len(sizes) <= 3, f"shape or offsets of {name}")
        need(all(type(size) is int and size >= 0 for size in sizes), f"shape or offsets of {name}")
    need(len(offsets) == 2 and offsets[0] < offsets[1], f"offsets of {name}")
    need(prod(shape) * ITEM_BYTES[dtype] == offsets[1] - offsets[0], f"shape of {name}")
    return Array(name=name, dtype=dtype, shape=tuple(shape), start=offsets[0], stop=offsets[1])


# -- SPEC 6: the document --


def field(document: Document, name: str, *types: type) -> Any:
    """SPEC 6: "MUST refuse a missing field or one of a wrong type or range". A boolean is not an integer."""
    need(name in document, f"the field {name} is missing")
    need(type(document[name]) in types, f"the field {name} has a wrong type")
    return document[name]


def integer(document: Document, name: str, low: int, high: int) -> int:
    """An integer in [low, high]."""
    value = field(document, name, int)
    need(low <= value <= high, f"the field {name} is out of range")
    return int(value)


def choice(document: Document, name: str, *values: str) -> str:
    """One of a few strings."""
    need(field(document, name, str) in values, f"the field {name} is not one of {values}")
    return str(document[name])


def hexadecimal(document: Document, name: str, *types: type) -> None:
    """A SHA-256 (SPEC 2.5)."""
    value = field(document, name, str, *types)
    need(value is None or HEX.fullmatch(value) is not None, f"the field {name} is not a digest")


def check_strings(value: Any) -> None:
    """SPEC 10: "size of a string in the document: 4,096 characters"; 4.2: no lone surrogates."""
    if isinstance(value, dict):
        for key, item in value.items():
            check_strings(key)
            check_strings(item)
    elif isinstance(value, list):
        for item in value:
            check_strings(item)
    elif isinstance(value, str):
        need(len(value) <= MAX_STRING, "a string is too long")
        need(not re.search("[\ud800-\udfff]", value), "a lone surrogate")


def check_document(document: Document) -> None:
    """SPEC 6 and 6.1: fields of the Anchor's document, their types and ranges."""
    choice(document, "dtype", "bf16", "fp16", "fp32")
    tokens = field(document, "tokens", dict)
    start, stop = integer(tokens, "start", 0, MAX_TOKENS), integer(tokens, "stop", 0, MAX_TOKENS)
    need(start < stop, "no tokens")
    hexadecimal(tokens, "sha256", type(None))
    # SPEC 6: "`stored`: whether `token_ids` is present, which needs a `sha256`".
    need(not field(tokens, "stored", bool) or tokens["sha256"] is not None, "token ids without tokens.sha256")
    codec = field(document, "codec", dict)
    field(codec, "name", str)
    field(codec, "params", dict)
    parent = field(document, "parent", dict, type(None))
    if parent is not None:
        check_parent(parent, start)
    transform = field(document, "transform", dict, type(None))
    # SPEC 6: "`transform` is required exactly where the field is not null".
    need((transform is not None) == ("transform" in document["required"]), "transform")
    if transform is not None:
        # SPEC 8.8: "`name` is `basis-`, the first 16 digits of `sha256`, `.safetensors`".
        hexadecimal(transform, "sha256")
        need(field(transform, "name", str) == f"basis-{transform['sha256'][:16]}.safetensors", "transform.name")
        integer(transform, "bytes", 64, MAX_BASIS_BYTES)
    # SPEC 9.5: "MAY be absent".
    part_of = field(document, "part_of", dict, type(None)) if "part_of" in document else None
    if part_of is not None:
        need(SIBLING.fullmatch(field(part_of, "name", str)) is not None, "part_of.name")
        integer(part_of, "stop", stop + 1, MAX_TOKENS)
    logits = field(document, "logits", dict, type(None))
    if logits is not None:
        # SPEC 9.3 and 10.
        integer(logits, "tokens", 1, MAX_LOGITS)
    codings = field(document, "codings", list)
    need(len(codings) <= MAX_CODINGS, "too many codings")
    for coding in codings:
        check_coding(coding)
        # SPEC 6: "`fp32` only with raw coding".
        need(document["dtype"] != "fp32" or coding["scheme"] == "raw", "fp32 with a coding that is not raw")
    layers = field(document, "layers", list)
    need(1 <= len(layers) <= MAX_LAYERS, "number of layers")
    for layer in layers:
        check_layer(layer, start, stop, len(codings))
        need((parent or part_of) is None or layer["kind"] == "full", "a sliding layer in a chain")
    identity = field(document, "identity", dict)
    for name in ("model_id", "revision", "adapter"):
        field(identity, name, str, type(None))
    for name in DIGESTS:
        hexadecimal(identity, name, type(None))
    need(field(identity, "turn", str, type(None)) in ("open", "none", None), "turn")
    field(identity, "rope", dict, type(None))
    residual = field(document, "residual", dict, type(None))
    if residual is not None:
        # SPEC 5.3: "residual.name MUST be a plain file name of that form".
        hexadecimal(residual, "header_sha256")
        name = f"residual-{residual['header_sha256'][:16]}.safetensors"
        need(field(residual, "name", str) == name, "residual.name")
        integer(residual, "header_bytes", 64, 8 + MAX_HEADER_BYTES)
        integer(residual, "bytes", 64, MAX_INTEGER - 1)
        integer(residual, "exact_bytes", 0, MAX_INTEGER - 1)
    # SPEC 6: "null exactly if no tensor has a `residual` or an `exact` array".
    called_for = any(tensor.has_residual or tensor.has_exact for tensor in number_tensors(document))
    need((residual is not None) == called_for, "residual is null though the codings call for one, or the reverse")


def check_parent(parent: Document, start: int) -> None:
    """SPEC 9.4: what a cache that starts at position `start` continues."""
    choice(parent, "precision", "anchor", "full", "exact", "computed")
    hexadecimal(parent, "tokens_sha256", type(None))
    spans = field(parent, "spans", list)
    need(1 <= len(spans) <= MAX_PARENT_SPANS, "number of spans")
    before = 0
    for span in spans:
        need(type(span) is dict, "a span is not an object")
        need(SIBLING.fullmatch(field(span, "name", str)) is not None, "the name of a span")
        hexadecimal(span, "header_sha256")
        # "The first span starts at position 0, each other one at the `stop` of the one before".
        before = integer(span, "stop", before + 1, start)
    need(before == start, "the spans do not end where the cache starts")
    need(len({span["name"] for span in spans}) == len(spans), "a span comes before itself")


def check_coding(coding: Any) -> None:
    """SPEC 8: "All have `scheme`, `segment_tokens`, `sink_tokens` and `exact`"."""
    need(type(coding) is dict, "a coding is not an object")
    scheme = choice(coding, "scheme", "raw", "fixed", "entropy")
    segment_tokens = integer(coding, "segment_tokens", 1, MAX_TOKENS)
    integer(coding, "sink_tokens", 0, 0 if scheme == "raw" else 1024)
    need(not field(coding, "exact", bool) or scheme != "raw", "raw coding with exact arrays")
    if scheme == "entropy":
        integer(coding, "radix", 1, 32)
    if scheme == "fixed":
        # SPEC 8.3, table.
        a, r = integer(coding, "anchor_bits", 1, 8), integer(coding, "residual_bits", 0, 8)
        need(a + r <= 8, "anchor_bits + residual_bits")
        need(re.fullmatch("[a-z0-9-]{1,32}", field(coding, "codebook", str)) is not None, "codebook")
        chunk_tokens = integer(coding, "chunk_tokens", 1, MAX_TOKENS)
        page_tokens = integer(coding, "page_tokens", 0, MAX_TOKENS)
        need(page_tokens % chunk_tokens == 0, "page_tokens is not a multiple of chunk_tokens")
        need(segment_tokens % (page_tokens or chunk_tokens) == 0, "segments are not whole pages or chunks")
        choice(coding, "group", "channel", "token")
        choice(coding, "chunk_dtype", "f32", "u8")
        field(coding, "offset", bool)


def check_layer(layer: Any, start: int, stop: int, codings: int) -> None:
    """SPEC 6.1, table."""
    need(type(layer) is dict, "a layer is not an object")
    if choice(layer, "kind", "full", "sliding") == "sliding":
        integer(layer, "window", 1, MAX_TOKENS)
        integer(layer, "start", start, stop - 1)
    else:
        need("window" not in layer, "window in a full layer")
        integer(layer, "start", start, start)
    integer(layer, "stop", stop, stop)
    tensors = field(layer, "tensors", dict)
    need(set(tensors) in ({"k", "v"}, {"latent"}), "tensors of a layer")
    for name in tensors:
        tensor = field(tensors, name, dict)
        heads, head_dim = integer(tensor, "heads", 1, MAX_HEADS), integer(tensor, "head_dim", 1, MAX_HEAD_DIM)
        need(heads * head_dim <= MAX_CHANNELS, "too many channels")
        integer(tensor, "coding", 0, codings - 1)


def number_tensors(document: Document) -> Iterator[Tensor]:
    """SPEC 4.1: "Tensors are numbered in the order layer 0 K, layer 0 V, layer 1 K and so on"."""
    number = 0
    for i, layer in enumerate(document["layers"]):
        tokens = layer["stop"] - layer["start"]
        for name in ("k", "v", "latent"):
            if name in layer["tensors"]:
                spec = layer["tensors"][name]
                coding = document["codings"][spec["coding"]]
                # SPEC 6.1: S = min(max(sink_tokens - start, 0), stop - start); n = stop - start - S.
                sinks = min(max(coding["sink_tokens"] - layer["start"], 0), tokens)
                yield Tensor(
                    number=number,
                    layer=i,
                    name=name,
                    heads=spec["heads"],
                    head_dim=spec["head_dim"],
                    coding=coding,
                    sinks=sinks,
                    coded=tokens - sinks,
                    first=layer["start"] + sinks,
                )
                number += 1


# -- SPEC 4.1: which arrays there are --


def whole(name: str, dtype: str, *shape: int) -> Wanted:
    """An array of one segment."""
    size = prod(shape) * ITEM_BYTES[dtype]
    segment = Segment(first_token=0, tokens=0, raw_bytes=size, max_raw_bytes=size)
    return Wanted(name=name, dtype=dtype, shape=shape, segments=[segment])


def wanted_in_anchor(document: Document, tensors: list[Tensor]) -> list[Wanted]:
    """SPEC 4.6: "Anchor: `header_sha256`, `index`, `prefix_sha256`, the codebooks ...; last `token_ids`."."""
    need(sum(count_segments(t) for t in tensors) <= MAX_SEGMENTS, "too many segments")
    start, stop = document["tokens"]["start"], document["tokens"]["stop"]
    tokens = stop - start
    out: list[Wanted] = []
    # SPEC 4.1: "absent if there is no whole block or the token ids of positions [0, `tokens.stop`) are not all known".
    before = start == 0 or (document["parent"] or {}).get("tokens_sha256") is not None
    if before and stop >= 256 and document["tokens"]["sha256"] is not None:
        out.append(whole("prefix_sha256", "U8", stop // 256, 32))
    books: dict[str, list[Wanted]] = {}
    for coding in document["codings"]:
        if coding["scheme"] == "fixed":
            # SPEC 4.6: "codings of one codebook name MUST call for the same arrays".
            arrays = list(codebooks(coding))
            need(
                books.setdefault(coding["codebook"], arrays) == arrays,
                "one codebook name, two sets of arrays",
            )
    for arrays in books.values():
        out.extend(arrays)
    if any(tensor.coding["scheme"] == "entropy" for tensor in tensors):
        out.append(whole("steps", "F32", len(tensors), 2))
    if document["logits"]:
        out.append(whole("logits", "F32", document["logits"]["tokens"]))
    dtype = STORED_DTYPE[document["dtype"]]
    for tensor in tensors:
        scheme, heads, dim = tensor.coding["scheme"], tensor.heads, tensor.head_dim
        if tensor.sinks:
            out.append(whole(f"{tensor.key}.sink", dtype, tensor.sinks, heads, dim))
        if scheme == "entropy" and tensor.coded:
            out.append(whole(f"{tensor.key}.mean", "BF16", heads, dim))
            out.append(whole(f"{tensor.key}.order", "U16", tensor.channels))
        if scheme == "raw":
            shape = (tensor.coded, heads, dim)
            segments = list(plan(tensor, "raw", ITEM_BYTES[dtype]))
            out.append(Wanted(name=f"{tensor.key}.raw", dtype=dtype, shape=shape, segments=segments))
        elif tensor.coded:
            segments = list(plan(tensor, "anchor"))
            out.append(Wanted(name=f"{tensor.key}.anchor", dtype="U8", shape=None, segments=segments))
    if document["tokens"]["stored"]:
        out.append(whole("token_ids", "U32", tokens))
    return out


def codebooks(coding: Document) -> Iterator[Wanted]:
    """SPEC 4.1, table: the codebook arrays of a fixed coding."""
    a, r, prefix = coding["anchor_bits"], coding["residual_bits"], f"codebook.{coding['codebook']}"
    yield whole(f"{prefix}.anchor", "F32", 2**a)
    if r:
        yield whole(f"{prefix}.full", "F32", 2 ** (a + r))
    if coding["chunk_dtype"] == "u8":
        yield whole(f"{prefix}.scale", "F32", 256)
        if coding["offset"]:
            yield whole(f"{prefix}.offset", "F32", 256)


def wanted_in_residual(tensors: list[Tensor]) -> list[Wanted]:
    """SPEC 4.6: "the `k` (or `latent`) residuals of all layers, the `v` residuals, then ... the `exact` arrays"."""
    keys_first = sorted(tensors, key=lambda tensor: tensor.name == "v")
    out = []
    for tensor in keys_first:
        if tensor.has_residual:
            segments = list(plan(tensor, "residual"))
            out.append(Wanted(name=f"{tensor.key}.residual", dtype="U8", shape=None, segments=segments))
    for tensor in keys_first:
        if tensor.has_exact:
            segments = list(plan(tensor, "exact"))
            out.append(Wanted(name=f"{tensor.key}.exact", dtype="U8", shape=None, segments=segments))
    return out


def count_segments(tensor: Tensor) -> int:
    """SPEC 5.1.2: "`ceil(n / segment_tokens)` segments"."""
    return -(-tensor.coded // int(tensor.coding["segment_tokens"]))


def plan(tensor: Tensor, part: Literal["raw", "anchor", "residual", "exact"], item_bytes: int = 1) -> Iterator[Segment]:
    """SPEC 5.1.2: "of `segment_tokens` coded tokens each, the last one possibly shorter"."""
    step = tensor.coding["segment_tokens"]
    for first in range(0, tensor.coded, step):
        tokens = min(step, tensor.coded - first)
        escapes = 0
        if part == "raw":
            size = tokens * tensor.channels * item_bytes
        elif part == "residual":
            size = residual_bytes(tensor, tokens)
        elif part == "exact":
            # SPEC 8.7: "`raw_bytes` is 2 * H * t * D".
            size = 2 * tokens * tensor.channels
        else:
            size = anchor_bytes(tensor, tokens)
            # SPEC 8.4: an entropy-coded segment may hold an escape of 8 bytes for each symbol.
            escapes = size if tensor.coding["scheme"] == "entropy" else 0
        yield Segment(first_token=first, tokens=tokens, raw_bytes=size, max_raw_bytes=size + 8 * escapes)


def anchor_bytes(tensor: Tensor, t: int) -> int:
    """Bytes of an anchor segment of t tokens, without escapes (SPEC 8.3 and 8.4)."""
    coding = tensor.coding
    if coding["scheme"] == "entropy":
        return tensor.channels * t
    p, c, g = fixed_counts(tensor, t)
    item = 4 if coding["chunk_dtype"] == "f32" else 1
    chunks = c * g * item * (2 if coding["offset"] else 1)
    codes = t * tensor.heads * row_bytes(tensor.head_dim, coding["anchor_bits"])
    return 8 * p * tensor.channels + chunks + codes


def residual_bytes(tensor: Tensor, t: int) -> int:
    """Bytes of a residual segment of t tokens (SPEC 8.3 and 8.4)."""
    if tensor.coding["scheme"] == "fixed":
        return t * tensor.heads * row_bytes(tensor.head_dim, tensor.coding["residual_bits"])
    g, b = radix_group(tensor.coding["radix"])
    return tensor.channels * row_bytes(-(-t // g), b)


def fixed_counts(tensor: Tensor, t: int) -> tuple[int, int, int]:
    """SPEC 8.3: "p = ceil(t / P) pages and c = ceil(t / C) chunks", and G."""
    page_tokens = tensor.coding["page_tokens"]
    pages = -(-t // page_tokens) if page_tokens else 0
    group = tensor.channels if tensor.coding["group"] == "channel" else 1
    return pages, -(-t // tensor.coding["chunk_tokens"]), group


# -- SPEC 5: integrity --


def index_digests(shard: Shard) -> list[bytes]:
    """Bytes 32-63 of each index entry."""
    index = shard.data[shard.arrays[1].start : shard.arrays[1].stop]
    return [index[at + 32 : at + 64] for at in range(0, len(index), 64)]


def check_segments(shard: Shard, wanted: list[Wanted], *, unread: str | None = None) -> dict[str, list[bytes]]:
    """Check arrays, index and digests of a shard; return the decompressed segments of each array.

    Of arrays whose name ends in `unread` only the index entries are checked.
    """
    total = sum(len(array.segments) for array in wanted)
    need(1 <= total <= MAX_SEGMENTS, "number of segments")
    # SPEC 4.6 and 4.7: the arrays are those the document calls for, in this order, pads counted from 0.
    heads = [whole("header_sha256", "U8", 64), whole("index", "U8", total, 64)]
    position, pads, places = 0, 0, []
    for want in heads + wanted:
        need(position < len(shard.arrays), f"the array {want.name} is missing")
        array = shard.arrays[position]
        need((array.name, array.dtype) == (want.name, want.dtype), f"{array.name} instead of {want.name}")
        need(array.shape == want.shape if want.shape else len(array.shape) == 1, f"shape of {array.name}")
        places.append(position)
        position += 1
        # SPEC 4.3: "An array whose size is not a multiple of 64 is followed by a pad array", of zeros.
        if pad_bytes := -array.stop % 64:
            need(position < len(shard.arrays), "a pad array is missing")
            pad = shard.arrays[position]
            need((pad.name, pad.dtype, pad.shape) == (f"pad.{pads}", "U8", (pad_bytes,)), f"pad.{pads}")
            need(not any(shard.data[pad.start : pad.stop]), f"pad.{pads} is not zero", "content")
            position, pads = position + 1, pads + 1
    need(position == len(shard.arrays), "an array that the document does not call for")
    # SPEC 5.1.4: "`index_sha256` in the document is the SHA-256 of the `index` array."
    index = shard.data[shard.arrays[1].start : shard.arrays[1].stop]
    need(sha256(index) == shard.document["index_sha256"], "index_sha256", "checksum")
    entries = struct.iter_unpack("<QIIIIB7s32s", index)
    out = {}
    for place, want in zip(places[2:], wanted, strict=True):
        array = shard.arrays[place]
        packed = want.name.endswith((".anchor", ".residual", EXACT)) and want.shape is None
        content = unread is None or not want.name.endswith(unread)
        found, at = [], array.start
        for segment, entry in zip(want.segments, entries, strict=False):
            offset, stored_bytes, raw_bytes, number, first_token, compression, reserved, digest = entry
            where = f"{want.name}, token {segment.first_token}"
            need(number == place and first_token == segment.first_token, f"index entry of {where}")
            need(not any(reserved), f"reserved bytes of {where}")
            # SPEC 5.1.1: where the segment starts, and the zeros before it.
            need(offset == at and offset + stored_bytes <= array.stop, f"offset of {where}")
            # SPEC 10: "raw_bytes: 64 MiB"; SPEC 12: it "must equal what the shapes imply", plus the escapes.
            need(raw_bytes <= MAX_RAW_BYTES, f"raw_bytes of {where}")
            need(segment.raw_bytes <= raw_bytes <= segment.max_raw_bytes, f"raw_bytes of {where}")
            need((raw_bytes - segment.raw_bytes) % 8 == 0, f"raw_bytes of {where}")
            # SPEC 5.1.2: "Only `anchor`, `residual` and `exact` segments MAY be compressed."
            need(compression <= (1 if packed else 0), f"compression of {where}")
            need(stored_bytes == raw_bytes or (compression == 1 and stored_bytes > 0), f"stored_bytes of {where}")
            end = offset + stored_bytes
            at = roundup(end, 64) if packed else end
            need(at <= array.stop, f"the array ends before {where} does")
            if content:
                # SPEC 5.2: "The stored bytes are hashed, so that nothing unchecked reaches a decompressor."
                stored = shard.data[offset:end]
                need(hashlib.sha256(stored).digest() == digest, where, "checksum")
                found.append(decompress(stored, raw_bytes, where) if compression else stored)
                need(not any(shard.data[end:at]), f"bytes after {where} are not zero", "content")
        need(at == array.stop, f"the end of {want.name}")
        out[want.name] = found
    return out


def decompress(stored: bytes, raw_bytes: int, where: str) -> bytes:
    """SPEC 5.1.3: "one frame without dictionary, with its content size, and a window of at most 8 MiB"."""
    import zstandard

    need(stored[:4] == b"\x28\xb5\x2f\xfd", f"no zstd frame in {where}", "content")
    try:
        frame = zstandard.get_frame_parameters(stored)
        need(frame.content_size == raw_bytes, f"content size of {where}", "content")
        need(frame.window_size <= MAX_WINDOW_BYTES, f"window of {where}", "content")
        need(frame.dict_id == 0, f"a dictionary for {where}", "content")
        decompressor = zstandard.ZstdDecompressor()
        out = decompressor.decompress(stored, max_output_size=raw_bytes, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise Refused("content", f"zstd frame of {where}: {error}") from error
    need(len(out) == raw_bytes, f"decompressed size of {where}", "content")
    return bytes(out)


def check_tokens(document: Document, segments: dict[str, list[bytes]]) -> npt.NDArray[np.uint32] | None:
    """The token ids against `tokens.sha256` (SPEC 6)."""
    if "token_ids" not in segments:
        return None
    ids = segments["token_ids"][0]
    need(sha256(ids) == document["tokens"]["sha256"], "tokens.sha256", "checksum")
    return np.frombuffer(ids, "<u4").astype(np.uint32)


def check_sequence(document: Document, token_ids: npt.NDArray[np.uint32], prefix_sha256: bytes) -> None:
    """`parent.tokens_sha256` (SPEC 9.4) and the prefix digests (SPEC 9.2) against the ids of all positions."""
    ids, start = token_ids.astype("<u4").tobytes(), document["tokens"]["start"]
    before = (document["parent"] or {}).get("tokens_sha256")
    need(before is None or sha256(ids[: 4 * start]) == before, "parent.tokens_sha256", "checksum")
    identity = document["identity"]
    words = [identity[name] or "" for name in ("fingerprint", "adapter", "salt_sha256")]
    digest = hashlib.sha256("\n".join(["lynxkv-prefix-1", *words]).encode()).digest()
    for i in range(len(prefix_sha256) // 32):
        digest = hashlib.sha256(digest + ids[1024 * i : 1024 * (i + 1)]).digest()
        need(prefix_sha256[32 * i : 32 * (i + 1)] == digest, f"prefix digest {i}", "checksum")


def check_tables(segments: dict[str, list[bytes]]) -> None:
    """SPEC 8.6: codebooks, `steps` and logits "MUST be finite", also those that nothing uses."""
    for name, data in segments.items():
        if name in ("steps", "logits") or name.startswith("codebook."):
            floats(data[0], name)


# -- SPEC 8: codings --


def planes(b: int) -> list[int]:
    """SPEC 8.1: "those of 8, 4, 2, 1 whose sum is b, largest first"."""
    return [w for w in (8, 4, 2, 1) if b & w]


def row_bytes(m: int, b: int) -> int:
    """SPEC 8.1: roundup(m, 8) * w / 8 bytes a row for each plane."""
    return roundup(m, 8) * b // 8


def unpack(data: Bytes, rows: int, m: int, b: int) -> Codes:
    """SPEC 8.1: codes [rows, m] of b bits from packed bytes, plane by plane."""
    codes = np.zeros((rows, roundup(m, 8)), np.int64)
    at = 0
    for w in planes(b):
        s = roundup(m, 8) * w // 8
        plane = data[at : at + rows * s].reshape(rows, s)
        at += rows * s
        # "byte k holds the codes k, k + s, k + 2s, ..., the j-th in its bits [j * w, (j + 1) * w)";
        # "the first w takes the most significant bits of the code".
        fields = np.concatenate([(plane >> (j * w)) & (2**w - 1) for j in range(8 // w)], axis=1)
        codes = (codes << w) | fields
    need(not codes[:, m:].any(), "codes past the end of a row", "content")
    return codes[:, :m]


def radix_group(radix: int) -> tuple[int, int]:
    """SPEC 8.4: "let (g, b) minimise b / g subject to R^g <= 2^b, the smaller g among equals"."""
    pairs = [(g, b) for g in range(1, 9) for b in range(1, 9) if radix**g <= 2**b]
    # b / g in units of 1 / 840, the least common multiple of 1..8, to compare exactly.
    return min(pairs, key=lambda pair: (pair[1] * 840 // pair[0], pair[0]))


def unpack_digits(data: Bytes, rows: int, t: int, radix: int) -> Codes:
    """SPEC 8.4: "code j is the sum over e < g of d[e * u + j] * R^e, digits at t and beyond being zero"."""
    g, b = radix_group(radix)
    codes = unpack(data, rows, -(-t // g), b)
    need(bool((codes < radix**g).all()), "a residual code that is not below R^g", "content")
    digits = np.concatenate([codes // radix**e % radix for e in range(g)], axis=1)
    need(not digits[:, t:].any(), "digits past the end of a row", "content")
    return digits[:, :t]


def finite(values: F32, what: str) -> F32:
    """SPEC 8.6: "MUST be finite; a reader MUST refuse others"."""
    need(bool(np.isfinite(values).all()), f"{what} is not finite", "content")
    return values


def floats(data: bytes, what: str) -> F32:
    """Stored f32 values, finite."""
    return finite(np.frombuffer(data, "<f4").astype(np.float32), what)


def bf16_to_f32(bits: npt.NDArray[np.uint16]) -> F32:
    """A bf16 is the upper half of an f32."""
    return np.left_shift(bits, 16, dtype=np.uint32).view(np.float32)


def round_to(values: F32, dtype: str) -> npt.NDArray[np.uint16]:
    """SPEC 8.5, in integers: nearest, ties to even, subnormals kept, saturating, NaN to +0."""
    x = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.int64)
    m = x & 0x7FFFFFFF
    if dtype == "bf16":
        y = np.minimum((m + 0x7FFF + ((m >> 16) & 1)) >> 16, 0x7F7F)
    else:
        # From 2^-14 on fp16 has the exponent of f32 less 112 and 13 fewer bits.
        normal = (m - (112 << 23) + 0xFFF + ((m >> 13) & 1)) >> 13
        # Below, it counts units of 2^-24: the significand shifted by 126 - exponent; beyond 24 all is zero.
        shift = np.clip(126 - (m >> 23), 1, 25)
        significand = (m & 0x7FFFFF) | 0x800000
        subnormal = (significand + (1 << (shift - 1)) - 1 + ((significand >> shift) & 1)) >> shift
        y = np.minimum(np.where(m >= 113 << 23, normal, subnormal), 0x7BFF)
    y |= (x >> 16) & 0x8000
    return np.where(m > 0x7F800000, 0, y).astype(np.uint16)


def open_basis(folder: Path, document: Document, tensors: list[Tensor]) -> Basis:
    """SPEC 8.8: the basis that a cache names, from the folder that the cache lies in."""
    named = document["transform"]
    stored = (folder / named["name"]).read_bytes()
    same = len(stored) == named["bytes"] and sha256(stored) == named["sha256"]
    need(same, "the basis is not the one that the cache names", "checksum")
    _, arrays, described, data = open_container(stored)
    check_version(described, "basis")
    hexadecimal(described, "fingerprint", type(None))
    field(described, "model_id", str, type(None))
    by_name = {array.name: array for array in arrays}

    def take(name: str, dtype: str, kind: str) -> npt.NDArray[Any]:
        array = by_name.get(name)
        need(array is not None and array.dtype == dtype and len(array.shape) == 3, f"the basis' array {name}")
        assert array is not None
        return np.frombuffer(data[array.start : array.stop], kind).reshape(array.shape)

    basis = Basis(rows={}, rope_of={}, ropes={})
    layers = field(described, "layers", list)
    need(len(layers) <= MAX_LAYERS, "layers of the basis")
    for i, layer in enumerate(layers):
        need(isinstance(layer, dict), "a layer of the basis")
        for name in ("k", "v"):
            key = f"layer.{i}.{name}"
            rope = field(field(layer, name, dict), "rope", str, type(None))
            rows = take(key, "I8", "i1").astype(np.int64)
            need(rows.shape[1] == rows.shape[2] and rows.shape[0] * rows.shape[1] <= MAX_CHANNELS, f"rows of {key}")
            basis.rows[key], basis.rope_of[key] = rows, rope
            if rope is not None and rope not in basis.ropes:
                coarse, fine = (take(f"rope.{rope}.{part}", "F32", "<f4") for part in ("coarse", "fine"))
                whole = fine.shape[0] == 64 and fine.shape[2] == 2 and coarse.shape[1:] == fine.shape[1:]
                need(whole, f"tables of rope {rope}")
                basis.ropes[rope] = finite(coarse, f"rope {rope}"), finite(fine, f"rope {rope}")
    # "A reader MUST refuse a basis without rows for a tensor, or without angles for its positions."
    for tensor in tensors:
        if tensor.coding["scheme"] != "entropy" or not tensor.coded:
            continue
        rows = basis.rows.get(tensor.key, np.empty((0, 0, 0), np.int64))
        need(rows.shape[0] * rows.shape[1] == tensor.channels, f"rows for {tensor.key}", "binding")
        rope = basis.rope_of[tensor.key]
        if rope is not None:
            coarse, fine = basis.ropes[rope]
            fits = 2 * fine.shape[1] <= tensor.head_dim and tensor.first + tensor.coded <= 64 * len(coarse)
            need(fits, f"angles for {tensor.key}", "binding")
    return basis


def to_channels(tensor: Tensor, first: int, index: Codes, factor: np.float32, mean: F32, basis: Basis) -> F32:
    """SPEC 8.8: values [t, N] from the components' whole numbers [t, N]; the first token has the position `first`."""
    rows = basis.rows[tensor.key]
    blocks, n, _ = rows.shape
    # "S = the sum over y of index[b, y] * M[b, y, c]", exact: |index| < 2^24, |M| <= 2^7, n <= 2^16.
    by_block = index.reshape(-1, blocks, n).transpose(1, 0, 2)
    sums = (by_block @ rows).transpose(1, 0, 2).reshape(-1, tensor.channels)
    # "value = fl(fl(fl(S) * step) + m)"
    value = sums.astype(np.float32) * factor + mean
    rope = basis.rope_of[tensor.key]
    if rope is None:
        return value
    coarse, fine = basis.ropes[rope]
    position = np.arange(first, first + len(value))
    (ca, sa), (cb, sb) = (np.moveaxis(part[:, None], -1, 0) for part in (coarse[position // 64], fine[position % 64]))
    # "cos = fl(fl(ca * cb) - fl(sa * sb))", "sin = fl(fl(sa * cb) + fl(ca * sb))"
    cos, sin = ca * cb - sa * sb, sa * cb + ca * sb
    m = fine.shape[1]
    heads = value.reshape(-1, tensor.heads, tensor.head_dim)
    x, y = heads[..., :m].copy(), heads[..., m : 2 * m].copy()
    heads[..., :m], heads[..., m : 2 * m] = x * cos - y * sin, y * cos + x * sin
    return heads.reshape(-1, tensor.channels)


def decode_tensor(
    tensor: Tensor, dtype: str, segments: dict[str, list[bytes]], precision: Precision, basis: Basis | None
) -> npt.NDArray[Any]:
    """Decode one tensor to [H, T, D]: its sink tokens, then its coded tokens."""
    heads, dim, scheme = tensor.heads, tensor.head_dim, tensor.coding["scheme"]
    parts = [stored_values(data, tensor, dtype) for data in segments.get(f"{tensor.key}.sink", [])]
    anchors = segments.get(f"{tensor.key}.{'raw' if scheme == 'raw' else 'anchor'}", [])
    # SPEC 8: "Where a coding has no residual codes, full is the same as anchor."
    full = precision != "anchor" and tensor.has_residual
    residuals = segments[f"{tensor.key}.residual"] if full else [None] * len(anchors)
    # "where it has no exact arrays, exact is the same as full."
    exact = precision == "exact" and tensor.has_exact
    corrections = segments[f"{tensor.key}.exact"] if exact else [None] * len(anchors)
    if scheme == "entropy":
        steps = floats(segments["steps"][0], "steps").reshape(-1, 2)[tensor.number]
        need(tensor.coded == 0 or bool((steps > 0).all()), f"steps of {tensor.key}", "content")
    elif "steps" in segments:
        steps = floats(segments["steps"][0], "steps").reshape(-1, 2)[tensor.number]
        need(not steps.any(), f"steps of {tensor.key} are not zero", "content")
    at = 0
    for anchor, residual, correction in zip(anchors, residuals, corrections, strict=True):
        t = min(tensor.coding["segment_tokens"], tensor.coded - at)
        at += t
        if scheme == "raw":
            parts.append(stored_values(anchor, tensor, dtype))
            continue
        if scheme == "fixed":
            decoded = decode_fixed(tensor, t, anchor, residual, segments)
        else:
            decoded = decode_entropy(tensor, t, anchor, residual, segments, basis, tensor.first + at - t)
        values = round_to(decoded, dtype)
        parts.append(values if correction is None else correct(tensor, values, correction, dtype))
    by_token = np.concatenate([part.reshape(-1, heads, dim) for part in parts])
    return np.ascontiguousarray(by_token.transpose(1, 0, 2))


def stored_values(data: bytes, tensor: Tensor, dtype: str) -> npt.NDArray[Any]:
    """SPEC 8.2: "the tokens' values, [tokens, H, D], in the declared dtype", finite after 8.6."""
    if dtype == "fp32":
        return floats(data, tensor.key)
    return finite_bits(np.frombuffer(data, "<u2").astype(np.uint16), tensor.key, dtype)


def finite_bits(bits: npt.NDArray[np.uint16], what: str, dtype: str) -> npt.NDArray[np.uint16]:
    """Patterns of bf16 or fp16 whose exponent field is not all ones."""
    exponent = 0x7F80 if dtype == "bf16" else 0x7C00
    need(not ((bits & exponent) == exponent).any(), f"{what} is not finite", "content")
    return bits


def decode_fixed(
    tensor: Tensor, t: int, anchor: bytes, residual: bytes | None, segments: dict[str, list[bytes]]
) -> F32:
    """SPEC 8.3: one segment of t tokens, [t, N]."""
    coding, n = tensor.coding, tensor.channels
    a, r, prefix = coding["anchor_bits"], coding["residual_bits"], f"codebook.{coding['codebook']}"
    book = {
        name: floats(segments[f"{prefix}.{name}"][0], f"{prefix}.{name}")
        for name in ("anchor", "full", "scale", "offset")
        if f"{prefix}.{name}" in segments
    }
    p, c, g = fixed_counts(tensor, t)
    at = 0

    def take(count: int) -> bytes:
        nonlocal at
        at += count
        return anchor[at - count : at]

    def chunk_values(name: str) -> F32:
        if coding["chunk_dtype"] == "f32":
            values = floats(take(4 * c * g), f"chunk {name} of {tensor.key}")
        else:
            values = book[name][np.frombuffer(take(c * g), np.uint8)]
        by_token: F32 = np.broadcast_to(values.reshape(c, g), (c, n))[np.arange(t) // coding["chunk_tokens"]]
        return by_token

    if p:
        page = np.arange(t) // coding["page_tokens"]
        mu = floats(take(4 * p * n), f"page means of {tensor.key}").reshape(p, n)[page]
        sigma = floats(take(4 * p * n), f"page scales of {tensor.key}").reshape(p, n)[page]
    scale = chunk_values("scale")
    offset = chunk_values("offset") if coding["offset"] else np.zeros((t, n), np.float32)
    codes = unpack(np.frombuffer(anchor[at:], np.uint8), t * tensor.heads, tensor.head_dim, a).reshape(t, n)
    value = book["anchor"][codes]
    if residual is not None:
        # "full V = codebook.full[A * 2^r + B]"
        more = unpack(np.frombuffer(residual, np.uint8), t * tensor.heads, tensor.head_dim, r).reshape(t, n)
        value = book["full"][(codes << r) + more]
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        if p:
            # "scale = fl(s * sigma)", "offset = fl(fl(o * sigma) + mu)"
            scale, offset = scale * sigma, offset * sigma + mu
        # "value = round(fl(fl(V * scale) + offset))"
        result: F32 = value * scale + offset
    return result


def decode_entropy(
    tensor: Tensor,
    t: int,
    anchor: bytes,
    residual: bytes | None,
    segments: dict[str, list[bytes]],
    basis: Basis | None,
    first: int,
) -> F32:
    """SPEC 8.4 and 8.8: one segment of t tokens from position `first` on, [t, N]."""
    n, radix = tensor.channels, tensor.coding["radix"]
    step, half_step = np.frombuffer(segments["steps"][0], "<f4").reshape(-1, 2)[tensor.number]
    mean = bf16_to_f32(np.frombuffer(segments[f"{tensor.key}.mean"][0], "<u2").astype(np.uint16))
    finite(mean, f"{tensor.key}.mean")
    # "`order` MUST be a permutation of [0, N)"
    order = np.frombuffer(segments[f"{tensor.key}.order"][0], "<u2").astype(np.int64)
    need(bool((np.sort(order) == np.arange(n)).all()), f"{tensor.key}.order is not a permutation", "content")
    # "A symbol b < 255 is the index q = b - 127."
    symbols = np.frombuffer(anchor[: n * t], np.uint8)
    q = symbols.astype(np.int64) - 127
    # "A symbol 255 is an escape: there are exactly k of them, at the positions listed", |q| < 2^18.
    escapes = np.frombuffer(anchor[n * t :], np.dtype([("position", "<u4"), ("value", "<i4")]))
    same = np.array_equal(np.flatnonzero(symbols == 255), escapes["position"].astype(np.int64))
    need(same, f"escapes of {tensor.key}", "content")
    q[escapes["position"]] = escapes["value"]
    need(bool((np.abs(q) < 2**18).all()), f"an escape of {tensor.key} is out of range", "content")
    rows = q.reshape(n, t)
    # "anchor value = round(fl(fl(q * step) + m))", "full j = 2 * (q * R + d) - (R - 1)"
    factor = step
    if residual is not None:
        digits = unpack_digits(np.frombuffer(residual, np.uint8), n, t, radix)
        rows, factor = 2 * (rows * radix + digits) - (radix - 1), half_step
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        if basis is not None:
            # "row y is component `order[y]`"
            index = np.empty((t, n), np.int64)
            index[:, order] = rows.T
            return to_channels(tensor, first, index, factor, mean, basis)
        by_row = rows.astype(np.float32) * factor + mean[order][:, None]
    # "row y is channel `order[y]`"
    values = np.empty((t, n), np.float32)
    values[:, order] = by_row.T
    return values


def correct(tensor: Tensor, full: npt.NDArray[np.uint16], data: bytes, dtype: str) -> npt.NDArray[np.uint16]:
    """SPEC 8.7: the original's patterns, [t, N], from the full value's and an exact segment."""
    t, heads, dim = len(full), tensor.heads, tensor.head_dim
    # "Let F be the 16-bit patterns of the segment's full values, ..., in the order [H, t, D]"
    f = full.reshape(t, heads, dim).transpose(1, 0, 2).reshape(-1).astype(np.int64)
    # "The segment is their m low bytes, then their m high bytes."
    low, high = np.frombuffer(data, np.uint8).astype(np.int64).reshape(2, -1)
    # "sorted by the exponent field of their F (bits 7 to 14 for bf16, 10 to 14 for fp16), ascending and stable"
    exponent = (f >> 7) & 0xFF if dtype == "bf16" else (f >> 10) & 0x1F
    z = np.empty_like(f)
    z[np.argsort(exponent, kind="stable")] = low + 256 * high
    # "z = 2 s if s >= 0, else -2 s - 1"
    s = np.where(z % 2 == 0, z // 2, -(z + 1) // 2)
    # "ord(b) = b if b < 0x8000, else 0x7FFF - b", its own inverse but for the sign; "mod 2^16".
    ordinal = np.where(f < 0x8000, f, 0x7FFF - f) + s
    ordinal = (ordinal + 0x8000) % 0x10000 - 0x8000
    original = np.where(ordinal >= 0, ordinal, 0x7FFF - ordinal).astype(np.uint16)
    finite_bits(original, f"a corrected value of {tensor.key}", dtype)
    return original.reshape(heads, t, dim).transpose(1, 0, 2).reshape(t, -1)


def main() -> int:
    """Print what a cache folder decodes to, as JSON."""
    if len(sys.argv) != 2:
        print("usage: reference_reader.py NAME.lynx", file=sys.stderr)
        return 2
    try:
        summary: Document = {"path": sys.argv[1], "tensors": {}}
        for precision in PRECISIONS:
            cache = read(sys.argv[1], precision)
            summary["dtype"], summary["tokens"] = cache.document["dtype"], cache.document["tokens"]
            for i, layer in enumerate(cache.layers):
                for name, values in layer.items():
                    entry = summary["tensors"].setdefault(f"layer.{i}.{name}", {"shape": values.shape})
                    entry[precision] = sha256(values.astype(values.dtype.newbyteorder("<")).tobytes())
    except Refused as refused:
        print(json.dumps({"path": sys.argv[1], "refused": refused.kind, "message": refused.message}))
        return 1
    print(json.dumps(summary, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
