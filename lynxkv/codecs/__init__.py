"""Codecs by name. To add one: a file here with a `Codec` subclass, a line below, and a row in tests/codecs."""

from __future__ import annotations

from typing import Any

from lynxkv.codecs.alg1 import Alg1
from lynxkv.codecs.alg1_shift import Alg1Shift
from lynxkv.codecs.base import Codec
from lynxkv.codecs.int_token import Int4, Int8
from lynxkv.codecs.linear import Linear
from lynxkv.codecs.raw import Raw
from lynxkv.codecs.uniform import Fast, Quality, Uniform
from lynxkv.errors import InputError

CODECS: dict[str, type[Codec]] = {
    codec.name: codec for codec in (Uniform, Quality, Fast, Linear, Alg1, Alg1Shift, Raw, Int8, Int4)
}


def get_codec(codec: str | Codec, **params: Any) -> Codec:
    """The codec of this name with these parameters; a `Codec` is returned as it is.

    Raises:
        InputError: no such codec, or it has no such parameter or value.
    """
    if isinstance(codec, Codec):
        return codec
    if codec not in CODECS:
        raise InputError(f"there is no codec {codec!r}", hint=f"choose one of {', '.join(CODECS)}")
    try:
        return CODECS[codec](**params)
    except TypeError as error:
        raise InputError(f"codec {codec}: {error}") from error


__all__ = ["CODECS", "Codec", "get_codec"]
