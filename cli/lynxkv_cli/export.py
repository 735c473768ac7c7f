"""`lynxkv export`: a cache as a plain safetensors file."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from lynxkv.choices import CONCURRENCY, Precision, ResidualPolicy
from lynxkv_cli._options import (
    CACHE_MAX_BYTES,
    CacheDir,
    CacheMaxBytes,
    Concurrency,
    Deadline,
    Json,
    Quiet,
    ResidualUrl,
    Tokens,
    Transport,
    Url,
    parse_size,
)
from lynxkv_cli._output import Output, size

HELP = """Example: lynxkv export readme.lynx --out readme.safetensors

Decode a cache into a plain safetensors file: layer.<i>.k and layer.<i>.v of shape [heads, tokens, head_dim],
and token_ids if the cache stores them. `lynxkv encode --from` reads such a file. Caches that this one continues
come with it.
"""


def export(
    url: Url,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="KV.safetensors", help="The file to write.")],
    precision: Annotated[Precision, typer.Option(help="exact needs a cache made with encode --exact.")] = "full",
    tokens: Tokens = None,
    residual_url: ResidualUrl = None,
    if_residual_unavailable: Annotated[
        ResidualPolicy, typer.Option(help="anchor-only exports the Anchor's values then, and says so.")
    ] = "error",
    transport: Transport = "auto",
    concurrency: Concurrency = CONCURRENCY,
    deadline: Deadline = None,
    cache_dir: CacheDir = None,
    cache_max_bytes: CacheMaxBytes = CACHE_MAX_BYTES,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there already.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Export the cache at `url` to `out`."""
    import lynxkv

    output = Output.of(as_json=as_json, quiet=quiet)
    options = lynxkv.FetchOptions(
        transport=transport,
        concurrency=concurrency,
        deadline_s=deadline,
        residual_url=residual_url,
        if_residual_unavailable=if_residual_unavailable,
        cache_dir=cache_dir,
        cache_max_bytes=parse_size(cache_max_bytes),
    )
    report = lynxkv.export(url, out, tokens=tokens, precision=precision, overwrite=force, options=options)
    if report.precision != precision:
        output.note(f"the Residual is not to be had: values have {report.precision} precision")
    output.result(asdict(report))
    output.data(report.path)
    output.note(f"{report.tokens} tokens, {report.layers} layers, {size(report.bytes)} at {report.precision} precision")
