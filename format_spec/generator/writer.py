"""A plain writer of lynxkv shards for the test vectors: SPEC 4 to 7 with numpy alone, and hooks to break each rule.

Shares no code with lynxkv or with the reference reader. Digests are always those of what is written, so that a
vector broken before a digest is taken stays broken in exactly one way: the writer is hostile, not clumsy.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Document = dict[str, Any]
Files = dict[str, bytes]
U8 = npt.NDArray[np.uint8]


@dataclass(kw_only=True)
class Stored:
    """One segment as stored: `raw_bytes` before compression (0 none, 1 zstd), and its first coded token."""

    data: bytes
    raw_bytes: int
    first_token: int = 0
    compression: int = 0


@dataclass(kw_only=True)
class Draft:
    """One array to be written; packed arrays (`anchor`, `residual`, `exact`) start each segment at a multiple of 64."""

    name: str
    dtype: str
    shape: list[int]
    segments: list[Stored]
    packed: bool = False


def typed(name: str, dtype: str, values: npt.NDArray[Any]) -> Draft:
    """An array of one segment; BF16 and F16 come as their bits."""
    kind = {"U8": "<u1", "U16": "<u2", "BF16": "<u2", "F16": "<u2", "U32": "<u4", "F32": "<f4"}[dtype]
    data = values.astype(kind).tobytes()
    return Draft(name=name, dtype=dtype, shape=list(values.shape), segments=[Stored(data=data, raw_bytes=len(data))])


def _nothing(role: str, subject: Any) -> None:
    """A hook that leaves the cache as it is."""


def _same(role: str, subject: Any) -> Any:
    return subject


@dataclass(kw_only=True)
class Hooks:
    """What to break, in the order the writer gets there. Each is called with the shard's role.

    `arrays`, `index`, `entries`, `document` and `data` change what they are given in place; the others return it.
    `data` comes after the header and so after every digest but those in the data itself.
    """

    arrays: Callable[[str, list[Draft]], None] = _nothing
    index: Callable[[str, bytearray], None] = _nothing
    document: Callable[[str, Document], None] = _nothing
    document_text: Callable[[str, str], str] = _same
    entries: Callable[[str, Document], None] = _nothing
    header_text: Callable[[str, str], str] = _same
    header: Callable[[str, bytes], bytes] = _same
    data: Callable[[str, bytearray], None] = _nothing
    file: Callable[[str, bytes], bytes] = _same


@dataclass(kw_only=True)
class CacheDraft:
    """A cache to be written: the Anchor's document without digests, and the arrays after `index`."""

    document: Document
    anchor: list[Draft]
    residual: list[Draft]
    expected: dict[str, dict[str, npt.NDArray[Any]]] = field(default_factory=dict)
    # Objects of the folder that the cache lies in.
    beside: Files = field(default_factory=dict)


def write(cache: CacheDraft, hooks: Hooks | None = None) -> Files:
    """The files of a cache folder."""
    hooks = hooks or Hooks()
    document = json.loads(json.dumps(cache.document))
    hooks.arrays("anchor", cache.anchor)
    entries, index, data = lay_out("anchor", cache.anchor, hooks)
    document["cache_id"] = sha256(b"".join(index[at + 32 : at + 64] for at in range(0, len(index), 64)))
    document["index_sha256"] = sha256(index)
    files: Files = {f"../{name}": data for name, data in cache.beside.items()}
    if cache.residual:
        hooks.arrays("residual", cache.residual)
        residual_entries, residual_index, residual_data = lay_out("residual", cache.residual, hooks)
        names = ("version", "cache_id", "writer")
        residual_document = {"role": "residual", "required": []} | {name: document[name] for name in names}
        residual_document["index_sha256"] = sha256(residual_index)
        header, stored = seal("residual", residual_document, residual_entries, residual_data, hooks)
        name = f"residual-{sha256(header)[:16]}.safetensors"
        files[name] = stored
        exact = [entry["data_offsets"][0] for array, entry in residual_entries.items() if array.endswith(".exact")]
        document["residual"] = {
            "name": name,
            "header_sha256": sha256(header),
            "header_bytes": len(header),
            "bytes": len(header) + len(residual_data),
            "exact_bytes": len(residual_data) - min(exact, default=len(residual_data)),
        }
    _, files["anchor.safetensors"] = seal("anchor", document, entries, data, hooks)
    return files


