"""Reading a shard's head and its segments, everything checked before it is believed (SPEC 4, 5)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lynxkv.errors import BindingError, ChecksumError, HeaderError, TruncatedError
from lynxkv.format.compression import decompress
from lynxkv.format.container import LENGTH_BYTES, Container, header_length, parse_header
from lynxkv.format.document import Fields, parse_anchor_document, parse_common
from lynxkv.format.index import (
    INDEX_DTYPE,
    ZSTD,
    ArrayPlan,
    Segment,
    anchor_plans,
    residual_plans,
    segments_of,
)
from lynxkv.format.limits import MAX_SEGMENTS
from lynxkv.layout import CacheHeader

U8 = npt.NDArray[np.uint8]

# One request usually brings header and index: 30 layers take about 40 KiB.
FIRST_READ_BYTES = 128 << 10


ReadRange = Callable[[int, int], bytes]
"""Reads the bytes [start, stop) of an object."""


@dataclass(frozen=True, kw_only=True)
class ShardHead:
    """A shard's checked header and index. Segment offsets count from `header_bytes`."""

    header_bytes: int
    header_sha256: str
    bytes: int
    segments: tuple[Segment, ...]


def read_anchor_head(read: ReadRange, size: int, *, what: str) -> tuple[CacheHeader, ShardHead]:
    """Header and index of an Anchor of `size` bytes.

    Raises:
        FormatError: any of its kinds but `BindingError` and `ContentError`.
    """
    raw = _RawHead(read, size, what)
    header = parse_anchor_document(raw.container.document, what=what)
    head = raw.head(list(anchor_plans(header)), header.index_sha256)
    if raw.cache_id != header.cache_id:
        raise HeaderError(f"{what}: cache_id does not follow from the index")
    return header, head


def read_residual_head(read: ReadRange, size: int, header: CacheHeader, *, what: str) -> ShardHead:
    """Header and index of the Residual that `header` names.

    Raises:
        BindingError: it is the Residual of another encode.
        FormatError: any of its other kinds but `ContentError`.
    """
    if header.residual is None:
        raise BindingError(f"{what}: this cache has no Residual")
    if size < header.residual.bytes:
        raise TruncatedError(f"{what}: has {size} bytes, the Anchor names {header.residual.bytes}")
    raw = _RawHead(read, size, what)
    document: Fields = parse_common(raw.container.document, role="residual", what=what)
    stated = (document.hex64("cache_id"), raw.header_sha256, raw.container.header_bytes, size)
    named = header.residual
    if stated != (header.cache_id, named.header_sha256, named.header_bytes, named.bytes):
        raise BindingError(
            f"{what}: belongs to another encode than the Anchor",
            hint="fetch both shards of the same cache again",
        )
    head = raw.head(list(residual_plans(header)), document.hex64("index_sha256"))
    first_exact = next((item.offset for item in head.segments if item.plan.part == "exact"), size - head.header_bytes)
    if head.header_bytes + first_exact != size - named.exact_bytes:
        raise HeaderError(f"{what}: its exact arrays do not take the {named.exact_bytes} bytes that the Anchor states")
    return head


def open_segment(segment: Segment, stored: bytes | memoryview, *, what: str) -> U8:
    """The raw bytes of a segment, from its stored bytes.

    Raises:
        TruncatedError: fewer bytes than stored.
        ChecksumError: the digest differs.
        ContentError: the zstd frame is not what the index says.
    """
    where = f"{what}: {segment.plan.name} at byte {segment.offset}"
    if len(stored) != segment.stored_bytes:
        raise TruncatedError(f"{where}: got {len(stored)} of {segment.stored_bytes} bytes")
    if hashlib.sha256(stored).digest() != segment.sha256:
        raise ChecksumError(f"{where}: the checksum does not match", hint="the shard is damaged; encode it again")
    if segment.compression == ZSTD:
        return decompress(stored, segment.raw_bytes, where=where)
    return np.frombuffer(stored, np.uint8)


class _RawHead:
    """The first bytes of a shard: header parsed and digested, index located."""

    def __init__(self, read: ReadRange, size: int, what: str) -> None:
        self.what, self.size = what, size
        first = read(0, min(size, FIRST_READ_BYTES))
        header_bytes = header_length(first[:LENGTH_BYTES], what=what, size=size)
        first = _at_least(read, first, header_bytes, what)
        self.container: Container = parse_header(first[:header_bytes], what=what, size=size)
        index = self._index_array()
        first = _at_least(read, first, header_bytes + index.stop, what)
        digest = hashlib.sha256(first[:header_bytes])
        self.header_sha256 = digest.hexdigest()
        if first[header_bytes : header_bytes + 64] != digest.digest() + bytes(32):
            raise ChecksumError(f"{what}: the header does not have the digest that follows it")
        self.index_bytes = first[header_bytes + index.start : header_bytes + index.stop]
        self.entries: npt.NDArray[Any] = np.frombuffer(self.index_bytes, INDEX_DTYPE)
        self.cache_id = hashlib.sha256(self.entries["sha256"].tobytes()).hexdigest()

    def head(self, plans: list[ArrayPlan], index_sha256: str) -> ShardHead:
        if hashlib.sha256(self.index_bytes).hexdigest() != index_sha256:
            raise ChecksumError(f"{self.what}: the index does not have the stated digest")
        return ShardHead(
            header_bytes=self.container.header_bytes,
            header_sha256=self.header_sha256,
            bytes=self.size,
            segments=segments_of(plans, self.container.arrays, self.entries, what=self.what),
        )

    def _index_array(self) -> Any:
        arrays = self.container.arrays
        if len(arrays) < 2 or (arrays[0].name, arrays[0].dtype, arrays[0].shape) != (
            "header_sha256",
            "U8",
            (64,),
        ):
            raise HeaderError(f"{self.what}: the first array is not header_sha256")
        index = arrays[1]
        if (index.name, index.dtype) != ("index", "U8") or len(index.shape) != 2 or index.shape[1] != 64:
            raise HeaderError(f"{self.what}: the second array is not the index")
        if index.shape[0] > MAX_SEGMENTS:
            raise HeaderError(f"{self.what}: {index.shape[0]} segments are over {MAX_SEGMENTS}")
        return index


def _at_least(read: ReadRange, have: bytes, wanted: int, what: str) -> bytes:
    if len(have) < wanted:
        have += read(len(have), wanted)
    if len(have) < wanted:
        raise TruncatedError(f"{what}: got {len(have)} of {wanted} header bytes")
    return have
