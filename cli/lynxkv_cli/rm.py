"""`lynxkv rm`: remove caches."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from lynxkv_cli._options import Json, Quiet
from lynxkv_cli._output import Output, size

HELP = """Example: lynxkv rm readme.lynx

Remove caches: the Anchor first, so that nobody finds one without its Residual.

Only objects that lynxkv has written are removed; a folder goes with them if nothing else is in it. A cache that
others continue is refused. --chain also removes those that a cache continues, as far as no other needs them.
"""


def rm(
    urls: Annotated[list[str], typer.Argument(metavar="URL...", help="Caches: folders or any fsspec URLs.")],
    chain: Annotated[
        bool, typer.Option("--chain", help="Remove the caches that these continue, too, if no other cache does.")
    ] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Remove the caches at `urls`."""
    import lynxkv

    output = Output.of(as_json=as_json, quiet=quiet)
    removed = []
    for url in urls:
        for item in lynxkv.remove_chain(url) if chain else [lynxkv.remove(url)]:
            removed.append(item)
            output.note(f"removed {item.url}, {size(item.bytes)}")
    output.result({"removed": [asdict(item) for item in removed]})
