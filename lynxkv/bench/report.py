"""From measured cells to what one reads: a row a codec, paired comparisons, JSON and CSV."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np

from lynxkv.bench.cells import Cell
from lynxkv.bench.codec import CodecBench
from lynxkv.bench.measure import Fidelity
from lynxkv.bench.stats import Interval, bootstrap, difference, mean, ratio
from lynxkv.layout import Precision

Quantity = Literal["k", "v", "attention"]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One codec at one length, over all documents.

    `..._bits` are bits an element, everything included: up to the anchor, up to full precision, and of all that is
    stored. `..._nmse_...` are sums of squared errors over sums of squares, over all layers and documents. `kl_...` is
    in nats, `top1_...` a share. `accepted_...` counts tokens of a greedy draft of `draft_tokens` on the anchor that
    decoding on the original accepts, mean over all prompts with its 95 % interval; `accepted_full_...` is the same
    for a draft on the full cache. `accepted_by_full_mean` is a lower bound of what the codec's own full cache
    accepts of the anchor's draft. `target_tokens_mean` is the most that can be accepted: continuations may end.
    `top1_full_worst_gap` is how far, in nats, the original ranks the worst of the tokens that full precision prefers
    below its own. `exact_identical` says whether exact precision, where it is stored, gave every bit back.
    """

    codec: str
    model: str
    tokens: int
    anchor_bits: float
    full_bits: float
    total_bits: float
    attn_nmse_anchor: float
    attn_nmse_full: float
    kl_full: float
    top1_full: float
    accepted_mean: float
    accepted_low: float
    accepted_high: float
    draft_tokens: int
    kl_anchor: float
    top1_anchor: float
    top1_full_worst_gap: float
    accepted_full_mean: float
    accepted_full_low: float
    accepted_full_high: float
    accepted_by_full_mean: float
    target_tokens_mean: float
    k_nmse_anchor: float
    k_nmse_full: float
    v_nmse_anchor: float
    v_nmse_full: float
    exact_identical: bool | None
    documents: int
    prompts: int
    positions: int


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A codec against a baseline on the same documents and prompts; 95 % intervals, None where not finite.

    Accepted lengths are paired by prompt; errors of attention outputs by layer and document, as ratios (below 1: the
    codec is closer to the original).
    """

    codec: str
    baseline: str
    tokens: int
    accepted_difference: Interval | None
    accepted_ratio: Interval | None
    attn_ratio_anchor: Interval | None
    attn_ratio_full: Interval | None


@dataclass(frozen=True, kw_only=True)
class FrontPoint:
    """A codec at one precision that nothing measured at this length beats both in bits and in attention error."""

    codec: str
    tokens: int
    precision: Precision
    bits: float
    attn_nmse: float


def rows(bench: CodecBench) -> list[Row]:
    """One row a codec and length, in the order asked for."""
    return [_row(bench, codec, tokens) for tokens in bench.plan.tokens for codec in bench.codecs]


def comparisons(bench: CodecBench, baselines: Sequence[str]) -> list[Comparison]:
    """Every codec against each baseline among those measured."""
    return [
        _compare(bench, codec, baseline, tokens)
        for tokens in bench.plan.tokens
        for baseline in baselines
        if baseline in bench.codecs
        for codec in bench.codecs
        if codec != baseline
    ]


def front(table: Sequence[Row], tokens: int) -> list[FrontPoint]:
    """The Pareto front of rate and fidelity at one length, by ascending bits; of equals the first one measured."""
    points = [
        FrontPoint(codec=row.codec, tokens=tokens, precision=precision, bits=bits, attn_nmse=error)
        for row in table
        if row.tokens == tokens
        for precision, bits, error in _precisions(row)
    ]
    out: list[FrontPoint] = []
    for point in sorted(points, key=lambda item: (item.bits, item.attn_nmse)):
        if not out or point.attn_nmse < out[-1].attn_nmse:
            out.append(point)
    return out


def _precisions(row: Row) -> list[tuple[Precision, float, float]]:
    found: list[tuple[Precision, float, float]] = [("full", row.full_bits, row.attn_nmse_full)]
    if row.anchor_bits < row.full_bits:
        found.insert(0, ("anchor", row.anchor_bits, row.attn_nmse_anchor))
    if row.exact_identical:
        found.append(("exact", row.total_bits, 0.0))
    return found


def as_json(bench: CodecBench, baselines: Sequence[str]) -> dict[str, Any]:
    """Everything but the single cells."""
    table = rows(bench)
    return {
        **bench.facts(),
        "rows": [asdict(row) for row in table],
        "front": [asdict(point) for tokens in bench.plan.tokens for point in front(table, tokens)],
        "comparisons": [asdict(comparison) for comparison in comparisons(bench, baselines)],
    }


def write_csv(table: Sequence[Row], path: Path) -> None:
    """The rows, with a line of names."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)])
        writer.writeheader()
        writer.writerows(asdict(row) for row in table)


