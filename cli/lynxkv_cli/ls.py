"""`lynxkv ls`: the caches under a folder or prefix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from lynxkv_cli._options import Json, Quiet
from lynxkv_cli._output import Output, size

if TYPE_CHECKING:
    from lynxkv.manage import CacheEntry

HELP = """Example: lynxkv ls .

List the caches under a folder or prefix, at any depth, with what their headers say.

A cache that continues others is listed with the tokens of its chain, and with its own. Bytes count all objects
of a cache, Residuals of earlier encodes included; `lynxkv prune` removes those.
"""


def ls(
    url: Annotated[
        str, typer.Argument(metavar="URL", help="A folder or any fsspec URL; the current folder by default.")
    ] = ".",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """List the caches under `url`."""
    import lynxkv

    output = Output.of(as_json=as_json, quiet=quiet)
    caches = lynxkv.list_caches(url)
    output.result({"url": url, "caches": [asdict(entry) for entry in caches]})
    if quiet:
        output.data("".join(f"{entry.url}\n" for entry in caches).rstrip("\n"))
    elif caches:
        output.data(table(caches))
    output.note(f"{len(caches)} caches, {size(sum(entry.bytes for entry in caches))}")


def table(caches: Sequence[CacheEntry]) -> str:
    """One line a cache."""
    lines = [("tokens", "bytes", "written", "model", "cache")]
    for entry in caches:
        written = "unknown"
        if entry.modified_s is not None:
            written = datetime.fromtimestamp(entry.modified_s, UTC).strftime("%Y-%m-%d %H:%M")
        said = entry.problem
        if said is None and entry.continues:
            said = f"{entry.own_tokens:,} of its own, continues {entry.continues[-1]}"
        name = entry.url if said is None else f"{entry.url} ({said})"
        tokens = "unknown" if entry.tokens is None else f"{entry.tokens:,}"
        lines.append((tokens, size(entry.bytes), written, entry.model_id or "unknown", name))
    widths = [max(len(line[column]) for line in lines) for column in range(4)]
    return "\n".join(
        f"{tokens:>{widths[0]}}  {count:>{widths[1]}}  {written:<{widths[2]}}  {model:<{widths[3]}}  {name}"
        for tokens, count, written, model, name in lines
    )
