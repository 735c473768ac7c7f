"""Where everything a command prints goes: data to stdout, progress and messages to stderr.

human   data as text on stdout; messages and progress on stderr: bars in a terminal, now and then a line elsewhere
json    one JSON object on stdout and nothing else; on failure the object is {"error": ...}
quiet   data on stdout, no messages and no progress; errors are still printed
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

Mode = Literal["human", "json", "quiet"]
Progress = Callable[[str, int, int], None]


def silent(stage: str, done: int, total: int) -> None:
    """A progress callback that shows nothing."""


TAB = "    "
# For logs: work that is done sooner says nothing.
LINE_EVERY_S = 5.0


def printable(text: str) -> str:
    """`text` without control characters: neither a model nor a cache may send escape sequences to a terminal."""
    return "".join(c for c in text.replace("\t", TAB) if c == "\n" or c.isprintable())


class Output:
    """The sink that every command writes to."""

    def __init__(self, mode: Mode) -> None:
        self.mode = mode

    @classmethod
    def of(cls, *, as_json: bool, quiet: bool) -> Output:
        """The sink for a command's `--json` and `--quiet`; JSON wins."""
        return cls("json" if as_json else "quiet" if quiet else "human")

    def data(self, text: str) -> None:
        """Data a pipe would want: stdout, but not beside JSON."""
        if self.mode != "json":
            print(printable(text))

    def result(self, value: Mapping[str, Any]) -> None:
        """What the command found, as the one JSON object of `--json`."""
        if self.mode == "json":
            print(json.dumps(value, indent=2, ensure_ascii=not _writes_utf8(sys.stdout), allow_nan=False))

    def note(self, text: str) -> None:
        """A message to the person at the terminal."""
        if self.mode == "human":
            print(printable(text), file=sys.stderr)

    def error(self, kind: str, message: str, hint: str | None) -> None:
        """Why the command failed, and what to do next."""
        if self.mode == "json":
            self.result({"error": {"type": kind, "message": message, "hint": hint}})
            return
        for label, color, text in (("error:", "31", message), ("hint:", "36", hint)):
            if text:
                print(f"{_styled(label, color)} {' '.join(printable(text).splitlines())}", file=sys.stderr)

    @contextmanager
    def progress(self) -> Iterator[Progress]:
        """A callback `(stage, done, total)` that draws a bar a stage; outside a terminal, lines of what takes long."""
        if self.mode != "human":
            yield silent
            return
        if not can_style(sys.stderr):
            yield lines_now_and_then(self.note)
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bars

        columns = (
            TextColumn("{task.description:<10}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        with Bars(*columns, console=Console(stderr=True)) as bars:
            tasks: dict[str, Any] = {}

            def update(stage: str, done: int, total: int) -> None:
                if stage not in tasks:
                    tasks[stage] = bars.add_task(stage, total=total)
                bars.update(tasks[stage], completed=done, total=total)

            yield update


def lines_now_and_then(note: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> Progress:
    """A progress callback for logs: `prefill: 1024 of 6125`, no sooner than `LINE_EVERY_S` after the last one."""
    last, told = clock(), ""

    def tell(stage: str, done: int, total: int) -> None:
        nonlocal last, told
        if clock() - last >= LINE_EVERY_S or (stage == told and done == total):
            last, told = clock(), stage if done < total else ""
            note(f"{stage}: {done} of {total}")

    return tell


def progress_or_lines(output: Output, bars: Progress, stage: str, what: str) -> Progress:
    """`bars` in a terminal; elsewhere a line for each `what` done of one stage, for logs of long runs."""
    if can_style(sys.stderr):
        return bars
    return lambda name, done, total: output.note(f"{done} of {total} {what}") if name == stage else None


def _writes_utf8(stream: Any) -> bool:
    """Whether `stream` takes every character; one that is no file does."""
    return (stream.encoding or "utf-8").lower().replace("_", "-") in ("utf-8", "utf8")


def can_style(stream: Any) -> bool:
    """Whether `stream` is a terminal that takes ANSI sequences; `NO_COLOR` and `TERM=dumb` say no."""
    return bool(stream.isatty()) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _styled(text: str, code: str) -> str:
    return f"\x1b[{code}m{text}\x1b[0m" if can_style(sys.stderr) else text


def size(count: int | float) -> str:
    """A number of bytes for people: `4.6 MB`, in powers of ten."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1000
    return f"{value:.2f} TB"


def seconds(value: float | None) -> str:
    """A duration for people."""
    if value is None:
        return "none"
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.2f} s"
