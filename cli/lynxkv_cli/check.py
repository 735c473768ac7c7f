"""`lynxkv check`: every byte of a cache against its digests and the format's rules."""

from __future__ import annotations

from dataclasses import asdict

from lynxkv_cli._options import Json, Quiet, Url
from lynxkv_cli._output import Output, size

HELP = """Example: lynxkv check readme.lynx

Read all of a cache and check structure, checksums and the binding of its two shards.

Exit code 0 says that the cache is whole; what is wrong is named otherwise.
"""


def check(url: Url, as_json: Json = False, quiet: Quiet = False) -> None:
    """Check the cache at `url`."""
    import lynxkv

    output = Output.of(as_json=as_json, quiet=quiet)
    report = lynxkv.check(url)
    output.result(asdict(report))
    if not quiet:
        output.data(f"{report.url}: whole, {report.tokens} tokens, {report.segments} segments, {size(report.bytes)}")
