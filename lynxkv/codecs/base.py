"""What a codec is: the encoder's choices. Decoding needs none of this, only codings and tables (SPEC 8)."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args, get_origin, get_type_hints

from torch import Tensor

from lynxkv.errors import InputError
from lynxkv.format.limits import MAX_SINK_TOKENS
from lynxkv.kernels.tables import F32, Tables, Transform
from lynxkv.kv import KV
from lynxkv.layout import Coding, Precision, TensorName

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

SEGMENT_ELEMENTS = 1 << 20
# Attention favours the first tokens whatever they say. On SmolLM2, keeping 4 of them took Algorithm 1's attention
# error from 1.8e-2 to 6.1e-3.
SINK_TOKENS = 4


@dataclass(frozen=True, kw_only=True)
class Place:
    """What a quantiser may know of a tensor beside its values: what its layer's steps are to be multiplied by, and the
    basis whose components are to be coded, at the position of the first coded token.
    """

    step_factor: float = 1.0
    transform: Transform | None = None


ANYWHERE = Place()


@dataclass(frozen=True, kw_only=True)
class Codec(ABC):
    """A quantisation method. The dataclass fields of a subclass are its parameters.

    `compress`: whether segments go through zstd where that makes them smaller.

    Raises:
        InputError: a parameter has a value that is not of its type, or out of its range.
    """

    name: ClassVar[str]
    takes_basis: ClassVar[bool] = False
    """Whether it can code the components of a basis."""
    needs_basis: ClassVar[bool] = False

    compress: bool = True

    def __post_init__(self) -> None:
        check_types(self)

    def params(self) -> dict[str, Any]:
        """The parameters, for the record in the cache."""
        return asdict(self)

    @abstractmethod
    def coding(self, tensor: TensorName, channels: int) -> Coding:
        """How segments of a tensor of N channels are stored."""

    def codebooks(self) -> dict[str, F32]:
        """Codebook arrays by name, without the leading `codebook.` (SPEC 4.1)."""
        return {}

    def step_factors(self, kv: KV) -> list[float]:
        """For each layer what `tables` is to multiply its steps by, seen from all layers together; 1 is usual."""
        return [1.0] * len(kv.layers)

    @abstractmethod
    def tables(self, x: Tensor, tensor: TensorName, place: Place = ANYWHERE) -> Tables:
        """What the quantiser needs to know of the coded tokens x [H, n, D], any float dtype.

        Codecs whose scales follow from the values have no use for `place`.
        """

    @abstractmethod
    def error_bound(self, x: Tensor, tensor: TensorName, precision: Precision) -> Tensor:
        """Bound on |decoded - x| for each element of x [H, n, D], f32, before rounding to the declared dtype."""


def check_types(parameters: DataclassInstance) -> None:
    """Refuse, with an InputError, fields whose values are not of their types: int, float, bool, Literal strings."""
    hints = get_type_hints(type(parameters))
    for field in fields(parameters):
        _check_type(field.name, getattr(parameters, field.name), hints[field.name])


def check_range(name: str, value: float, low: float, high: float) -> None:
    """Refuse, with an InputError, a parameter outside [low, high]."""
    if not low <= value <= high:
        raise InputError(f"{name} is {value}", hint=f"it lies in [{low}, {high}]")


def check_sinks(sink_tokens: int) -> None:
    """Refuse, with an InputError, more sink tokens than a coding may have (SPEC 8)."""
    check_range("sink_tokens", sink_tokens, 0, MAX_SINK_TOKENS)


def _check_type(name: str, value: Any, wanted: Any) -> None:
    """Refuse a value that a field of this type cannot hold: int, float, bool, or a Literal of strings."""
    if get_origin(wanted) is Literal:
        if value not in get_args(wanted):
            raise InputError(f"{name} is {value!r}", hint=f"choose one of {', '.join(get_args(wanted))}")
    elif wanted is float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise InputError(f"{name} is {value!r}", hint="it is a finite number")
    elif type(value) is not wanted:
        raise InputError(f"{name} is {value!r}", hint="it is true or false" if wanted is bool else "it is an integer")


def segment_tokens(channels: int, unit: int) -> int:
    """Tokens a segment, a multiple of `unit`, for about 1 Mi elements."""
    return max(unit, SEGMENT_ELEMENTS // channels // unit * unit)
