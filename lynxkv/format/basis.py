"""A basis: what turns a model's keys and values into components that depend less on each other (SPEC 8.8).

Made once a model by `lynxkv calibrate`; caches name it by digest. One safetensors file: per layer and tensor the
integer matrix that leads back from components to channels, and the tables that turn keys by their positions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from lynxkv.errors import BindingError, ContentError, HeaderError
from lynxkv.format import limits, strict_json
from lynxkv.format.container import LENGTH_BYTES, ArrayInfo, Container, header_length, parse_header, render_header
from lynxkv.format.document import VERSION, Fields, basis_file, check_version
from lynxkv.layout import ALIGNMENT_BYTES, CacheHeader, TensorName, TransformRef, roundup

F32 = npt.NDArray[np.float32]
I8 = npt.NDArray[np.int8]

FINE_POSITIONS = 64
TENSORS: tuple[TensorName, ...] = ("k", "v")
"""What has a basis."""
_ITEMS: dict[str, Any] = {"I8": np.int8, "F32": "<f4"}


@dataclass(frozen=True, kw_only=True)
class RopeTables:
    """Cosines and sines, f32: `coarse` [c, m, 2] of the multiples of 64, `fine` [64, m, 2] of what is left."""

    coarse: F32
    fine: F32

    @property
    def pairs(self) -> int:
        """m: channels i and m + i of each head are turned together, for i < m."""
        return int(self.fine.shape[1])

    @property
    def positions(self) -> int:
        """Positions below this have angles."""
        return FINE_POSITIONS * int(self.coarse.shape[0])


@dataclass(frozen=True, kw_only=True)
class TensorBasis:
    """One tensor's basis: `rows` [blocks, n, n] i8, row y of a block the channels that component y stands for; and the
    name of the rope that turns its channels, or None.
    """

    rows: I8
    rope: str | None = None

    @property
    def channels(self) -> int:
        return int(self.rows.shape[0] * self.rows.shape[1])

    @cached_property
    def weight(self) -> int:
        """The largest sum of magnitudes that lead to one channel: how much an index can grow."""
        return int(np.abs(self.rows.astype(np.int64)).sum(1).max())

    @cached_property
    def norm(self) -> float:
        """Root mean square length of the rows."""
        return float(np.sqrt(np.square(self.rows.astype(np.float64)).sum(2).mean()))


@dataclass(frozen=True, kw_only=True)
class Basis:
    """A model's basis. `data` is the file, which `sha256` names; `fingerprint` is the model's (SPEC 9.1)."""

    fingerprint: str | None
    model_id: str | None
    layers: tuple[dict[TensorName, TensorBasis], ...]
    ropes: dict[str, RopeTables]
    data: bytes

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()

    @property
    def ref(self) -> TransformRef:
        """What a cache says of it."""
        digest = self.sha256
        return TransformRef(name=basis_file(digest), sha256=digest, bytes=len(self.data))

    def check_belongs(self, fingerprint: str | None) -> None:
        """Raise a BindingError if this basis is that of another model than the one with this fingerprint."""
        if None not in (fingerprint, self.fingerprint) and fingerprint != self.fingerprint:
            raise BindingError(
                f"the basis is that of another model ({self.model_id})", hint="calibrate this one: lynxkv calibrate"
            )

    def check_fits(self, header: CacheHeader) -> None:
        """Raise a BindingError unless this basis has every entropy-coded tensor and position of `header`."""
        for ref in header.tensors:
            if ref.coding.scheme != "entropy" or not ref.coded_tokens:
                continue
            own = self.layers[ref.layer].get(ref.name) if ref.layer < len(self.layers) else None
            if own is None or own.channels != ref.spec.channels:
                raise BindingError(f"the basis does not fit {ref.key} of {ref.spec.heads} heads x {ref.spec.head_dim}")
            if own.rope is None:
                continue
            rope = self.ropes[own.rope]
            if 2 * rope.pairs > ref.spec.head_dim or header.layers[ref.layer].stop > rope.positions:
                raise BindingError(f"the basis turns {rope.pairs} pairs up to position {rope.positions}, not {ref.key}")


def render_basis(
    layers: tuple[dict[TensorName, TensorBasis], ...],
    ropes: Mapping[str, RopeTables],
    *,
    fingerprint: str | None,
    model_id: str | None,
    writer: Mapping[str, Any],
    calibration: Mapping[str, Any],
) -> Basis:
    """Lay out a basis as a file. `calibration` says what it was made from; informative."""
    content: dict[str, npt.NDArray[Any]] = {}
    for name, rope in ropes.items():
        content[f"rope.{name}.coarse"], content[f"rope.{name}.fine"] = rope.coarse, rope.fine
    for number, layer in enumerate(layers):
        for tensor, own in layer.items():
            content[f"layer.{number}.{tensor}"] = own.rows
    arrays, parts, at, pads = [], [], 0, 0
    for name, values in content.items():
        dtype = "I8" if values.dtype == np.int8 else "F32"
        data = np.ascontiguousarray(values).tobytes()
        arrays.append(ArrayInfo(name=name, dtype=dtype, shape=values.shape, start=at, stop=at + len(data)))
        parts.append(data)
        at += len(data)
        if at % ALIGNMENT_BYTES:
            pad = bytes(roundup(at, ALIGNMENT_BYTES) - at)
            arrays.append(ArrayInfo(name=f"pad.{pads}", dtype="U8", shape=(len(pad),), start=at, stop=at + len(pad)))
            parts.append(pad)
            at, pads = at + len(pad), pads + 1
    document = {
        "version": VERSION,
        "role": "basis",
        "required": [],
        "fingerprint": fingerprint,
        "model_id": model_id,
        "layers": [{tensor: {"rope": own.rope} for tensor, own in layer.items()} for layer in layers],
        "calibration": dict(calibration),
        "writer": dict(writer),
    }
    return Basis(
        fingerprint=fingerprint,
        model_id=model_id,
        layers=layers,
        ropes=dict(ropes),
        data=b"".join((render_header(arrays, document), *parts)),
    )


def parse_basis(data: bytes, *, what: str) -> Basis:
    """A basis from the bytes of its file. Whether they are the right ones is for the caller to say, by their digest.

    Raises:
        TruncatedError, HeaderError: they are not a basis.
        UnsupportedFormatError: of another version, or with required features.
        ContentError: a table is not finite.
    """
    header_bytes = header_length(data[:LENGTH_BYTES], what=what, size=len(data))
    container = parse_header(data[:header_bytes], what=what, size=len(data))
    document = strict_json.loads(
        container.document, what=f"{what}: document", max_depth=limits.MAX_DOCUMENT_DEPTH, max_string=limits.MAX_STRING
    )
    fields = Fields(document, what)
    check_version(fields, role="basis", features=())
    arrays = _Arrays(container, data, what)
    layers: list[dict[TensorName, TensorBasis]] = []
    ropes: dict[str, RopeTables] = {}
    for number, value in enumerate(fields.list("layers", limits.MAX_LAYERS)):
        layer = Fields(value, f"{what}.layers[{number}]")
        own: dict[TensorName, TensorBasis] = {}
        for tensor in TENSORS:
            rows = arrays.take(f"layer.{number}.{tensor}", "I8", 3)
            if rows.shape[1] != rows.shape[2] or rows.shape[0] * rows.shape[1] > limits.MAX_CHANNELS:
                raise HeaderError(f"{what}: layer.{number}.{tensor} has the shape {rows.shape}")
            rope = layer.object(tensor).optional("rope", layer.object(tensor).string)
            if rope is not None and rope not in ropes:
                ropes[rope] = arrays.rope(rope)
            own[tensor] = TensorBasis(rows=rows, rope=rope)
        layers.append(own)
    return Basis(
        fingerprint=fields.optional("fingerprint", fields.hex64),
        model_id=fields.optional("model_id", fields.string),
        layers=tuple(layers),
        ropes=ropes,
        data=data,
    )


class _Arrays:
    """The arrays of a basis by name."""

    def __init__(self, container: Container, data: bytes, what: str) -> None:
        self._infos = {item.name: item for item in container.arrays}
        self._data, self._start, self._what = data, container.header_bytes, what

    def take(self, name: str, dtype: str, dims: int) -> npt.NDArray[Any]:
        info = self._infos.get(name)
        if info is None or info.dtype != dtype or len(info.shape) != dims:
            raise HeaderError(f"{self._what}: there is no array {name} of {dims} dims and dtype {dtype}")
        count = (info.stop - info.start) // np.dtype(_ITEMS[dtype]).itemsize
        flat = np.frombuffer(self._data, _ITEMS[dtype], count, self._start + info.start)
        return flat.reshape(info.shape)

    def rope(self, name: str) -> RopeTables:
        coarse = self.take(f"rope.{name}.coarse", "F32", 3)
        fine = self.take(f"rope.{name}.fine", "F32", 3)
        if fine.shape[0] != FINE_POSITIONS or fine.shape[2] != 2 or coarse.shape[1:] != fine.shape[1:]:
            raise HeaderError(f"{self._what}: the tables of rope {name} are {coarse.shape} and {fine.shape}")
        if not (np.isfinite(coarse).all() and np.isfinite(fine).all()):
            raise ContentError(f"{self._what}: a table of rope {name} is not finite")
        return RopeTables(coarse=coarse, fine=fine)
