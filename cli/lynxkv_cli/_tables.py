"""Tables without colours: the same in a terminal, a pipe and a document."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from io import StringIO
from typing import Any

WIDTH = 240  # no column is ever cut short


def table(columns: Mapping[str, Callable[[Any], str]], rows: Sequence[Any]) -> str:
    """One line a row: each column, by its heading, shows a row as text. The first is flush left, the others right."""
    from rich.console import Console
    from rich.table import Table

    out = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for number, name in enumerate(columns):
        out.add_column(name, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        out.add_row(*(show(row) for show in columns.values()))
    text = StringIO()
    Console(file=text, width=WIDTH, color_system=None).print(out)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"
