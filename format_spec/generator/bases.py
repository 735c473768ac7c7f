"""Bases by formula for the test vectors (SPEC 8.8): rows and rope tables are small formulas of their indices."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from format_spec.generator.writer import Document

F32 = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]


def tilted(y: Ints, c: Ints, z: int) -> Any:
    """Rows of small numbers of both signs."""
    return (3 * y + 5 * c + y * c + z) % 15 - 7


@dataclass(frozen=True, kw_only=True)
class Basis:
    """How layers are transformed: `blocks` a tensor, `pairs` of the rope that turns keys (0: none), its positions."""

    blocks: int = 1
    pairs: int = 0
    positions: int = 128
    rows: Callable[[Ints, Ints, int], Any] = tilted
    # Changes to what is written, each of which breaks a rule.
    channels: int | None = None
    document: Document = field(default_factory=dict)
    table: float | None = None

    def matrix(self, channels: int, z: int) -> npt.NDArray[np.int8]:
        """Rows [blocks, n, n] of tensor number z."""
        n = channels // self.blocks
        b, y, c = np.meshgrid(np.arange(self.blocks), np.arange(n), np.arange(n), indexing="ij")
        return np.broadcast_to(self.rows(y + b, c, z), b.shape).astype(np.int8)

    def tables(self) -> tuple[F32, F32]:
        """Cosines and sines, `coarse` [c, m, 2] and `fine` [64, m, 2]: thirds, so that products round."""
        coarse = np.arange(self.positions // 64 * self.pairs * 2).reshape(-1, self.pairs, 2)
        fine = np.arange(64 * self.pairs * 2).reshape(64, self.pairs, 2)
        return tuple((((37 * i + 11) % 64 - 31) / 48).astype(np.float32) for i in (coarse, fine))  # type: ignore[return-value]

    def turned(self, values: F32, name: str, first: int) -> F32:
        """Values [t, H, D] turned by position, the first of which is `first`; keys only."""
        fits = 2 * self.pairs <= values.shape[2] and first + len(values) <= self.positions
        if name != "k" or not self.pairs or not fits:
            return values
        m, out = self.pairs, values.copy()
        coarse, fine = self.tables()
        with np.errstate(over="ignore", invalid="ignore"):
            for t in range(len(values)):
                a, b = divmod(first + t, 64)
                for i in range(m):
                    cos = coarse[a, i, 0] * fine[b, i, 0] - coarse[a, i, 1] * fine[b, i, 1]
                    sin = coarse[a, i, 1] * fine[b, i, 0] + coarse[a, i, 0] * fine[b, i, 1]
                    x, y = values[t, :, i], values[t, :, m + i]
                    out[t, :, i], out[t, :, m + i] = x * cos - y * sin, y * cos + x * sin
        return out

    def file(self, layers: list[Document]) -> bytes:
        """The basis of these layers, as stored."""
        arrays: dict[str, tuple[str, npt.NDArray[Any]]] = {}
        if self.pairs:
            coarse, fine = self.tables()
            if self.table is not None:
                coarse[0, 0, 0] = self.table
            arrays = {"rope.main.coarse": ("F32", coarse), "rope.main.fine": ("F32", fine)}
        z, described = 0, []
        for number, one in enumerate(layers):
            described.append(
                {name: {"rope": "main" if name == "k" and self.pairs else None} for name in one["tensors"]}
            )
            for name, spec in one["tensors"].items():
                channels = self.channels or spec["heads"] * spec["head_dim"]
                arrays[f"layer.{number}.{name}"] = ("I8", self.matrix(channels, z))
                z += 1
        document: Document = {
            "version": "1.0",
            "role": "basis",
            "required": [],
            "fingerprint": None,
            "model_id": None,
            "layers": described,
            "calibration": {},
            "writer": {"tool": "generate_vectors.py", "version": "0.1"},
        } | self.document
        body: Document = {"__metadata__": {"lynxkv": json.dumps(document, separators=(",", ":"))}}
        data = bytearray()

        def enter(name: str, dtype: str, shape: list[int], content: bytes) -> None:
            body[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
            data.extend(content)

        for number, (name, (dtype, values)) in enumerate(arrays.items()):
            enter(name, dtype, list(values.shape), values.astype("i1" if dtype == "I8" else "<f4").tobytes())
            if pad := -len(data) % 64:
                enter(f"pad.{number}", "U8", [pad], bytes(pad))
        text = json.dumps(body, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % 64)
        return struct.pack("<Q", len(text)) + text + bytes(data)


def reference(stored: bytes) -> Document:
    """What a cache says of a basis."""
    digest = hashlib.sha256(stored).hexdigest()
    return {"name": f"basis-{digest[:16]}.safetensors", "sha256": digest, "bytes": len(stored)}
