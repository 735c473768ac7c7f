"""The nouns of a stored cache: what travels between format, codecs, fetch and decode.

Dimension legend, used everywhere: L layers, H KV heads, T tokens, D head dim, N = H * D channels, P page tokens,
C chunk tokens. Ranges are half-open. Words are those of the SPEC, section 3. Nothing here touches torch or files.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from lynxkv.choices import Dtype as Dtype
from lynxkv.choices import Precision as Precision
from lynxkv.errors import InputError
from lynxkv.packing import plane_row_bytes, radix_group

TensorName = Literal["k", "v", "latent"]
LayerKind = Literal["full", "sliding"]
ParentPrecision = Literal["anchor", "full", "exact", "computed"]
"""What a cache was prefilled on: a precision of its parent, or the values as the model had computed them."""

DTYPE_BYTES: dict[str, int] = {"bf16": 2, "fp16": 2, "fp32": 4}
PREFIX_BLOCK_TOKENS = 256
ESCAPE_BYTES = 8
ALIGNMENT_BYTES = 64


def roundup(value: int, multiple: int) -> int:
    """The least multiple of `multiple` not below `value`."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True, kw_only=True)
class RawCoding:
    """Unquantised tokens in the declared dtype (SPEC 8.2)."""

    segment_tokens: int
    sink_tokens: int = 0
    exact: bool = False
    scheme: Literal["raw"] = "raw"

    has_residual = False

    def anchor_bytes(self, tokens: int, spec: TensorSpec, dtype: str) -> int:
        """Raw bytes of a segment of `tokens` tokens."""
        return tokens * spec.channels * DTYPE_BYTES[dtype]


