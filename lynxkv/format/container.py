"""Safetensors headers, written and read by lynxkv's own rules (SPEC 4).

The stock writer reorders arrays and the stock reader accepts duplicate keys, so both are done here; every file stays
one that the stock library opens.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from math import prod
from typing import Any

from lynxkv.errors import HeaderError, TruncatedError
from lynxkv.format import strict_json
from lynxkv.format.limits import MAX_ARRAYS, MAX_HEADER_BYTES, MAX_HEADER_DEPTH, MAX_INTEGER
from lynxkv.layout import ALIGNMENT_BYTES, roundup

ITEM_BYTES = {"U8": 1, "I8": 1, "U16": 2, "BF16": 2, "F16": 2, "U32": 4, "F32": 4}
LENGTH_BYTES = 8
METADATA_KEY = "lynxkv"


@dataclass(frozen=True, kw_only=True)
class ArrayInfo:
    """One array of a shard; `start` and `stop` count from the data region."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def is_pad(self) -> bool:
        return self.name.startswith("pad.")


@dataclass(frozen=True, kw_only=True)
class Container:
    """A parsed header: arrays in file order, and the text of the lynxkv document."""

    header_bytes: int
    arrays: tuple[ArrayInfo, ...]
    document: str

    @property
    def file_bytes(self) -> int:
        return self.header_bytes + (self.arrays[-1].stop if self.arrays else 0)


def render_header(arrays: list[ArrayInfo], document: dict[str, Any]) -> bytes:
    """The shard's bytes [0, 8 + n): length, JSON, padding with spaces to a multiple of 64."""
    body: dict[str, Any] = {"__metadata__": {METADATA_KEY: json.dumps(document, separators=(",", ":"))}}
    for array in arrays:
        body[array.name] = {
            "dtype": array.dtype,
            "shape": array.shape,
            "data_offsets": [array.start, array.stop],
        }
    text = json.dumps(body, separators=(",", ":")).encode()
    total = roundup(LENGTH_BYTES + len(text), ALIGNMENT_BYTES)
    length = total - LENGTH_BYTES
    if length > MAX_HEADER_BYTES:
        raise HeaderError(f"the header would take {length} bytes, over {MAX_HEADER_BYTES}")
    return struct.pack("<Q", length) + text.ljust(length)


def header_length(prefix: bytes, *, what: str, size: int) -> int:
    """8 + n of a shard, from its first 8 bytes and its size.

    Raises:
        TruncatedError: the object is shorter than that.
        HeaderError: n is over the limit.
    """
    if len(prefix) < LENGTH_BYTES:
        raise TruncatedError(f"{what}: {size} bytes are too few for a header")
    (length,) = struct.unpack_from("<Q", prefix)
    if length > MAX_HEADER_BYTES:
        raise HeaderError(f"{what}: the header claims {length} bytes, over {MAX_HEADER_BYTES}")
    if LENGTH_BYTES + length > size:
        raise TruncatedError(f"{what}: the header claims {length} bytes, the object has {size}")
    if (LENGTH_BYTES + length) % ALIGNMENT_BYTES:
        raise HeaderError(f"{what}: the header is not padded to a multiple of {ALIGNMENT_BYTES}")
    return int(LENGTH_BYTES + length)


def parse_header(header: bytes, *, what: str, size: int) -> Container:
    """Parse the bytes [0, 8 + n) of a shard of `size` bytes.

    Raises:
        HeaderError: JSON, names, dtypes, shapes or offsets break SPEC 4.
        TruncatedError: the object is shorter than its arrays.
    """
    try:
        text = header[LENGTH_BYTES:].decode()
    except UnicodeDecodeError as error:
        raise HeaderError(f"{what}: the header is not UTF-8") from error
    body = strict_json.loads(text, what=f"{what}: header", max_depth=MAX_HEADER_DEPTH)
    metadata = body.pop("__metadata__", None)
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise HeaderError(f"{what}: __metadata__ is missing or holds something other than strings")
    if METADATA_KEY not in metadata:
        raise HeaderError(f"{what}: not a lynxkv shard: __metadata__ has no {METADATA_KEY!r}")
    if len(body) > MAX_ARRAYS:
        raise HeaderError(f"{what}: {len(body)} arrays are over {MAX_ARRAYS}")
    arrays = tuple(sorted((_array(name, entry, what) for name, entry in body.items()), key=lambda a: (a.start, a.stop)))
    at = 0
    for array in arrays:
        if array.start != at:
            raise HeaderError(f"{what}: array {array.name!r} starts at {array.start}, not at {at}")
        if array.stop == array.start:
            raise HeaderError(f"{what}: array {array.name!r} is empty")
        at = array.stop
    container = Container(header_bytes=len(header), arrays=arrays, document=metadata[METADATA_KEY])
    if container.file_bytes > size:
        raise TruncatedError(f"{what}: has {size} bytes, its header describes {container.file_bytes}")
    if container.file_bytes < size:
        raise HeaderError(f"{what}: has {size} bytes, its header describes {container.file_bytes}")
    return container


def _array(name: str, entry: Any, what: str) -> ArrayInfo:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise HeaderError(f"{what}: array {name!r} needs dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise HeaderError(f"{what}: array {name!r} has the dtype {dtype!r}")
    if not _sizes(shape) or len(shape) > 8 or not _sizes(offsets) or len(offsets) != 2:
        raise HeaderError(f"{what}: array {name!r} has a malformed shape or data_offsets")
    start, stop = offsets
    if prod(shape) >= MAX_INTEGER or prod(shape) * ITEM_BYTES[dtype] != stop - start:
        raise HeaderError(f"{what}: array {name!r} of shape {shape} does not take {stop - start} bytes")
    return ArrayInfo(name=name, dtype=dtype, shape=tuple(shape), start=start, stop=stop)


def _sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)
