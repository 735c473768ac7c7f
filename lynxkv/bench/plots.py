"""Plots of a codec bench, as PNG files. matplotlib comes with `lynxkv[bench]` and is imported here only."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from lynxkv.bench.codec import CodecBench
from lynxkv.bench.report import cells_of, front, rows
from lynxkv.plotting import check_matplotlib

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def write_plots(bench: CodecBench, folder: Path) -> list[Path]:
    """Write rate against fidelity, accepted lengths, proposed against accepted of the first codec, and errors by layer
    for each length; returns the files.

    Raises:
        InputError: matplotlib is not installed.
    """
    check_matplotlib()
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    written = []
    # Room for a legend, or a row, of every codec.
    tall = max(5.0, 1.0 + 0.2 * len(bench.codecs))
    for tokens in bench.plan.tokens:
        for name, draw, size in (
            ("rate-fidelity", _rate_fidelity, (10.0, tall)),
            ("accepted", _accepted, (10.0, tall)),
            ("proposed", _proposed, (7.0, 6.0)),
            ("layers", _layers, (10.0, 1.5 + 0.3 * len(bench.codecs))),
        ):
            # Figures of their own, without pyplot: no global state, no display.
            figure = Figure(figsize=size, layout="constrained")
            axes: Axes = figure.subplots()
            draw(axes, bench, tokens)
            figure.suptitle(f"{bench.model}, {tokens} tokens, {len(bench.plan.documents)} documents")
            written.append(folder / f"{name}-{tokens}.png")
            figure.savefig(written[-1], dpi=120)
    return written


def _rate_fidelity(axes: Axes, bench: CodecBench, tokens: int) -> None:
    """Bits an element against the error of attention outputs, anchor joined to full; the Pareto front dashed."""
    table = rows(bench)
    best = [point for point in front(table, tokens) if point.attn_nmse]
    axes.plot(
        [point.bits for point in best],
        [point.attn_nmse for point in best],
        linestyle="--",
        color="black",
        linewidth=0.8,
        label="Pareto front",
    )
    for row in table:
        if row.tokens != tokens or not row.attn_nmse_full:
            continue
        bits, errors = [row.anchor_bits, row.full_bits], [row.attn_nmse_anchor, row.attn_nmse_full]
        axes.plot(bits, errors, marker="o", label=row.codec, color=_colour(bench, row.codec))
    axes.set_yscale("log")
    axes.set_xlabel("bits an element, everything included (anchor, full)")
    axes.set_ylabel("error of attention outputs (NMSE)")
    axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.01, 1.0))
    axes.grid(alpha=0.3)


def _accepted(axes: Axes, bench: CodecBench, tokens: int) -> None:
    """P(at least k tokens of the anchor's draft are accepted) against k."""
    lengths = np.arange(bench.plan.draft_tokens + 1)
    for codec in bench.codecs:
        accepted = np.array([length for cell in cells_of(bench, codec, tokens) for length in cell.anchor.accepted])
        axes.step(
            lengths, (accepted[:, None] >= lengths).mean(0), where="mid", label=codec, color=_colour(bench, codec)
        )
    axes.set_xlabel("k")
    axes.set_ylabel("P(at least k draft tokens accepted)")
    axes.set_ylim(0, 1.02)
    axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.01, 1.0))
    axes.grid(alpha=0.3)


def _proposed(axes: Axes, bench: CodecBench, tokens: int) -> None:
    """Share of prompts by tokens proposed on the first codec's anchor and tokens accepted of them, as a heat map."""
    lengths = [length for cell in cells_of(bench, bench.codecs[0], tokens) for length in cell.anchor.accepted]
    image: Any = axes.imshow(
        proposed_accepted(lengths, bench.plan.draft_tokens), origin="lower", cmap="magma", vmin=0, vmax=1
    )
    axes.set_title(bench.codecs[0])
    axes.set_xlabel("tokens accepted")
    axes.set_ylabel("tokens proposed")
    figure = axes.get_figure()
    assert figure is not None
    figure.colorbar(image, ax=axes, label="share of prompts")


def proposed_accepted(lengths: Sequence[int], draft_tokens: int) -> npt.NDArray[np.float64]:
    """Row k, column j: the share of prompts of which j tokens would be accepted if k were proposed, [n + 1, n + 1].

    A shorter draft is the start of a longer one, so `lengths`, accepted of `draft_tokens` each, tell it for all k.
    """
    out = np.zeros((draft_tokens + 1, draft_tokens + 1))
    for proposed in range(draft_tokens + 1):
        counts = np.bincount(np.minimum(lengths, proposed), minlength=draft_tokens + 1)
        out[proposed] = counts / len(lengths)
    return out


def _layers(axes: Axes, bench: CodecBench, tokens: int) -> None:
    """Error of attention outputs by codec and layer at anchor precision, as a heat map."""
    table = np.array([_layer_errors(bench, codec, tokens) for codec in bench.codecs])
    with np.errstate(divide="ignore"):
        logs = np.log10(table)
    image: Any = axes.imshow(np.where(np.isfinite(logs), logs, np.nan), aspect="auto", cmap="magma")
    axes.set_yticks(range(len(bench.codecs)), labels=list(bench.codecs))
    axes.set_xlabel("layer")
    figure = axes.get_figure()
    assert figure is not None
    figure.colorbar(image, ax=axes, label="log10 error of attention outputs, anchor")


def _colour(bench: CodecBench, codec: str) -> Any:
    """One colour a codec, the same in all plots."""
    import matplotlib as mpl

    place = bench.codecs.index(codec) / max(len(bench.codecs) - 1, 1)
    return mpl.colormaps["turbo"](place)


def _layer_errors(bench: CodecBench, codec: str, tokens: int) -> Sequence[float]:
    sums = np.array([[layer.attention for layer in cell.anchor.layers] for cell in cells_of(bench, codec, tokens)]).sum(
        0
    )
    errors: Sequence[float] = sums[:, 0] / sums[:, 1]
    return errors
