"""What the segments of a tensor share: codebooks, means, steps (SPEC 4.1)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt

from lynxkv.errors import InputError
from lynxkv.format.basis import FINE_POSITIONS, Basis, RopeTables, TensorBasis
from lynxkv.layout import CacheHeader, TensorRef

F32 = npt.NDArray[np.float32]

# How much larger, relative to the values, a basis may make rounding errors.
_MAX_CONDITION = 1e3


@dataclass(frozen=True, kw_only=True)
class Cells:
    """A search in ascending f32 entries, prepared: floats with the same upper 16 bits form a cell.

    `below` [65536] is, for the smallest float of each cell, the number of entries below it ("left") or not above it
    ("right"); `entries` go on with infinities; `most` entries at most lie within a cell, so `most` comparisons from
    `below` on finish the search.
    """

    below: npt.NDArray[np.uint32]
    entries: F32
    most: int

    @classmethod
    def of(cls, entries: F32 | None, *, side: Literal["left", "right"]) -> Cells:
        """Prepare `entries`; None gives an empty search."""
        if entries is None:
            return cls(below=np.empty(0, np.uint32), entries=np.empty(0, np.float32), most=0)
        upper = np.arange(1 << 16, dtype=np.uint32) << 16
        inner, outer = upper.view(np.float32), (upper | 0xFFFF).view(np.float32)
        negative = upper >> 31 == 1
        with np.errstate(invalid="ignore"):
            below = np.searchsorted(entries, np.where(negative, outer, inner), side=side)
            within = np.searchsorted(entries, np.where(negative, inner, outer), side=side) - below
        most = max(1, int(within[np.isfinite(inner)].max()))
        padded = np.concatenate([entries, np.full(most + 1, np.inf, np.float32)]).astype(np.float32)
        return cls(below=below.astype(np.uint32), entries=padded, most=most)


def _even(book: F32) -> tuple[np.float32, np.float32] | None:
    if book.size < 2:
        return None
    with np.errstate(over="ignore", invalid="ignore"):  # of hostile tables
        slope, base = np.float32(book[1] - book[0]), book[0]
        entries = np.arange(book.size, dtype=np.float32) * slope + base
    return (slope, base) if entries.tobytes() == book.tobytes() else None


@dataclass(frozen=True, kw_only=True)
class FixedTables:
    """Values of codes, f32: `anchor` [2^a], `full` [2^(a+r)], `scale` and `offset` [256] for u8 chunk parameters.

    The quantiser alone uses the rest: a scaled value between edges[i - 1] and edges[i] takes the full code buckets[i],
    and a chunk is scaled so that its largest magnitude becomes `peak`.
    """

    anchor: F32
    full: F32 | None = None
    scale: F32 | None = None
    offset: F32 | None = None
    edges: F32 | None = None
    buckets: npt.NDArray[np.uint8] | None = None
    peak: float = 1.0

    def quantiser(self) -> tuple[F32, npt.NDArray[np.uint8]]:
        """Edges and buckets, which tables read from a cache do not have."""
        if self.edges is None or self.buckets is None:
            raise TypeError("these tables only decode")
        return self.edges, self.buckets

    @cached_property
    def edge_cells(self) -> Cells:
        """The search for the bucket of a value."""
        return Cells.of(self.quantiser()[0], side="right")

    @cached_property
    def bucket_cells(self) -> npt.NDArray[np.uint32]:
        """The same in one look-up, where no cell holds more than one edge; otherwise empty.

        Entry c [65536] is threshold + a << 16 + b << 24: of floats with the upper half c, those whose lower half is not
        below the threshold have the code b, the others a.
        """
        (edges, buckets), cells = self.quantiser(), self.edge_cells
        if cells.most > 1:
            return np.empty(0, np.uint32)
        upper = np.arange(1 << 16, dtype=np.uint32)
        negative = upper >> 15 == 1
        edge = cells.entries[cells.below]
        # Both zeros reach an edge at zero; below it lie the floats after -0.
        bits = np.where(negative & (edge == 0), np.float32(-0.0), edge).astype(np.float32).view(np.uint32)
        below = buckets[cells.below].astype(np.uint32)
        above = buckets[np.minimum(cells.below + 1, edges.size)].astype(np.uint32)
        inside, lower = bits >> 16 == upper, bits & 0xFFFF
        # The lower half of a negative float grows downwards: up to and with the edge's it is above.
        all_above = inside & negative & (lower == 0xFFFF)
        split = inside & ~all_above
        threshold = np.where(split, np.where(negative, lower + 1, lower), 0)
        a = np.where(split & negative | all_above, above, below)
        b = np.where(split & ~negative | all_above, above, below)
        entries: npt.NDArray[np.uint32] = (threshold | a << 16 | b << 24).astype(np.uint32)
        return entries

    @cached_property
    def reach(self) -> dict[str, float]:
        """The largest magnitudes that codes and 8-bit parameters stand for; NaN if a table holds one."""
        books = {"anchor": self.anchor, "full": self.full, "scale": self.scale, "offset": self.offset}
        return {name: float(np.abs(book).max(initial=0)) for name, book in books.items() if book is not None}

    @cached_property
    def even(self) -> dict[str, tuple[np.float32, np.float32] | None]:
        """(slope, base) of each codebook whose every entry is fl(fl(code * slope) + base)."""
        return {name: _even(book) for name, book in (("anchor", self.anchor), ("full", self.full)) if book is not None}

    @cached_property
    def scale_cells(self) -> Cells:
        """The search for the least 8-bit scale not below a value; empty without such scales."""
        return Cells.of(self.scale, side="left")

    @cached_property
    def offset_cells(self) -> Cells:
        """The same for 8-bit offsets."""
        return Cells.of(self.offset, side="left")


@dataclass(frozen=True, kw_only=True)
class Rope:
    """How tokens are turned: `tables` by position, and the position of the first token."""

    tables: RopeTables
    first: int

    def angles(self, tokens: int) -> tuple[F32, F32]:
        """Cosines and sines [tokens, m] of the first `tokens` tokens; every operation rounds to f32 (SPEC 8.8)."""
        position = np.arange(self.first, self.first + tokens)
        coarse = self.tables.coarse[position // FINE_POSITIONS]
        fine = self.tables.fine[position % FINE_POSITIONS]
        with np.errstate(over="ignore", invalid="ignore"):  # of hostile tables: decoding makes zeros of NaN
            cos = coarse[..., 0] * fine[..., 0] - coarse[..., 1] * fine[..., 1]
            sin = coarse[..., 1] * fine[..., 0] + coarse[..., 0] * fine[..., 1]
        return cos, sin


@dataclass(frozen=True, kw_only=True)
class Transform:
    """The basis whose components are coded instead of channels, then the rope, if any."""

    basis: TensorBasis
    rope: Rope | None = None

    @classmethod
    def of(cls, basis: Basis, header: CacheHeader, ref: TensorRef) -> Transform:
        """That of one tensor's coded tokens."""
        own = basis.layers[ref.layer][ref.name]
        if own.rope is None:
            return cls(basis=own)
        first = header.layers[ref.layer].start + ref.sinks
        return cls(basis=own, rope=Rope(tables=basis.ropes[own.rope], first=first))

    @property
    def rows(self) -> npt.NDArray[np.int8]:
        """[blocks, n, n]."""
        return self.basis.rows

    @property
    def blocks(self) -> int:
        return int(self.rows.shape[0])

    @property
    def size(self) -> int:
        """n: components of a block."""
        return int(self.rows.shape[1])

    @cached_property
    def inverse(self) -> F32:
        """What leads from channels to components, [blocks, n, n].

        Raises:
            InputError: there is no such thing, or only one that blows rounding errors up. Directions at right angles,
                as calibrating finds them, do not.
        """
        rows = self.rows.astype(np.float64)
        try:
            inverse = np.linalg.inv(rows)
        except np.linalg.LinAlgError as error:
            raise InputError("the basis has no inverse", hint="calibrate the model again") from error
        # Frobenius norms: n where rows are at right angles and of one length.
        condition = np.linalg.norm(rows, axis=(1, 2)) * np.linalg.norm(inverse, axis=(1, 2))
        if not (condition <= _MAX_CONDITION * self.size).all():
            raise InputError("the basis is too near to one without inverse", hint="calibrate the model again")
        return inverse.astype(np.float32)

    def at(self, token: int) -> Transform:
        """The same for tokens from `token` on."""
        if self.rope is None:
            return self
        moved = replace(self, rope=replace(self.rope, first=self.rope.first + token))
        if "inverse" in self.__dict__:
            moved.__dict__["inverse"] = self.inverse
        return moved


