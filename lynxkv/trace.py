"""A run on a time line: what was fetched, decoded, drafted, refined and verified when."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

from lynxkv.errors import InputError
from lynxkv.events import Event, GenerateResult, Span, Track
from lynxkv.plotting import check_plot

TRACKS: tuple[Track, ...] = get_args(Track)
LABELS: dict[Track, str] = {
    "fetch": "fetch",
    "decode": "decode Anchor",
    "draft": "draft",
    "refine": "refine",
    "verify": "verify",
    "plain": "decode on",
}
BYTES: set[Track] = {"fetch", "decode", "refine"}


class Trace:
    """Collects the spans of a run: pass `on_event` to `generate`."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def on_event(self, event: Event) -> None:
        """Keep what has a place in time."""
        if isinstance(event, Span):
            self.spans.append(event)

    @property
    def bookkeeping(self) -> float | None:
        """Share of the time between a draft's first and last model step that went into neither steps nor refining:
        drawing, weighing, telling. None where no draft had two steps."""
        steps_s = outside_s = refined_s = 0.0
        last_s: float | None = None
        for span in self.spans:
            seconds = span.stop_s - span.start_s
            if span.track in ("verify", "plain"):
                last_s = None
            elif span.track == "refine":
                refined_s += seconds
            elif span.track == "draft":
                if last_s is not None:
                    outside_s += span.start_s - last_s - refined_s
                    steps_s += seconds
                last_s, refined_s = span.stop_s, 0.0
        return outside_s / (outside_s + steps_s) if steps_s else None

    def as_json(self, result: GenerateResult) -> dict[str, Any]:
        """Chrome trace events (chrome://tracing, Perfetto): a track a kind of work, instants for the first tokens.

        `otherData` has `bookkeeping`, if there was a draft.
        """
        names = [
            {"ph": "M", "name": "thread_name", "pid": 1, "tid": number, "args": {"name": LABELS[track]}}
            for number, track in enumerate(TRACKS)
        ]
        order = [{**name, "name": "thread_sort_index", "args": {"sort_index": name["tid"]}} for name in names]
        spans = [
            {
                "ph": "X",
                "name": LABELS[span.track],
                "pid": 1,
                "tid": TRACKS.index(span.track),
                "ts": span.start_s * 1e6,
                "dur": (span.stop_s - span.start_s) * 1e6,
                "args": {"bytes" if span.track in BYTES else "tokens": span.amount},
            }
            for span in sorted(self.spans, key=lambda span: span.start_s)
        ]
        instants = [
            {"ph": "i", "s": "g", "name": name, "pid": 1, "tid": 0, "ts": seconds * 1e6}
            for name, seconds in _first_tokens(result)
        ]
        about = {} if self.bookkeeping is None else {"bookkeeping": self.bookkeeping}
        return {"traceEvents": names + order + spans + instants, "displayTimeUnit": "ms", "otherData": about}

    def write(self, path: Path, result: GenerateResult) -> None:
        """Write `as_json` to `path`.

        Raises:
            InputError: it cannot be written.
        """
        try:
            path.write_text(json.dumps(self.as_json(result)), "utf-8")
        except OSError as error:
            raise InputError(f"cannot write {path}: {error.strerror}", hint="name another file") from error

    def plot(self, path: Path, result: GenerateResult) -> None:
        """Draw the time line to `path`, whose suffix names the format.

        Raises:
            InputError: matplotlib is missing, or `path` cannot be written.
        """
        check_plot(path)
        from matplotlib.figure import Figure

        colours = {"fetch": "C0", "decode": "C9", "draft": "0.6", "refine": "C9", "verify": "C2", "plain": "C2"}
        figure = Figure(figsize=(9, 2.6), layout="constrained")
        axes = figure.subplots()
        for number, track in enumerate(TRACKS):
            bars = [(span.start_s, span.stop_s - span.start_s) for span in self.spans if span.track == track]
            axes.broken_barh(bars, (number - 0.35, 0.7), facecolors=colours[track], edgecolor="white", linewidth=0.4)
        for name, seconds in _first_tokens(result):
            axes.axvline(seconds, color="black", linewidth=0.8, linestyle=":")
            axes.annotate(name, (seconds, -0.6), rotation=0, fontsize=8, ha="left", va="bottom", annotation_clip=False)
        axes.set_yticks(range(len(TRACKS)), [LABELS[track] for track in TRACKS])
        axes.set_ylim(len(TRACKS) - 0.5, -0.6)
        axes.set_xlim(0)
        axes.set_xlabel("seconds since the cache was opened")
        axes.spines[["top", "right"]].set_visible(False)
        try:
            figure.savefig(path, dpi=150)
        except OSError as error:
            raise InputError(f"cannot write {path}: {error.strerror}", hint="name another file") from error


def _first_tokens(result: GenerateResult) -> list[tuple[str, float]]:
    found = [("first draft token", result.first_draft_s), ("first verified token", result.first_verified_s)]
    return [(name, seconds) for name, seconds in found if seconds is not None]
