"""The lynxkv document, between JSON and `CacheHeader` (SPEC 6 to 8)."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import Any, get_args

from lynxkv.errors import HeaderError, UnsupportedFormatError
from lynxkv.format import limits, strict_json
from lynxkv.layout import (
    DTYPE_BYTES,
    CacheHeader,
    Coding,
    EntropyCoding,
    FixedCoding,
    Identity,
    LayerKind,
    LayerSpec,
    Parent,
    ParentPrecision,
    PartOf,
    RawCoding,
    ResidualRef,
    SpanRef,
    TensorName,
    TensorSpec,
    TokenRange,
    TransformRef,
)
from lynxkv.packing import MAX_RADIX

VERSION = "1.0"
# Of the same major version: what a later minor one adds may be ignored, or is a required feature.
_READABLE = re.compile(r"1\.(?:0|[1-9][0-9]{0,5})")
ANCHOR_NAME = "anchor.safetensors"
TRANSFORM = "transform"
FEATURES: dict[str, tuple[str, ...]] = {"anchor": (TRANSFORM,), "residual": ()}
"""Required features that are known, by role."""
_HEX64 = re.compile(r"[0-9a-f]{64}")
_CODEBOOK = re.compile(r"[a-z0-9-]{1,32}")
# A plain name: nothing that a path, a URL, a shell or a file system takes for more than a name.
_SIBLING = re.compile(r"[^./\\%?#:*\[\]\x00-\x1f\x7f][^/\\%?#:*\[\]\x00-\x1f\x7f]{0,249}\.lynx")
_TENSOR_ORDER: tuple[TensorName, ...] = get_args(TensorName)


def residual_name(header_sha256: str) -> str:
    """The Residual's file name (SPEC 5.3)."""
    return f"residual-{header_sha256[:16]}.safetensors"


def span_name(last: str, number: int) -> str:
    """The name of a span of the chain whose last one has the name `last` (SPEC 9.5)."""
    return f"{last.removesuffix('.lynx')}.{number:04d}.lynx"


def is_sibling_name(name: str) -> bool:
    """Whether a cache of this name can be another one's parent (SPEC 9.4)."""
    return _SIBLING.fullmatch(name) is not None


def basis_file(sha256: str) -> str:
    """The file name of a basis (SPEC 8.8)."""
    return f"basis-{sha256[:16]}.safetensors"


class Fields:
    """Typed access to one JSON object; errors say where they are."""

    def __init__(self, value: Any, where: str) -> None:
        if not isinstance(value, dict):
            raise HeaderError(f"{where} is not an object")
        self.value: dict[str, Any] = value
        self.where = where

    def any(self, name: str) -> Any:
        if name not in self.value:
            raise HeaderError(f"{self.where} has no {name!r}")
        return self.value[name]

    def integer(self, name: str, low: int, high: int) -> int:
        value = self.any(name)
        if type(value) is not int or not low <= value <= high:
            raise HeaderError(f"{self.where}: {name} is {value!r}, not an integer in [{low}, {high}]")
        return value

    def string(self, name: str) -> str:
        value = self.any(name)
        if not isinstance(value, str):
            raise HeaderError(f"{self.where}: {name} is not a string")
        return value

    def hex64(self, name: str) -> str:
        value = self.string(name)
        if not _HEX64.fullmatch(value):
            raise HeaderError(f"{self.where}: {name} is not a SHA-256 in lower-case hex")
        return value

    def boolean(self, name: str) -> bool:
        value = self.any(name)
        if not isinstance(value, bool):
            raise HeaderError(f"{self.where}: {name} is not true or false")
        return value

    def one_of(self, name: str, choices: tuple[str, ...]) -> Any:
        value = self.string(name)
        if value not in choices:
            raise HeaderError(f"{self.where}: {name} is {value!r}, not one of {', '.join(choices)}")
        return value

    def object(self, name: str) -> Fields:
        return Fields(self.any(name), f"{self.where}.{name}")

    def optional(self, name: str, read: Any) -> Any:
        return None if self.any(name) is None else read(name)

    def list(self, name: str, most: int) -> list[Any]:
        value = self.any(name)
        if not isinstance(value, list) or len(value) > most:
            raise HeaderError(f"{self.where}: {name} is not a list of at most {most}")
        return value


