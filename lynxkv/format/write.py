"""Laying out the two shards of a cache (SPEC 4 to 7): payloads in, files as lists of buffers out."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lynxkv.format.compression import compress
from lynxkv.format.container import ArrayInfo, render_header
from lynxkv.format.document import render_anchor_document, render_residual_document, residual_name
from lynxkv.format.index import INDEX_DTYPE, STORED, ZSTD, ArrayPlan, anchor_plans, residual_plans
from lynxkv.layout import ALIGNMENT_BYTES, CacheHeader, ResidualRef, roundup

U8 = npt.NDArray[np.uint8]
Buffer = bytes | memoryview


@dataclass(frozen=True, kw_only=True)
class Payload:
    """Stored bytes of one segment and what `raw_bytes` they expand to."""

    stored: Buffer
    raw_bytes: int
    compression: int
    sha256: bytes


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One file, ready to be written: header and data in order."""

    buffers: tuple[Buffer, ...]
    bytes: int
    header_bytes: int
    header_sha256: str


def payload(raw: U8, *, may_compress: bool, row_bytes: int | None = None) -> Payload:
    """Seal a segment: compress it where that pays, and take its digest. `row_bytes` is that of `compress`."""
    raw = np.ascontiguousarray(raw).reshape(-1)
    stored: Buffer = raw.data
    compression = STORED
    if may_compress:
        frame = compress(raw, row_bytes)
        # A few per cent are not worth a decompressor in the path.
        if len(frame) < 0.97 * raw.size:
            stored, compression = frame, ZSTD
    return Payload(stored=stored, raw_bytes=raw.size, compression=compression, sha256=hashlib.sha256(stored).digest())


def build_shards(
    header: CacheHeader, anchor: dict[str, list[Payload]], residual: dict[str, list[Payload]]
) -> tuple[CacheHeader, Shard, Shard | None]:
    """Lay out both shards. `anchor` and `residual` hold the payloads of each array the document calls for.

    Returns the header with its digests and the Residual's reference filled in, the Anchor, and the Residual if the
    codings have one.
    """
    anchor_layout = _Layout(anchor_plans(header), anchor)
    header = replace(header, cache_id=anchor_layout.cache_id, index_sha256=anchor_layout.index_sha256)
    plans = list(residual_plans(header))
    residual_shard = None
    if plans:
        layout = _Layout(plans, residual)
        residual_shard = layout.seal(lambda: render_residual_document(header, layout.index_sha256))
        ref = ResidualRef(
            name=residual_name(residual_shard.header_sha256),
            header_sha256=residual_shard.header_sha256,
            header_bytes=residual_shard.header_bytes,
            bytes=residual_shard.bytes,
            exact_bytes=layout.bytes - layout.exact_start,
        )
        header = replace(header, residual=ref)
    return header, anchor_layout.seal(lambda: render_anchor_document(header)), residual_shard


class _Layout:
    """Offsets, index and pads of one shard."""

    def __init__(self, plans: Iterable[ArrayPlan], payloads: dict[str, list[Payload]]) -> None:
        plans = list(plans)
        count = sum(len(payloads[plan.name]) for plan in plans)
        self.arrays = [ArrayInfo(name="header_sha256", dtype="U8", shape=(64,), start=0, stop=64)]
        at = 64 + 64 * count
        self.arrays.append(ArrayInfo(name="index", dtype="U8", shape=(count, 64), start=64, stop=at))
        self.data: list[Buffer] = []
        entries = np.zeros(count, INDEX_DTYPE)
        number = pads = 0
        exact_start: int | None = None
        for plan in plans:
            if plan.part == "exact" and exact_start is None:
                exact_start = at
            start, position = at, len(self.arrays)
            self.data.extend(laid_out(plan, payloads[plan.name]))
            for i, item in enumerate(payloads[plan.name]):
                first = plan.plans[i].first_token if plan.plans else 0
                entries[number] = (
                    at, len(item.stored), item.raw_bytes, position, first, item.compression, 0,
                    np.frombuffer(item.sha256, np.uint8),
                )  # fmt: skip
                number += 1
                at += len(item.stored)
                if not plan.shape:
                    at = roundup(at, ALIGNMENT_BYTES)
            self.arrays.append(
                ArrayInfo(name=plan.name, dtype=plan.dtype, shape=plan.shape or (at - start,), start=start, stop=at)
            )
            if at % ALIGNMENT_BYTES:
                start, at = at, roundup(at, ALIGNMENT_BYTES)
                self.arrays.append(ArrayInfo(name=f"pad.{pads}", dtype="U8", shape=(at - start,), start=start, stop=at))
                pads += 1
        self.bytes = at
        self.exact_start = at if exact_start is None else exact_start
        self.index = entries.tobytes()
        self.index_sha256 = hashlib.sha256(self.index).hexdigest()
        self.cache_id = hashlib.sha256(entries["sha256"].tobytes()).hexdigest()

    def seal(self, document: Callable[[], dict[str, Any]]) -> Shard:
        header = render_header(self.arrays, document())
        digest = hashlib.sha256(header)
        return Shard(
            buffers=(header, digest.digest() + bytes(32), self.index, *self.data),
            bytes=len(header) + self.bytes,
            header_bytes=len(header),
            header_sha256=digest.hexdigest(),
        )


def laid_out(plan: ArrayPlan, payloads: Iterable[Payload]) -> Iterator[Buffer]:
    """The bytes of one array of a shard, up to where the next one starts; both are aligned (SPEC 4, 5.1)."""
    at = 0
    for item in payloads:
        yield item.stored
        at += len(item.stored)
        if not plan.shape and at % ALIGNMENT_BYTES:
            yield bytes(-at % ALIGNMENT_BYTES)
            at = roundup(at, ALIGNMENT_BYTES)
    if at % ALIGNMENT_BYTES:
        yield bytes(-at % ALIGNMENT_BYTES)
