"""Codecs by name. To add one: a file here with a `Codec` subclass, a line below, and a row in tests/codecs."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from lynxkv.codecs.alg1 import Alg1
from lynxkv.codecs.alg1_shift import Alg1Shift
from lynxkv.codecs.base import Codec
from lynxkv.codecs.int_token import Int4, Int8
from lynxkv.codecs.linear import Linear
from lynxkv.codecs.raw import Raw
from lynxkv.codecs.uniform import Compact, Fast, Quality, Uniform
from lynxkv.errors import InputError

CODECS: dict[str, type[Codec]] = {
    codec.name: codec for codec in (Uniform, Quality, Fast, Compact, Linear, Alg1, Alg1Shift, Raw, Int8, Int4)
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
    kind = CODECS[codec]
    types = get_type_hints(kind)
    names = [field.name for field in fields(kind)]
    for name, value in params.items():
        if name not in names:
            raise InputError(f"codec {codec} has no parameter {name!r}", hint=f"it has {', '.join(names)}")
        if not _fits(value, types[name]):
            raise InputError(f"codec {codec}: {name} cannot be {value!r}", hint=f"it is {_words(types[name])}")
    return kind(**params)


def _fits(value: Any, kind: Any) -> bool:
    """Whether a parameter of this type can have this value; whole numbers are numbers."""
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    return type(value) is kind or (kind is float and type(value) is int)


def _words(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return " or ".join(get_args(kind))
    return {bool: "true or false", int: "a whole number", float: "a number"}[kind]


__all__ = ["CODECS", "Codec", "get_codec"]