def sha256(data: bytes | bytearray) -> str:
    """In lower-case hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def lay_out(role: str, drafts: list[Draft], hooks: Hooks) -> tuple[Document, bytes, bytearray]:
    """Header entries, index and data region of a shard (SPEC 4.3 and 5.1); `header_sha256` is still zero."""
    count = sum(len(draft.segments) for draft in drafts)
    entries: Document = {}
    data = bytearray(64 + 64 * count)

    def enter(name: str, dtype: str, shape: list[int], start: int, stop: int) -> None:
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}

    enter("header_sha256", "U8", [64], 0, 64)
    enter("index", "U8", [count, 64], 64, len(data))
    index = bytearray()
    pads = 0
    for draft in drafts:
        start, position = len(data), len(entries)
        for segment in draft.segments:
            index += struct.pack(
                "<QIIIIB7x",
                len(data),
                len(segment.data),
                segment.raw_bytes,
                position,
                segment.first_token,
                segment.compression,
            )
            index += hashlib.sha256(segment.data).digest()
            data += segment.data
            if draft.packed:
                data += bytes(-len(data) % 64)
        enter(draft.name, draft.dtype, draft.shape or [len(data) - start], start, len(data))
        if pad := -len(data) % 64:
            enter(f"pad.{pads}", "U8", [pad], len(data), len(data) + pad)
            data += bytes(pad)
            pads += 1
    hooks.index(role, index)
    data[64 : 64 + len(index)] = index
    return entries, bytes(index), data


def seal(role: str, document: Document, entries: Document, data: bytearray, hooks: Hooks) -> tuple[bytes, bytes]:
    """The header of a shard, and the whole shard with `header_sha256` filled in (SPEC 4.1, 4.2)."""
    hooks.document(role, document)
    text = hooks.document_text(role, json.dumps(document, separators=(",", ":")))
    body: Document = {"__metadata__": {"lynxkv": text}} | entries
    hooks.entries(role, body)
    raw = hooks.header_text(role, json.dumps(body, separators=(",", ":"))).encode()
    raw += b" " * (-(8 + len(raw)) % 64)
    header = hooks.header(role, struct.pack("<Q", len(raw)) + raw)
    data[0:32] = hashlib.sha256(header).digest()
    hooks.data(role, data)
    return header, hooks.file(role, header + bytes(data))


# -- SPEC 8.1 and 8.4: packing --


def pack(codes: npt.NDArray[Any], bits: int) -> bytes:
    """Codes [rows, m] of `bits` bits, packed plane by plane, one code at a time."""
    rows, m = codes.shape
    padded = -(-m // 8) * 8
    out = b""
    below = bits
    for width in (8, 4, 2, 1):
        if not bits & width:
            continue
        below -= width
        row_bytes = padded * width // 8
        plane = np.zeros((rows, row_bytes), np.uint8)
        for i in range(m):
            part = (codes[:, i].astype(np.int64) >> below) & ((1 << width) - 1)
            plane[:, i % row_bytes] |= (part << (i // row_bytes * width)).astype(np.uint8)
        out += plane.tobytes()
    return out


# SPEC 8.4, the table as it stands there: digits a code, and bits a code.
RADIX_GROUPS = {2: (1, 1), 3: (5, 8), 4: (1, 2), 5: (3, 7), 6: (3, 8), 7: (1, 3), 8: (1, 3)}
RADIX_GROUPS |= dict.fromkeys(range(9, 12), (2, 7))
RADIX_GROUPS |= dict.fromkeys(range(12, 17), (1, 4))
RADIX_GROUPS |= dict.fromkeys(range(17, 33), (1, 5))


def digit_codes(digits: npt.NDArray[Any], radix: int) -> npt.NDArray[np.int64]:
    """Digits [rows, t] as codes [rows, u], u = ceil(t / g): digit e * u + j counts radix^e in code j."""
    group, _ = RADIX_GROUPS[radix]
    rows, t = digits.shape
    codes = np.zeros((rows, -(-t // group)), np.int64)
    for i in range(t):
        e, j = divmod(i, codes.shape[1])
        codes[:, j] += digits[:, i].astype(np.int64) * radix**e
    return codes


# -- zstd frames by hand: raw and run-length blocks only, so that no compressor's version shows in the bytes --


def zstd_frame(raw: bytes, *, size_bytes: int = 8, window_log: int | None = None, stated: int | None = None) -> bytes:
    """A zstd frame (RFC 8878) with its content size in `size_bytes` bytes.

    Runs of 8 equal bytes and more become run-length blocks, the rest raw blocks. Without `window_log` the frame is a
    single segment, whose window is its content. `stated` is a content size to claim instead of the true one.
    """
    descriptor = {1: 0, 2: 1, 4: 2, 8: 3}[size_bytes] << 6
    size = len(raw) if stated is None else stated
    # A field of two bytes counts from 256.
    content_size = (size - 256 if size_bytes == 2 else size).to_bytes(size_bytes, "little")
    if window_log is None:
        head = bytes([descriptor | 0x20]) + content_size
    else:
        head = bytes([descriptor, (window_log - 10) << 3]) + content_size
    return b"\x28\xb5\x2f\xfd" + head + zstd_blocks(raw)


def zstd_blocks(raw: bytes) -> bytes:
    """Raw (type 0) and run-length (type 1) blocks of at most 1 KiB; the last is marked."""
    blocks: list[tuple[int, int, bytes]] = []
    at = 0
    while at < len(raw):
        run = 1
        while at + run < len(raw) and raw[at + run] == raw[at] and run < 1024:
            run += 1
        if run >= 8:
            blocks.append((1, run, raw[at : at + 1]))
            at += run
        elif blocks and blocks[-1][0] == 0 and blocks[-1][1] < 1024:
            blocks[-1] = (0, blocks[-1][1] + 1, blocks[-1][2] + raw[at : at + 1])
            at += 1
        else:
            blocks.append((0, 1, raw[at : at + 1]))
            at += 1
    out = b""
    for number, (kind, size, content) in enumerate(blocks):
        last = number == len(blocks) - 1
        out += (size << 3 | kind << 1 | last).to_bytes(3, "little") + content
    return out
