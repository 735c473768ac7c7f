"""What a person, a pipe or a program sees while `generate` runs: one view each, fed with its events."""

from __future__ import annotations

import sys
from typing import Protocol, TextIO

from lynxkv.events import (
    AnchorProgress,
    Drafted,
    Event,
    Phase,
    PhaseName,
    Provisional,
    Rejected,
    ResidualProgress,
    Verified,
)
from lynxkv_cli._live import LiveText
from lynxkv_cli._output import printable, size

PHASES: dict[PhaseName, str] = {
    "anchor": "fetching the Anchor",
    "draft": "drafting",
    "refine": "fetching the Residual",
    "verify": "verifying the draft",
    "decode": "decoding",
}


class View(Protocol):
    """Takes the runner's events as they happen."""

    def on_event(self, event: Event) -> None:
        """Show one event."""

    def finish(self) -> None:
        """The run is over, or has failed: leave the output tidy."""


class SilentView:
    """For `--json`: the result says everything."""

    def on_event(self, event: Event) -> None:
        """Show nothing."""

    def finish(self) -> None:
        """Nothing to tidy."""


class PlainView:
    """For pipes, and terminals without styles: verified text, as soon as it is verified."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._last = "\n"

    def on_event(self, event: Event) -> None:
        """Write verified text."""
        if isinstance(event, Verified) and event.text:
            # A terminal without styles is still a terminal: see `printable`.
            text = printable(event.text) if self._stream.isatty() else event.text
            self._stream.write(text)
            self._stream.flush()
            self._last = text[-1:] or self._last

    def finish(self) -> None:
        """End the last line, if there is one."""
        if self._last != "\n":
            self._stream.write("\n")
            self._stream.flush()


class TerminalView:
    """For terminals: the draft dimmed, verified text solid, and a line saying what is under way."""

    def __init__(self, stream: TextIO, *, status: bool) -> None:
        self._live = LiveText(stream)
        self._show_status = status
        self._residual = ""

    def on_event(self, event: Event) -> None:
        """Redraw what the event changes."""
        match event:
            case Drafted():
                self._live.draft(event.text)
            case Provisional():
                self._live.replace(event.text)
            case Verified():
                self._live.verify(event.text)
            case Rejected():
                self._live.reject(event.text)
            case AnchorProgress():
                self._status(f"fetching the Anchor: {size(event.bytes)} of {size(event.total)}")
            case ResidualProgress():
                self._status(f"fetching the Residual: {size(event.bytes)} of {size(event.total)}")
            case Phase():
                self._status(PHASES[event.name])

    def finish(self) -> None:
        """Leave only verified text."""
        self._live.finish()

    def _status(self, text: str) -> None:
        if self._show_status:
            self._live.status(text)


def view_for(mode: str, *, styled: bool) -> View:
    """The view for an output mode; `styled` says whether stdout is a terminal that takes ANSI sequences."""
    if mode == "json":
        return SilentView()
    return TerminalView(sys.stdout, status=mode == "human") if styled else PlainView(sys.stdout)
