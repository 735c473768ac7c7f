"""`lynxkv prune`: remove what is not needed any more, by age and by size."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import Annotated

import typer

from lynxkv_cli._errors import UsageProblem
from lynxkv_cli._options import Json, Quiet, parse_size
from lynxkv_cli._output import Output, size

HELP = """Example: lynxkv prune . --older-than 30d --max-bytes 100GB

Remove Residuals of replaced caches and what interrupted writers left behind; then caches that are too old; then
the oldest ones until the rest fits.

Nothing that was written or replaced within the grace period is removed, since somebody may be reading it.
With --dry-run nothing is removed at all, only said.
"""

SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def prune(
    url: Annotated[str, typer.Argument(metavar="URL", help="A folder or prefix: a folder or any fsspec URL.")],
    older_than: Annotated[
        str | None, typer.Option(metavar="AGE", help="Remove caches older than this, such as 12h or 30d.")
    ] = None,
    max_bytes: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Remove the oldest caches until the rest takes less, as 100GB.")
    ] = None,
    grace: Annotated[str, typer.Option(metavar="AGE", help="Leave alone what is younger than this.")] = "1h",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be removed.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Prune the caches under `url`."""
    output = Output.of(as_json=as_json, quiet=quiet)
    older_than_s = None if older_than is None else parse_age(older_than)
    limit = None if max_bytes is None else parse_size(max_bytes)
    grace_s = parse_age(grace)
    import lynxkv

    report = lynxkv.prune(url, max_bytes=limit, older_than_s=older_than_s, grace_s=grace_s, dry_run=dry_run)
    output.result({"url": url, **asdict(report)})
    for item in report.removed:
        output.data(f"{item.url}: {item.reason}, {len(item.objects)} objects, {size(item.bytes)}")
    verb = "would be removed" if dry_run else "removed"
    output.note(
        f"{size(report.removed_bytes)} {verb}; {report.kept_caches} caches with {size(report.kept_bytes)} are left"
    )


def parse_age(text: str) -> float:
    """Seconds from `90s`, `15m`, `12h`, `30d`, `2w`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text.strip().lower())
    if match is None:
        raise UsageProblem(f"cannot read the age {text!r}", hint="write it like 90s, 15m, 12h, 30d or 2w")
    return float(match[1]) * SECONDS[match[2]]