def cells_of(bench: CodecBench, codec: str, tokens: int) -> list[Cell]:
    """The cells of one codec at one length, by document."""
    return [cell for cell in bench.cells if (cell.codec, cell.tokens) == (codec, tokens)]


def nmse(cells: Sequence[Cell], quantity: Quantity, precision: Precision) -> float:
    """Sum of squared errors over sum of squares, over all layers of all cells."""
    sums = np.sum([_errors(cell, quantity, precision) for cell in cells], axis=(0, 1))
    return float(sums[0] / sums[1] if sums[1] else sums[0])


def _row(bench: CodecBench, codec: str, tokens: int) -> Row:
    cells = cells_of(bench, codec, tokens)
    elements = sum(cell.elements for cell in cells)
    anchor, full = [cell.anchor for cell in cells], [cell.full for cell in cells]
    accepted, accepted_full = (_interval([item.accepted for item in group]) for group in (anchor, full))
    return Row(
        codec=codec,
        model=bench.model,
        tokens=tokens,
        anchor_bits=sum(cell.sizes.anchor_bytes for cell in cells) * 8 / elements,
        full_bits=sum(cell.sizes.full_bytes for cell in cells) * 8 / elements,
        total_bits=sum(cell.sizes.total_bytes for cell in cells) * 8 / elements,
        attn_nmse_anchor=nmse(cells, "attention", "anchor"),
        attn_nmse_full=nmse(cells, "attention", "full"),
        kl_full=_mean(full, lambda item: item.kl),
        top1_full=_mean(full, lambda item: item.agrees),
        accepted_mean=accepted.value,
        accepted_low=accepted.low,
        accepted_high=accepted.high,
        draft_tokens=bench.plan.draft_tokens,
        kl_anchor=_mean(anchor, lambda item: item.kl),
        top1_anchor=_mean(anchor, lambda item: item.agrees),
        top1_full_worst_gap=max(max(item.gap) for item in full),
        accepted_full_mean=accepted_full.value,
        accepted_full_low=accepted_full.low,
        accepted_full_high=accepted_full.high,
        # Up to the first of the two misses all three greedy texts are the same.
        accepted_by_full_mean=float(
            np.mean(
                [min(pair) for cell in cells for pair in zip(cell.anchor.accepted, cell.full.accepted, strict=True)]
            )
        ),
        target_tokens_mean=float(np.mean([length for cell in cells for length in cell.target_tokens])),
        k_nmse_anchor=nmse(cells, "k", "anchor"),
        k_nmse_full=nmse(cells, "k", "full"),
        v_nmse_anchor=nmse(cells, "v", "anchor"),
        v_nmse_full=nmse(cells, "v", "full"),
        exact_identical=_identical(cells),
        documents=len(cells),
        prompts=sum(len(item.accepted) for item in full),
        positions=sum(len(item.kl) for item in full),
    )


def _compare(bench: CodecBench, codec: str, baseline: str, tokens: int) -> Comparison:
    pairs = list(zip(cells_of(bench, codec, tokens), cells_of(bench, baseline, tokens), strict=True))
    accepted = [np.stack([ours.anchor.accepted, theirs.anchor.accepted], 1) for ours, theirs in pairs]
    layers: dict[Precision, list[Any]] = {
        precision: [np.stack([_errors(cell, "attention", precision)[:, 0] for cell in pair], 1) for pair in pairs]
        for precision in ("anchor", "full")
    }
    return Comparison(
        codec=codec,
        baseline=baseline,
        tokens=tokens,
        accepted_difference=bootstrap(accepted, difference),
        accepted_ratio=bootstrap(accepted, ratio),
        attn_ratio_anchor=bootstrap(layers["anchor"], ratio),
        attn_ratio_full=bootstrap(layers["full"], ratio),
    )


def _errors(cell: Cell, quantity: Quantity, precision: Precision) -> Any:
    """[layers, 2]: sums of squared errors and of squares."""
    fidelity = cell.anchor if precision == "anchor" else cell.full
    return np.array([getattr(layer, quantity) for layer in fidelity.layers])


def _identical(cells: Sequence[Cell]) -> bool | None:
    """None where a cell holds no exact precision. Elements are compared as numbers: -0 is 0."""
    exact = [cell.exact for cell in cells if cell.exact is not None]
    if len(exact) < len(cells):
        return None
    return all(layer.k[0] == layer.v[0] == 0 for item in exact for layer in item.layers)


def _interval(accepted: Sequence[Sequence[int]]) -> Interval:
    interval = bootstrap([np.array(lengths)[:, None] for lengths in accepted], mean)
    assert interval is not None
    return interval


def _mean(group: Sequence[Fidelity], values: Callable[[Fidelity], Sequence[float]]) -> float:
    return float(np.mean([value for item in group for value in values(item)]))
