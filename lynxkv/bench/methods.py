"""Methods by name: the library's codecs, and the baselines.

A codec of the library is measured through a cache in memory, encoded, fetched and decoded by the code that users run.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import fsspec

from lynxkv.bases import basis_of
from lynxkv.bench.baselines import BASELINES, BaselineMethod
from lynxkv.bench.stored import Method, Sizes, StoredCache, TensorDestination
from lynxkv.choices import CODEC_NAMES, parse_codec
from lynxkv.codecs import Codec, get_codec
from lynxkv.decoder import decode_stages
from lynxkv.encoder import EncodeReport, encode
from lynxkv.errors import InputError
from lynxkv.fetch import open_cache
from lynxkv.format.basis import Basis
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
BASELINE_METHODS = (
    "linear-split",
    "alg1:residual_bits=0,alpha=100,chunk_dtype=f32",
    "kivi",
    "kivi:bits=4",
    "kvquant:bits=3",
    "kvquant",
    "turboquant:bits=3",
    "turboquant",
    "cachegen",
    "cachegen:bin=0.15",
    "sparq",
    "sparq:components=32,top_tokens=512",
    "byte-planes",
)
"""What others do, as far as no further package is needed: `quanto` and `hqq` are theirs."""


@dataclass(frozen=True, kw_only=True)
class CodecMethod:
    """A codec of the library; `exact` adds what leads back to the original's bits."""

    label: str
    codec: Codec
    exact: bool = False
    basis: Basis | None = None

    @property
    def settings(self) -> Mapping[str, Any]:
        """The codec's name and parameters."""
        own = {"basis": self.basis.sha256} if self.basis is not None else {}
        return {"codec": self.codec.name, **self.codec.params(), "exact": self.exact, **own}

    @contextmanager
    def store(self, kv: KV) -> Iterator[StoredCache]:
        """Publish `kv` in memory."""
        folder = f"lynxkv-bench-{uuid.uuid4().hex}"
        report = encode(kv, f"memory://{folder}/cache.lynx", codec=self.codec, basis=self.basis, exact=self.exact)
        try:
            yield LynxStored(report)
        finally:
            fsspec.filesystem("memory").rm(f"/{folder}", recursive=True)


class LynxStored:
    """A published lynxkv cache."""

    sparse = None

    def __init__(self, report: EncodeReport) -> None:
        self._url = report.url
        full_bytes = report.bytes_anchor + report.bytes_residual
        self.sizes = Sizes(
            anchor_bytes=report.bytes_anchor, full_bytes=full_bytes, total_bytes=full_bytes + report.bytes_exact
        )

    def decode(self, destination: TensorDestination) -> Iterator[Precision]:
        """The Anchor, then the Residual in place, as far as there is one."""
        with open_cache(self._url) as reader:
            exact: tuple[Precision, ...] = ("exact",) if reader.extent.has_exact else ()
            yield from decode_stages(reader, destination, ("anchor", "full", *exact))


def parse_methods(texts: Sequence[str]) -> tuple[Method, ...]:
    """Methods from `NAME` or `NAME:PARAMETER=VALUE,...`, each once: codecs, with which `exact=true` goes, or baselines.

    Raises:
        InputError: a text is not of that form, names no method or parameter, or comes twice.
    """
    methods = tuple(_method(text) for text in texts)
    for method in methods:
        if sum(method.settings == other.settings for other in methods) > 1:
            raise InputError(f"codec {method.label} is given twice", hint="name each setting once")
    return methods


def with_bases(methods: Sequence[Method], fingerprint: str | None) -> tuple[Method, ...]:
    """The same, those that need a basis with the one that is kept for the model.

    Raises:
        InputError: there is none.
    """
    return tuple(
        replace(method, basis=basis_of(fingerprint))
        if isinstance(method, CodecMethod) and method.codec.needs_basis
        else method
        for method in methods
    )


def _method(text: str) -> Method:
    choice = parse_codec(text, (*CODEC_NAMES, *BASELINES))
    if choice.name in BASELINES:
        if choice.exact:
            raise InputError(f"{text}: baselines have no exact section", hint="exact=true goes with codecs")
        try:
            return BaselineMethod(label=text, baseline=BASELINES[choice.name](**choice.params))
        except TypeError as error:
            raise InputError(f"baseline {choice.name}: {error}") from error
    return CodecMethod(label=text, codec=get_codec(choice.name, **choice.params), exact=choice.exact)