@dataclass(frozen=True, kw_only=True)
class EntropyTables:
    """Channel means [N] (f32, exact in bf16), stored order [N] of channels or components, step and half-step.

    With `transform` the steps are those of its components.
    """

    mean: F32
    order: npt.NDArray[np.uint16]
    step: np.float32
    half_step: np.float32
    transform: Transform | None = None

    @cached_property
    def row_of(self) -> npt.NDArray[np.int64]:
        """Where in the stored order each channel or component is."""
        rows = np.empty(self.order.size, np.int64)
        rows[self.order] = np.arange(self.order.size)
        return rows

    @cached_property
    def mean_reach(self) -> float:
        """The largest magnitude of a mean."""
        return float(np.abs(self.mean).max(initial=0))


@dataclass(frozen=True, kw_only=True)
class ChannelStatistics:
    """Of each channel, [N]: its mean rounded to bf16 (f32), and its variance (f64) about the mean before rounding: a
    large bias, which bf16 holds coarsely, is no spread. `peak` is the largest distance of a value from a rounded mean.
    """

    mean: F32
    variance: npt.NDArray[np.float64]
    peak: float


Tables = FixedTables | EntropyTables | None


def tables_at(tables: Tables, token: int) -> Tables:
    """What decodes the tokens from `token` on, where `tables` are those of a tensor's coded tokens."""
    if not isinstance(tables, EntropyTables) or tables.transform is None:
        return tables
    return replace(tables, transform=tables.transform.at(token))
