"""What callers choose from by name. Imports nothing, so that a command line can offer it without loading a library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lynxkv.errors import InputError

Dtype = Literal["bf16", "fp16", "fp32"]
Precision = Literal["anchor", "full", "exact"]
ModelDtype = Literal["float32", "bfloat16", "float16"]
"""Of a model's weights and its live cache."""

Verify = Literal["none", "full", "exact"]
"""What a generated text is verified against."""

TransportName = Literal["auto", "fsspec", "obstore"]
"""What makes the requests when a cache is fetched."""

ResidualPolicy = Literal["error", "anchor-only"]
"""What loading does when the Residual cannot be fetched."""

CONCURRENCY = 8
"""Requests to a store in flight, unless somebody says otherwise."""

MAX_NEW_TOKENS = 256
"""Where a text ends that has not ended by itself, unless somebody says otherwise."""

OnFailure = Literal["error", "recompute"]
"""What a server does when the cache that a request names cannot be loaded."""

Target = Literal["int8", "default", "bf16", "exact"]
"""What a cache is to be at least as close to the original as, when a codec is chosen for it."""

CODEC_NAMES = ("default", "quality", "fast", "compact", "fixed", "alg1", "alg1-shift", "raw", "int8", "int4")
CODEC_FORM = "write it like default:radix=5 or alg1:alpha=100,chunk_dtype=f32"


@dataclass(frozen=True, kw_only=True)
class CodecChoice:
    """A codec's name and parameters; `exact` asks for what leads back to the original's bits."""

    name: str
    params: dict[str, Any]
    exact: bool


def parse_codec(text: str, names: Sequence[str] = CODEC_NAMES) -> CodecChoice:
    """One of `names` from `NAME` or `NAME:PARAMETER=VALUE,...`; `exact=true` goes with every codec.

    Raises:
        InputError: the text is not of that form, or names no codec. Whether the codec has these parameters is for
            `codecs.get_codec` to say.
    """
    name, _, settings = text.partition(":")
    if name not in names:
        raise InputError(f"there is no codec {name!r}", hint=f"choose one of {', '.join(names)}")
    params: dict[str, Any] = {}
    for setting in settings.split(",") if settings else []:
        key, equals, value = setting.partition("=")
        if not key or not equals or not value or key in params:
            raise InputError(f"cannot read the codec {text!r}", hint=CODEC_FORM)
        params[key] = _value(value)
    exact = params.pop("exact", False)
    if not isinstance(exact, bool):
        raise InputError(f"codec {text}: exact is {exact!r}", hint="it is true or false")
    return CodecChoice(name=name, params=params, exact=exact)


def _value(text: str) -> bool | int | float | str:
    """A number or a truth value where `text` is one, otherwise the text."""
    if text in ("true", "false"):
        return text == "true"
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text
