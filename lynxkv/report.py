"""What a cache is and where its bytes go (`inspect`), and whether all of it is whole (`check`), without decoding."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np

from lynxkv.errors import ChecksumError, ContentError, FormatError, StoreError
from lynxkv.fetch import CacheReader, FetchOptions, SpanReader, open_cache
from lynxkv.format.content import check_content
from lynxkv.format.document import ANCHOR_NAME
from lynxkv.format.index import ZSTD, Segment
from lynxkv.format.read import ShardHead
from lynxkv.layout import CacheHeader, FixedCoding, Identity, LayerSpec, Parent, TokenRange
from lynxkv.prefix import prefix_digests
from lynxkv.store import Link, Url


@dataclass(frozen=True, kw_only=True)
class Part:
    """Bytes of one kind of content in one shard; bits count over all elements of the cache."""

    shard: str
    name: str
    bytes: int
    bits_per_element: float


@dataclass(frozen=True, kw_only=True)
class LayerGroup:
    """Neighbouring layers of one shape."""

    first: int
    last: int
    layer: LayerSpec


@dataclass(frozen=True, kw_only=True)
class InspectReport:
    """What `inspect` says of a cache. Sizes in bytes; bits an element count everything, headers included.

    `basis` names that of the model, if the codes are of its components; it is no part of the cache, nor of its sizes.
    `residual_problem` says why the Residual could not be read: its bytes are then as the Anchor states them, and
    `parts` has none of them. `orphans` are Residuals of earlier encodes in the same prefix.
    """

    url: str
    cache_id: str
    version: str
    dtype: str
    codec: str
    codec_params: dict[str, Any]
    basis: str | None
    identity: Identity
    tokens: TokenRange
    parent: Parent | None
    layers: int
    layer_groups: tuple[LayerGroup, ...]
    elements: int
    bytes_anchor: int
    bytes_residual: int
    bytes_exact: int
    bytes_original: int
    anchor_bits: float
    full_bits: float
    total_bits: float
    compression_anchor: float
    compression_full: float
    compression_total: float
    parts: tuple[Part, ...]
    writer: dict[str, Any]
    residual_problem: str | None
    orphans: tuple[str, ...]
    orphan_bytes: int


@dataclass(frozen=True, kw_only=True)
class CheckReport:
    """What `check` has read and found whole, caches that are continued included.

    `spans` are the URLs of these caches, first to last, the one that was named among them. `orphans` are Residuals of
    earlier encodes in its prefix.
    """

    url: str
    cache_id: str
    segments: int
    bytes: int
    tokens: int
    spans: tuple[str, ...]
    orphans: tuple[str, ...]
    orphan_bytes: int


def inspect(url: Url, *, link: Link | None = None, options: FetchOptions | None = None) -> InspectReport:
    """Describe the cache at `url`; reads headers and indexes only.

    A Residual that is missing or damaged is no error here, whatever `options` say of it: the report says so.

    Raises:
        CacheNotFoundError, FetchError: the store cannot deliver the Anchor.
        FormatError: the Anchor is damaged.
    """
    with CacheReader(url, link=link, options=options, header_only=True, alone=True) as reader:
        header = reader.header
        parts = _parts(header, "anchor", reader.anchor_head)
        problem = None
        if header.residual is not None:
            try:
                parts += _parts(header, "residual", reader.read_residual_head())
            except (StoreError, FormatError) as error:
                problem = error.message
        orphans = _orphans(reader)
        full = reader.bytes_anchor + reader.bytes_residual
        total = full + reader.bytes_exact
        return InspectReport(
            url=reader.url,
            cache_id=header.cache_id,
            version=header.version,
            dtype=header.dtype,
            codec=header.codec_name,
            codec_params=header.codec_params,
            basis=header.transform.name if header.transform is not None else None,
            identity=header.identity,
            tokens=header.tokens,
            parent=header.parent,
            layers=len(header.layers),
            layer_groups=tuple(_groups(header)),
            elements=header.elements,
            bytes_anchor=reader.bytes_anchor,
            bytes_residual=reader.bytes_residual,
            bytes_exact=reader.bytes_exact,
            bytes_original=header.original_bytes,
            anchor_bits=reader.bytes_anchor * 8 / header.elements,
            full_bits=full * 8 / header.elements,
            total_bits=total * 8 / header.elements,
            compression_anchor=header.original_bytes / reader.bytes_anchor,
            compression_full=header.original_bytes / full,
            compression_total=header.original_bytes / total,
            parts=tuple(parts),
            writer=header.writer,
            residual_problem=problem,
            orphans=tuple(orphans),
            orphan_bytes=sum(orphans.values()),
        )


def check(url: Url, *, link: Link | None = None, options: FetchOptions | None = None) -> CheckReport:
    """Read all of the cache at `url` and of those it continues, and check structure, checksums, binding and content
    (SPEC 4 to 9), and that the bases they name are beside them.

    Raises:
        CacheNotFoundError, FetchError: the store cannot deliver it.
        FormatError: something is not as the SPEC wants it.
    """
    with open_cache(url, link=link, options=options) as reader:
        reader.bases(as_stored=True)
        segments = 0
        for span in reader.spans:
            segments += _check_shard(reader, span, span.anchor_head, ANCHOR_NAME)
            if span.header.residual is not None:
                segments += _check_shard(reader, span, reader.read_residual_head(span), span.header.residual.name)
        _check_tokens(reader)
        orphans = _orphans(reader)
        return CheckReport(
            url=reader.url,
            cache_id=reader.header.cache_id,
            segments=segments,
            bytes=sum(_stored_bytes(span.header, span.anchor_head) for span in reader.spans),
            tokens=reader.extent.tokens,
            spans=tuple(span.url for span in reader.spans),
            orphans=tuple(orphans),
            orphan_bytes=sum(orphans.values()),
        )


def _check_shard(reader: CacheReader, span: SpanReader, head: ShardHead, name: str) -> int:
    """Check every segment, and that every byte between segments is zero; returns the number of segments."""
    at = head.segments[0].offset
    for payload in reader.stream_segments(name, head, span):
        check_content(span.header, payload.segment, payload.raw)
        _check_gap(span, name, head, at, payload.segment.offset)
        at = payload.segment.stop
    _check_gap(span, name, head, at, head.bytes - head.header_bytes)
    return len(head.segments)


def _check_gap(span: SpanReader, name: str, head: ShardHead, start: int, stop: int) -> None:
    if stop > start and any(span.submit_range(name, head.header_bytes + start, head.header_bytes + stop).result().data):
        raise ContentError(f"{span.url}/{name}: padding at byte {start} of the data is not zero")


def _check_tokens(reader: CacheReader) -> None:
    """Recompute the digests of token ids, as far as these are there to do it from."""
    header, ids = reader.header, reader.token_ids()
    if ids is None:
        return
    before = header.parent.tokens_sha256 if header.parent is not None else None
    if before is not None and hashlib.sha256(ids[: header.tokens.start].tobytes()).hexdigest() != before:
        raise ChecksumError(f"{reader.url}: the token ids before it are not those it continues")
    if header.prefix_blocks and reader.extent.start == 0:
        stated = reader.prefix_sha256()
        if stated is None or not np.array_equal(prefix_digests(ids, header.identity), stated):
            raise ChecksumError(f"{reader.url}: the prefix digests are not those of the token ids")


def _stored_bytes(header: CacheHeader, head: ShardHead) -> int:
    return head.bytes + (header.residual.bytes if header.residual is not None else 0)


def _orphans(reader: CacheReader) -> dict[str, int]:
    """Names and bytes of Residuals that are not the cache's own, as far as the store can list them."""
    own = reader.header.residual.name if reader.header.residual else None
    found = (item for item in reader.store.try_objects() if item.name.startswith("residual-"))
    return {item.name: item.bytes for item in found if item.name != own}