@dataclass(frozen=True, kw_only=True)
class FixedCoding:
    """Codes of fixed width with page and chunk parameters (SPEC 8.3)."""

    anchor_bits: int
    residual_bits: int
    codebook: str
    chunk_tokens: int
    page_tokens: int
    group: Literal["channel", "token"]
    chunk_dtype: Literal["f32", "u8"]
    offset: bool
    segment_tokens: int
    sink_tokens: int
    exact: bool = False
    scheme: Literal["fixed"] = "fixed"

    @property
    def has_residual(self) -> bool:
        return self.residual_bits > 0

    def parts(self, tokens: int, spec: TensorSpec) -> dict[str, int]:
        """Bytes of each part of an anchor segment, in stored order."""
        pages = -(-tokens // self.page_tokens) if self.page_tokens else 0
        chunks = -(-tokens // self.chunk_tokens)
        chunk_bytes = (
            chunks * (spec.channels if self.group == "channel" else 1) * (4 if self.chunk_dtype == "f32" else 1)
        )
        return {
            "page_mean": pages * spec.channels * 4,
            "page_scale": pages * spec.channels * 4,
            "chunk_scale": chunk_bytes,
            "chunk_offset": chunk_bytes if self.offset else 0,
            "codes": tokens * spec.heads * plane_row_bytes(spec.head_dim, self.anchor_bits),
        }

    def anchor_bytes(self, tokens: int, spec: TensorSpec, dtype: str) -> int:
        """Raw bytes of an anchor segment of `tokens` tokens."""
        return sum(self.parts(tokens, spec).values())

    def residual_bytes(self, tokens: int, spec: TensorSpec) -> int:
        """Raw bytes of a residual segment of `tokens` tokens."""
        return tokens * spec.heads * plane_row_bytes(spec.head_dim, self.residual_bits)


@dataclass(frozen=True, kw_only=True)
class EntropyCoding:
    """Uniform steps, one byte a symbol, channel-major, entropy-coded by zstd (SPEC 8.4)."""

    radix: int
    segment_tokens: int
    sink_tokens: int
    exact: bool = False
    scheme: Literal["entropy"] = "entropy"

    @property
    def has_residual(self) -> bool:
        return self.radix > 1

    def anchor_bytes(self, tokens: int, spec: TensorSpec, dtype: str) -> int:
        """Raw bytes of an anchor segment of `tokens` tokens, escapes not counted."""
        return tokens * spec.channels

    def residual_bytes(self, tokens: int, spec: TensorSpec) -> int:
        """Raw bytes of a residual segment of `tokens` tokens."""
        group, bits = radix_group(self.radix)
        return spec.channels * plane_row_bytes(-(-tokens // group), bits)


Coding = RawCoding | FixedCoding | EntropyCoding


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """One tensor of one layer: [heads, T, head_dim], stored with `codings[coding]`."""

    heads: int
    head_dim: int
    coding: int

    @property
    def channels(self) -> int:
        """N = H * D."""
        return self.heads * self.head_dim


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """One layer: which positions it holds, and its tensors (SPEC 6.1)."""

    kind: LayerKind
    start: int
    stop: int
    tensors: dict[TensorName, TensorSpec]
    window: int | None = None

    @property
    def tokens(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, kw_only=True)
class TokenRange:
    """Positions [start, stop) and the SHA-256 of their ids as u32, None if the ids are not known."""

    start: int
    stop: int
    sha256: str | None
    stored: bool

    @property
    def count(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, kw_only=True)
class Identity:
    """What a cache belongs to (SPEC 9.1); None where unknown."""

    model_id: str | None = None
    revision: str | None = None
    fingerprint: str | None = None
    tokenizer_sha256: str | None = None
    chat_template_sha256: str | None = None
    turn: str | None = None
    rope: dict[str, Any] | None = None
    adapter: str | None = None
    salt_sha256: str | None = None


@dataclass(frozen=True, kw_only=True)
class ResidualRef:
    """What the Anchor says of its Residual (SPEC 5.3); the last `exact_bytes` of its `bytes` are exact arrays."""

    name: str
    header_sha256: str
    header_bytes: int
    bytes: int
    exact_bytes: int


@dataclass(frozen=True, kw_only=True)
class SpanRef:
    """A cache that comes before another in a chain: beside it under the same prefix, its positions before `stop`."""

    name: str
    header_sha256: str
    stop: int


@dataclass(frozen=True, kw_only=True)
class Parent:
    """What a cache continues (SPEC 9.4): the caches of positions [0, tokens.start), first to last.

    Attributes:
        precision: that they had when the cache was prefilled on them.
        tokens_sha256: of the token ids of these positions as u32, None if the writer did not know them.
    """

    precision: ParentPrecision
    tokens_sha256: str | None
    spans: tuple[SpanRef, ...]


@dataclass(frozen=True, kw_only=True)
class TransformRef:
    """What the Anchor says of the basis that its entropy-coded tensors are components of (SPEC 8.8)."""

    name: str
    sha256: str
    bytes: int


@dataclass(frozen=True, kw_only=True)
class PartOf:
    """The chain that a cache was written as a part of (SPEC 9.5): the name of its last cache, and where that stops."""

    name: str
    stop: int


@dataclass(frozen=True, kw_only=True)
class SegmentPlan:
    """A segment of a tensor as the document implies it: coded tokens [first_token, first_token + tokens)."""

    first_token: int
    tokens: int


@dataclass(frozen=True, kw_only=True)
class TensorRef:
    """One tensor of a cache, with everything needed to place and decode its segments."""

    ordinal: int
    layer: int
    name: TensorName
    spec: TensorSpec
    coding: Coding
    sinks: int
    coded_tokens: int

    @property
    def key(self) -> str:
        """Prefix of the tensor's array names."""
        return f"layer.{self.layer}.{self.name}"

    def segments(self) -> Iterator[SegmentPlan]:
        """The segments of the tensor's `anchor`, `raw` or `residual` array, in order (SPEC 5.1 rule 2)."""
        step = self.coding.segment_tokens
        for first in range(0, self.coded_tokens, step):
            yield SegmentPlan(first_token=first, tokens=min(step, self.coded_tokens - first))


@dataclass(frozen=True, kw_only=True)
class CacheHeader:
    """The Anchor's document (SPEC 6)."""

    version: str
    cache_id: str
    index_sha256: str
    dtype: Dtype
    tokens: TokenRange
    codec_name: str
    codec_params: dict[str, Any]
    codings: tuple[Coding, ...]
    layers: tuple[LayerSpec, ...]
    residual: ResidualRef | None
    identity: Identity
    logits_tokens: int | None = None
    parent: Parent | None = None
    transform: TransformRef | None = None
    part_of: PartOf | None = None
    writer: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def tensors(self) -> tuple[TensorRef, ...]:
        """All tensors, numbered as in SPEC 4.1: layer by layer, K before V."""
        return tuple(tensor_refs(self.layers, self.codings))

    @property
    def has_exact(self) -> bool:
        """Whether every tensor can be taken to the original's bits."""
        return all(ref.coding.exact or ref.coding.scheme == "raw" or not ref.coded_tokens for ref in self.tensors)

    @property
    def prefix_blocks(self) -> int:
        """Whole blocks of the sequence that have prefix digests (SPEC 9.2)."""
        before = self.tokens.start == 0 or (self.parent is not None and self.parent.tokens_sha256 is not None)
        return self.tokens.stop // PREFIX_BLOCK_TOKENS if before and self.tokens.sha256 is not None else 0

    @property
    def elements(self) -> int:
        """Elements of all tensors, sinks included."""
        return sum((ref.sinks + ref.coded_tokens) * ref.spec.channels for ref in self.tensors)

    @property
    def original_bytes(self) -> int:
        """Bytes of the cache uncompressed in its declared dtype."""
        return self.elements * DTYPE_BYTES[self.dtype]


def tensor_refs(layers: tuple[LayerSpec, ...], codings: tuple[Coding, ...]) -> Iterator[TensorRef]:
    """Number the tensors of `layers` and work out their sink and coded tokens (SPEC 6.1)."""
    ordinal = 0
    for number, layer in enumerate(layers):
        for name, spec in layer.tensors.items():
            coding = codings[spec.coding]
            sinks = min(max(coding.sink_tokens - layer.start, 0), layer.tokens)
            yield TensorRef(
                ordinal=ordinal,
                layer=number,
                name=name,
                spec=spec,
                coding=coding,
                sinks=sinks,
                coded_tokens=layer.tokens - sinks,
            )
            ordinal += 1


@dataclass(frozen=True, kw_only=True)
class Span:
    """What of one cache is loaded: its positions before `stop`."""

    header: CacheHeader
    stop: int

    @property
    def is_whole(self) -> bool:
        return self.stop >= self.header.tokens.stop

    def first_position(self, ref: TensorRef) -> int:
        """Position of the tensor's first coded token."""
        return self.header.layers[ref.layer].start + ref.sinks

    def loaded_sinks(self, ref: TensorRef) -> int:
        """How many of the tensor's sink tokens are loaded."""
        return min(ref.sinks, self.stop - self.header.layers[ref.layer].start)

    def loaded_tokens(self, ref: TensorRef, plan: SegmentPlan) -> int:
        """How many of a segment's tokens are loaded, from its first one on; 0 where it is not needed."""
        return max(0, min(plan.tokens, self.stop - self.first_position(ref) - plan.first_token))

    def segments(self, ref: TensorRef) -> Iterator[SegmentPlan]:
        """The tensor's segments that are needed: a token prefix is a run of them."""
        return (plan for plan in ref.segments() if self.loaded_tokens(ref, plan))


@dataclass(frozen=True, kw_only=True)
class Extent:
    """What a reader loads as one: a cache, the caches of a chain first to last, or their first tokens.

    `planned_stop` is where a chain will stop that is still being written; its last spans are missing.
    """

    spans: tuple[Span, ...]
    planned_stop: int | None = None

    @classmethod
    def of(cls, header: CacheHeader) -> Extent:
        """One whole cache."""
        return cls(spans=(Span(header=header, stop=header.tokens.stop),))

    @property
    def start(self) -> int:
        return self.spans[0].header.tokens.start

    @property
    def stop(self) -> int:
        return self.spans[-1].stop if self.planned_stop is None else self.planned_stop

    @property
    def tokens(self) -> int:
        return self.stop - self.start

    @property
    def dtype(self) -> Dtype:
        return self.spans[0].header.dtype

    @property
    def identity(self) -> Identity:
        return self.spans[-1].header.identity

    @property
    def has_residual(self) -> bool:
        return any(span.header.residual is not None for span in self.spans)

    @property
    def has_exact(self) -> bool:
        """Whether all of it can be taken to the original's bits."""
        return all(span.header.has_exact for span in self.spans)

    @property
    def logits_tokens(self) -> int | None:
        """The size of the vocabulary that stored logits are over; None if those after the last token are not stored."""
        whole = self.planned_stop is None and self.spans[-1].is_whole
        return self.spans[-1].header.logits_tokens if whole else None

    @cached_property
    def layers(self) -> tuple[LayerSpec, ...]:
        """Each layer as if it were stored in one cache; what its tensors' codings are is for each span to say."""
        first = self.spans[0].header.layers
        return tuple(replace(layer, stop=self.stop) for layer in first)

    def offset(self, span: int, layer: int) -> int:
        """Where a span's positions begin in a layer that holds all of them."""
        return self.spans[span].header.layers[layer].start - self.spans[0].header.layers[layer].start


def cut(header: CacheHeader, stop: int) -> Span:
    """The positions of a cache before `stop`.

    Raises:
        InputError: a sliding layer does not hold what the token at `stop` would look at.
    """
    for number, layer in enumerate(header.layers):
        if stop < layer.stop and layer.window is not None and layer.start > max(0, stop - layer.window + 1):
            raise InputError(
                f"layer {number} has a sliding window of {layer.window} and holds the positions [{layer.start}, "
                f"{layer.stop}) only: its first {stop} tokens cannot be loaded by themselves",
                hint="load the whole cache, or encode the shorter prompt",
            )
    return Span(header=header, stop=min(stop, header.tokens.stop))