def parse_common(text: str, *, role: str, what: str) -> Fields:
    """Parse a document and check what both shards have: version, role, required features.

    Raises:
        HeaderError: malformed.
        UnsupportedFormatError: another version or an unknown required feature.
    """
    document = strict_json.loads(
        text, what=f"{what}: document", max_depth=limits.MAX_DOCUMENT_DEPTH, max_string=limits.MAX_STRING
    )
    fields = Fields(document, what)
    check_version(fields, role=role, features=FEATURES[role])
    return fields


def check_version(fields: Fields, *, role: str, features: tuple[str, ...]) -> None:
    """Check what all documents have: version, role, required features, writer.

    Raises:
        HeaderError: malformed, or of another role.
        UnsupportedFormatError: another version, or a required feature that is none of `features`.
    """
    what = fields.where
    version = fields.string("version")
    if not _READABLE.fullmatch(version):
        raise UnsupportedFormatError(
            f"{what}: format version {version[:16]} is not 1.x",
            hint="read it with the lynxkv release that wrote it",
        )
    for feature in fields.list("required", limits.MAX_ARRAYS):
        if feature not in features:
            raise UnsupportedFormatError(f"{what}: requires the feature {feature!r}", hint="a newer lynxkv may know it")
    if fields.string("role") != role:
        raise HeaderError(f"{what}: is a {fields.string('role')!r}, not the {role!r} that is wanted")
    for name in ("tool", "version"):
        fields.object("writer").string(name)


