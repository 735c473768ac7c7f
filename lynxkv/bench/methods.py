"""What is measured: anything that stores a KV cache in few bytes and decodes it again.

A codec of the library is measured through a cache in memory, encoded, fetched and decoded by the code that users run.
A baseline from elsewhere needs a `Method` and a `StoredCache` of its own, and nothing else here changes.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import fsspec

from lynxkv.choices import parse_codec
from lynxkv.codecs import Codec, get_codec
from lynxkv.decoder import Destination, decode_stages
from lynxkv.encoder import EncodeReport, encode
from lynxkv.errors import InputError
from lynxkv.fetch import open_cache
from lynxkv.kv import KV
from lynxkv.layout import Precision

DEFAULT_METHODS = (
    "default",
    "default:exact=true",
    "quality",
    "fast",
    "fixed",
    "alg1",
    "alg1:alpha=100,chunk_dtype=f32",
    "alg1-shift",
    "int8",
    "int8:compress=true",
    "int4",
    "raw",
)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Bytes of a stored cache, everything included: up to the anchor, up to full, and in all."""

    anchor_bytes: int
    full_bytes: int
    total_bytes: int


class StoredCache(Protocol):
    """A cache as a method keeps it."""

    @property
    def sizes(self) -> Sizes: ...

    def decode(self, destination: Destination) -> Iterator[Precision]:
        """Write it to `destination` and yield each precision once all of it is there: full at least."""


class Method(Protocol):
    """A way to store a KV cache. `label` names it in results; `settings` are all its parameters, defaults included."""

    @property
    def label(self) -> str: ...

    @property
    def settings(self) -> Mapping[str, Any]: ...

    def store(self, kv: KV) -> AbstractContextManager[StoredCache]:
        """Keep `kv` while the context lasts."""


@dataclass(frozen=True, kw_only=True)
class CodecMethod:
    """A codec of the library; `exact` adds what leads back to the original's bits."""

    label: str
    codec: Codec
    exact: bool = False

    @property
    def settings(self) -> Mapping[str, Any]:
        """The codec's name and parameters."""
        return {"codec": self.codec.name, **self.codec.params(), "exact": self.exact}

    @contextmanager
    def store(self, kv: KV) -> Iterator[StoredCache]:
        """Publish `kv` in memory."""
        folder = f"lynxkv-bench-{uuid.uuid4().hex}"
        report = encode(kv, f"memory://{folder}/cache.lynx", codec=self.codec, exact=self.exact)
        try:
            yield LynxStored(report)
        finally:
            fsspec.filesystem("memory").rm(f"/{folder}", recursive=True)


class LynxStored:
    """A published lynxkv cache."""

    def __init__(self, report: EncodeReport) -> None:
        self._url = report.url
        full_bytes = report.bytes_anchor + report.bytes_residual
        self.sizes = Sizes(
            anchor_bytes=report.bytes_anchor, full_bytes=full_bytes, total_bytes=full_bytes + report.bytes_exact
        )

    def decode(self, destination: Destination) -> Iterator[Precision]:
        """The Anchor, then the Residual in place, as far as there is one."""
        with open_cache(self._url) as reader:
            exact: tuple[Precision, ...] = ("exact",) if reader.header.has_exact else ()
            yield from decode_stages(reader, destination, ("anchor", "full", *exact))


def parse_methods(texts: Sequence[str]) -> tuple[CodecMethod, ...]:
    """Methods from `NAME` or `NAME:PARAMETER=VALUE,...`, each once. `exact=true` goes with every codec.

    Raises:
        InputError: a text is not of that form, names no codec or parameter, or comes twice.
    """
    methods = tuple(_method(text) for text in texts)
    for method in methods:
        if sum(method.settings == other.settings for other in methods) > 1:
            raise InputError(f"codec {method.label} is given twice", hint="name each setting once")
    return methods


def _method(text: str) -> CodecMethod:
    choice = parse_codec(text)
    return CodecMethod(label=text, codec=get_codec(choice.name, **choice.params), exact=choice.exact)
