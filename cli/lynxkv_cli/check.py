"""`lynxkv check`: every byte of a cache against its digests and the format's rules."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from lynxkv.choices import CONCURRENCY
from lynxkv_cli._options import (
    CACHE_MAX_BYTES,
    CacheDir,
    CacheMaxBytes,
    Concurrency,
    Deadline,
    Json,
    Quiet,
    ResidualUrl,
    Transport,
    Url,
    parse_size,
)
from lynxkv_cli._output import Output, size

if TYPE_CHECKING:
    from lynxkv.report import CheckReport, InspectReport

HELP = """Example: lynxkv check readme.lynx

Read all of a cache and of those it continues, and check structure, checksums, and that shards and caches belong
together.

Exit code 0 says that the cache is whole; what is wrong is named otherwise. All is read from the store itself;
with --cache-dir what was read is kept there for commands that load.
"""


def check(
    url: Url,
    residual_url: ResidualUrl = None,
    transport: Transport = "auto",
    concurrency: Concurrency = CONCURRENCY,
    deadline: Deadline = None,
    cache_dir: CacheDir = None,
    cache_max_bytes: CacheMaxBytes = CACHE_MAX_BYTES,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Check the cache at `url`."""
    import lynxkv

    output = Output.of(as_json=as_json, quiet=quiet)
    options = lynxkv.FetchOptions(
        transport=transport,
        concurrency=concurrency,
        deadline_s=deadline,
        residual_url=residual_url,
        cache_dir=cache_dir,
        cache_max_bytes=parse_size(cache_max_bytes),
    )
    report = lynxkv.check(url, options=options)
    output.result(asdict(report))
    if not quiet:
        caches = "" if len(report.spans) == 1 else f" in {len(report.spans)} caches"
        lines = [
            f"{report.url}: whole, {report.tokens} tokens{caches}, {report.segments} segments, {size(report.bytes)}"
        ]
        output.data("\n".join([*lines, *superseded(report)]))


def superseded(report: CheckReport | InspectReport) -> list[str]:
    """A line on Residuals of earlier encodes in the same prefix, if there are any."""
    count = len(report.orphans)
    if not count:
        return []
    what = "a Residual" if count == 1 else f"{count} Residuals"
    return [
        f"beside it {what} of earlier encodes, {size(report.orphan_bytes)}: {', '.join(report.orphans)}; "
        "delete once nobody reads the caches they belonged to"
    ]