def parse_anchor_document(text: str, *, what: str) -> CacheHeader:
    """The Anchor's document as a `CacheHeader`.

    Raises:
        HeaderError: a field is missing, of a wrong type or out of range.
        UnsupportedFormatError: another version or an unknown required feature.
    """
    fields = parse_common(text, role="anchor", what=what)
    tokens = fields.object("tokens")
    span = TokenRange(
        start=tokens.integer("start", 0, limits.MAX_TOKENS),
        stop=tokens.integer("stop", 1, limits.MAX_TOKENS),
        sha256=tokens.optional("sha256", tokens.hex64),
        stored=tokens.boolean("stored"),
    )
    if span.start >= span.stop or (span.stored and span.sha256 is None):
        raise HeaderError(f"{what}: the token range [{span.start}, {span.stop}) is empty, or stored ids have no digest")
    dtype = fields.one_of("dtype", tuple(DTYPE_BYTES))
    codings = tuple(
        _coding(Fields(item, f"{what}.codings[{i}]"), dtype)
        for i, item in enumerate(fields.list("codings", limits.MAX_CODINGS))
    )
    layers = tuple(
        _layer(Fields(item, f"{what}.layers[{i}]"), span, len(codings))
        for i, item in enumerate(fields.list("layers", limits.MAX_LAYERS))
    )
    if not layers:
        raise HeaderError(f"{what}: there are no layers")
    codec = fields.object("codec")
    header = CacheHeader(
        version=fields.string("version"),
        cache_id=fields.hex64("cache_id"),
        index_sha256=fields.hex64("index_sha256"),
        dtype=dtype,
        tokens=span,
        codec_name=codec.string("name"),
        codec_params=codec.object("params").value,
        codings=codings,
        layers=layers,
        residual=fields.optional("residual", lambda name: _residual(fields.object(name))),
        identity=_identity(fields.object("identity")),
        logits_tokens=fields.optional("logits", lambda name: _logits(fields.object(name))),
        parent=fields.optional("parent", lambda name: _parent(fields.object(name), span)),
        transform=fields.optional("transform", lambda name: _transform(fields.object(name))),
        part_of=_part_of(fields.object("part_of"), span) if fields.value.get("part_of") is not None else None,
        writer=fields.object("writer").value,
    )
    if (header.transform is not None) != (TRANSFORM in fields.list("required", limits.MAX_ARRAYS)):
        raise HeaderError(f"{what}: the feature {TRANSFORM!r} is required exactly where a transform is named")
    if (header.parent is not None or header.part_of is not None) and any(layer.kind != "full" for layer in layers):
        raise HeaderError(f"{what}: a cache with sliding layers cannot be part of a chain")
    segments = sum(-(-ref.coded_tokens // ref.coding.segment_tokens) for ref in header.tensors)
    if segments > limits.MAX_SEGMENTS:
        raise HeaderError(f"{what}: {segments} segments are over {limits.MAX_SEGMENTS}")
    needed = any((ref.coding.has_residual or ref.coding.exact) and ref.coded_tokens for ref in header.tensors)
    if needed != (header.residual is not None):
        raise HeaderError(f"{what}: {'no' if needed else 'a'} Residual is named, though the codings imply otherwise")
    return header


def render_anchor_document(header: CacheHeader) -> dict[str, Any]:
    """The JSON object of the Anchor's document."""
    part_of = {"part_of": asdict(header.part_of)} if header.part_of else {}
    return {
        "version": header.version,
        "role": "anchor",
        "cache_id": header.cache_id,
        "required": [TRANSFORM] if header.transform else [],
        "index_sha256": header.index_sha256,
        "dtype": header.dtype,
        "tokens": asdict(header.tokens),
        "codec": {"name": header.codec_name, "params": header.codec_params},
        "codings": [asdict(coding) for coding in header.codings],
        "layers": [_without_none(asdict(layer)) for layer in header.layers],
        "residual": asdict(header.residual) if header.residual else None,
        "identity": asdict(header.identity),
        "writer": header.writer,
        "parent": asdict(header.parent) if header.parent else None,
        **part_of,
        "transform": asdict(header.transform) if header.transform else None,
        "logits": {"tokens": header.logits_tokens} if header.logits_tokens else None,
    }


def render_residual_document(header: CacheHeader, index_sha256: str) -> dict[str, Any]:
    """The JSON object of the Residual's document (SPEC 7)."""
    return {
        "version": header.version,
        "role": "residual",
        "cache_id": header.cache_id,
        "required": [],
        "index_sha256": index_sha256,
        "writer": header.writer,
    }


def _coding(fields: Fields, dtype: str) -> Coding:
    scheme = fields.one_of("scheme", ("raw", "fixed", "entropy"))
    segment_tokens = fields.integer("segment_tokens", 1, limits.MAX_TOKENS)
    exact = fields.boolean("exact")
    if scheme == "raw":
        fields.integer("sink_tokens", 0, 0)
        if exact:
            raise HeaderError(f"{fields.where}: raw coding is exact by itself")
        return RawCoding(segment_tokens=segment_tokens)
    if dtype == "fp32":
        raise HeaderError(f"{fields.where}: dtype fp32 goes with raw coding only")
    sink_tokens = fields.integer("sink_tokens", 0, limits.MAX_SINK_TOKENS)
    if scheme == "entropy":
        return EntropyCoding(
            radix=fields.integer("radix", 1, MAX_RADIX),
            segment_tokens=segment_tokens,
            sink_tokens=sink_tokens,
            exact=exact,
        )
    coding = FixedCoding(
        anchor_bits=fields.integer("anchor_bits", 1, 8),
        residual_bits=fields.integer("residual_bits", 0, 8),
        codebook=fields.string("codebook"),
        chunk_tokens=fields.integer("chunk_tokens", 1, limits.MAX_TOKENS),
        page_tokens=fields.integer("page_tokens", 0, limits.MAX_TOKENS),
        group=fields.one_of("group", ("channel", "token")),
        chunk_dtype=fields.one_of("chunk_dtype", ("f32", "u8")),
        offset=fields.boolean("offset"),
        segment_tokens=segment_tokens,
        sink_tokens=sink_tokens,
        exact=exact,
    )
    if coding.anchor_bits + coding.residual_bits > 8:
        raise HeaderError(f"{fields.where}: anchor and residual bits are over 8 together")
    if not _CODEBOOK.fullmatch(coding.codebook):
        raise HeaderError(f"{fields.where}: codebook is {coding.codebook!r}")
    unit = coding.page_tokens or coding.chunk_tokens
    if coding.page_tokens % coding.chunk_tokens or segment_tokens % unit:
        raise HeaderError(f"{fields.where}: chunks do not fill pages, or pages do not fill segments")
    return coding


def _layer(fields: Fields, span: TokenRange, codings: int) -> LayerSpec:
    kind: LayerKind = fields.one_of("kind", get_args(LayerKind))
    start = fields.integer("start", span.start, span.stop - 1)
    stop = fields.integer("stop", span.stop, span.stop)
    if kind == "full" and start != span.start:
        raise HeaderError(f"{fields.where}: a full layer must start at {span.start}, not {start}")
    if kind == "full" and "window" in fields.value:
        raise HeaderError(f"{fields.where}: a full layer has no window")
    tensors = fields.object("tensors")
    if set(tensors.value) not in ({"k", "v"}, {"latent"}):
        raise HeaderError(f"{fields.where}: tensors must be k and v, or latent alone")
    return LayerSpec(
        kind=kind,
        window=fields.integer("window", 1, limits.MAX_TOKENS) if kind == "sliding" else None,
        start=start,
        stop=stop,
        tensors={name: _tensor(tensors.object(name), codings) for name in _TENSOR_ORDER if name in tensors.value},
    )


def _tensor(fields: Fields, codings: int) -> TensorSpec:
    spec = TensorSpec(
        heads=fields.integer("heads", 1, limits.MAX_HEADS),
        head_dim=fields.integer("head_dim", 1, limits.MAX_HEAD_DIM),
        coding=fields.integer("coding", 0, codings - 1),
    )
    if spec.channels > limits.MAX_CHANNELS:
        raise HeaderError(f"{fields.where}: {spec.channels} channels are over {limits.MAX_CHANNELS}")
    return spec


def _residual(fields: Fields) -> ResidualRef:
    digest = fields.hex64("header_sha256")
    if fields.string("name") != residual_name(digest):
        raise HeaderError(f"{fields.where}: name is not {residual_name(digest)}")
    return ResidualRef(
        name=residual_name(digest),
        header_sha256=digest,
        header_bytes=fields.integer("header_bytes", 64, limits.MAX_HEADER_BYTES + 8),
        bytes=fields.integer("bytes", 64, limits.MAX_INTEGER - 1),
        exact_bytes=fields.integer("exact_bytes", 0, limits.MAX_INTEGER - 1),
    )


def _transform(fields: Fields) -> TransformRef:
    digest = fields.hex64("sha256")
    if fields.string("name") != basis_file(digest):
        raise HeaderError(f"{fields.where}: name is not {basis_file(digest)}")
    size = fields.integer("bytes", 64, limits.MAX_BASIS_BYTES)
    return TransformRef(name=basis_file(digest), sha256=digest, bytes=size)


def _identity(fields: Fields) -> Identity:
    digests = ("fingerprint", "tokenizer_sha256", "chat_template_sha256", "salt_sha256")
    return Identity(
        **{name: fields.optional(name, fields.hex64) for name in digests},
        **{name: fields.optional(name, fields.string) for name in ("model_id", "revision", "adapter")},
        turn=fields.optional("turn", lambda name: fields.one_of(name, ("open", "none"))),
        rope=fields.optional("rope", lambda name: fields.object(name).value),
    )


def _logits(fields: Fields) -> int:
    return fields.integer("tokens", 1, limits.MAX_LOGITS)


def _parent(fields: Fields, tokens: TokenRange) -> Parent:
    spans: list[SpanRef] = []
    for number, item in enumerate(fields.list("spans", limits.MAX_PARENT_SPANS)):
        one = Fields(item, f"{fields.where}.spans[{number}]")
        name = one.string("name")
        if not is_sibling_name(name):
            raise HeaderError(f"{one.where}: name is {name!r}, not the plain name of a cache")
        if any(span.name == name for span in spans):
            raise HeaderError(f"{fields.where}: {name!r} comes before itself")
        before = spans[-1].stop if spans else 0
        stop = one.integer("stop", before + 1, tokens.start)
        spans.append(SpanRef(name=name, header_sha256=one.hex64("header_sha256"), stop=stop))
    if not spans or spans[-1].stop != tokens.start:
        raise HeaderError(f"{fields.where}: its spans do not end at position {tokens.start}, where the cache starts")
    return Parent(
        precision=fields.one_of("precision", get_args(ParentPrecision)),
        tokens_sha256=fields.optional("tokens_sha256", fields.hex64),
        spans=tuple(spans),
    )


def _part_of(fields: Fields, tokens: TokenRange) -> PartOf:
    name = fields.string("name")
    if not is_sibling_name(name):
        raise HeaderError(f"{fields.where}: name is {name!r}, not the plain name of a cache")
    return PartOf(name=name, stop=fields.integer("stop", tokens.stop + 1, limits.MAX_TOKENS))


def _without_none(value: dict[str, Any]) -> dict[str, Any]:
    return {key: item for key, item in value.items() if item is not None}