def _parts(header: CacheHeader, shard: str, head: ShardHead) -> list[Part]:
    sizes: dict[str, int] = defaultdict(int)
    for segment in head.segments:
        for name, size in _split(segment):
            sizes[name] += size
    accounted = head.header_bytes + sum(sizes.values())
    index = 64 * (len(head.segments) + 1)
    sizes = {"header": head.header_bytes, "index": index, **sizes, "padding": head.bytes - accounted - index}
    return [
        Part(shard=shard, name=name, bytes=size, bits_per_element=size * 8 / header.elements)
        for name, size in sizes.items()
    ]


_PART_NAMES = {
    "prefix": "prefix digests",
    "codebook": "codebooks",
    "steps": "steps",
    "sink": "sinks",
    "mean": "means",
    "order": "channel order",
    "anchor": "codes",
    "raw": "values",
    "residual": "codes",
    "exact": "exact",
    "logits": "logits",
    "token_ids": "token ids",
}


def _split(segment: Segment) -> list[tuple[str, int]]:
    """Bytes of a segment by kind. Scales of a compressed fixed-rate segment count in proportion to their raw size."""
    ref = segment.plan.tensor
    if segment.plan.part == "anchor" and ref is not None and isinstance(ref.coding, FixedCoding):
        codes = ref.coding.parts(segment.coded[1].tokens, ref.spec)["codes"]
        share = codes if segment.compression != ZSTD else round(codes * segment.stored_bytes / segment.raw_bytes)
        return [("scales", segment.stored_bytes - share), ("codes", share)]
    return [(_PART_NAMES[segment.plan.part], segment.stored_bytes)]


def _groups(header: CacheHeader) -> list[LayerGroup]:
    groups: list[LayerGroup] = []
    for number, layer in enumerate(header.layers):
        if groups and groups[-1].layer == layer:
            groups[-1] = LayerGroup(first=groups[-1].first, last=number, layer=layer)
        else:
            groups.append(LayerGroup(first=number, last=number, layer=layer))
    return groups
