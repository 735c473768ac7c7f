"""Tables without colours: the same in a terminal, a pipe and a document."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from io import StringIO
from typing import Any

WIDTH = 240  # no column is ever cut short


def table(columns: Mapping[str, Callable[[Any], str]], rows: Sequence[Any], *, left: int = 1) -> str:
    """One line a row: each column, by its heading, shows a row as text. The first `left` are flush left, not right."""
    from rich.console import Console
    from rich.table import Table

    out = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for number, name in enumerate(columns):
        out.add_column(name, justify="left" if number < left else "right", no_wrap=True)
    for row in rows:
        out.add_row(*(show(row) for show in columns.values()))
    text = StringIO()
    Console(file=text, width=WIDTH, color_system=None).print(out)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"
