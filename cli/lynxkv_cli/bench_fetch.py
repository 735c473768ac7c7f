"""`lynxkv bench fetch`: loading a cache beside a bare parallel download of the same bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Literal, get_args

import typer

from lynxkv.choices import TransportName
from lynxkv_cli._errors import UsageProblem
from lynxkv_cli._options import Json, Quiet, Url, parse_link
from lynxkv_cli._output import Output, seconds, size

if TYPE_CHECKING:
    from lynxkv.bench.fetch import FetchRow

Over = Literal["http", "s3"]

HELP = """Example: lynxkv bench fetch readme.lynx

Measure how long the header, the Anchor and the Residual of a cache take, decoding included, beside a bare
parallel download of the same bytes through the same transport.

All settings take turns; shown are medians. `ratio` is the Anchor's time over that of its bare download, each
pair measured one after the other. `overlapped` is the Anchor's time when the Residual has been asked for too,
`contended` when another reader takes that Residual meanwhile.

--link simulates a slower link in this process. With --over as well, root gets a real one: a local cache is served
by nginx or SeaweedFS in a network namespace of its own, behind a delay and tc's shaping, and measured from
another. --dscp marks packets, and that link takes those of Anchors first.
"""


def fetch(
    url: Url,
    transports: Annotated[
        list[str] | None,
        typer.Option("--transport", metavar="NAME", help="fsspec, the default, or obstore; may be given again."),
    ] = None,
    concurrencies: Annotated[
        list[int] | None,
        typer.Option(
            "--concurrency", metavar="N", min=1, max=256, help="Requests in flight, 8 by default; may be given again."
        ),
    ] = None,
    link: Annotated[
        str | None, typer.Option(metavar="RATE[/RTT]", help="Measure over a link, such as 200mbit/20ms.")
    ] = None,
    over: Annotated[
        Over | None, typer.Option(help="Serve a local cache by nginx or SeaweedFS, over a real link; needs root.")
    ] = None,
    dscp: Annotated[bool, typer.Option("--dscp", help="Mark packets: Anchors before Residuals.")] = False,
    repeats: Annotated[int, typer.Option(metavar="N", min=1, help="Times that everything is measured.")] = 5,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure loading the cache at `url`."""
    output = Output.of(as_json=as_json, quiet=quiet)
    known = {name: name for name in get_args(TransportName) if name != "auto"}
    if unknown := set(transports or ()) - known.keys():
        raise UsageProblem(f"there is no transport {min(unknown)!r}", hint=f"choose one of {', '.join(known)}")
    simulated = parse_link(link)
    if over is not None and simulated is None:
        raise UsageProblem("--over needs a link", hint="add --link 200mbit/20ms")
    from lynxkv.bench.fetch import FetchSettings, measure_fetch, measure_over_link

    settings = FetchSettings(
        transports=[known[name] for name in transports or ["fsspec"]],
        concurrencies=concurrencies or [8],
        repeats=repeats,
        link=simulated,
        dscp=dscp,
    )
    with output.progress() as progress:
        if over is None:
            rows = measure_fetch(url, settings, progress)
        else:
            rows = measure_over_link(url, over, settings, progress)
    best = min(rows, key=lambda row: row.anchor_s)
    recommended = {"transport": best.transport, "concurrency": best.concurrency}
    output.result(
        {
            "url": url,
            "link": link,
            "over": over,
            "dscp": dscp,
            "rows": [asdict(row) for row in rows],
            "recommended": recommended,
        }
    )
    output.data(table(rows))
    output.note(
        f"Anchor {size(best.bytes_anchor)}, Residual {size(best.bytes_residual)}; medians of {repeats}; "
        f"fastest here: {best.transport}, {best.concurrency} requests in flight"
    )


def table(rows: Sequence[FetchRow]) -> str:
    """One line a setting."""
    names = (
        "transport",
        "requests",
        "header",
        "Anchor",
        "bare",
        "ratio",
        "overlapped",
        "ratio",
        "contended",
        "Residual",
        "bare",
    )
    lines = [
        (
            row.transport,
            str(row.concurrency),
            seconds(row.header_s),
            seconds(row.anchor_s),
            seconds(row.anchor_plain_s),
            f"{row.anchor_ratio:.2f}",
            seconds(row.overlapped_s),
            f"{row.overlapped_ratio:.2f}",
            seconds(row.contended_s),
            seconds(row.residual_s),
            seconds(row.residual_plain_s),
        )
        for row in rows
    ]
    widths = [max(len(line[column]) for line in (names, *lines)) for column in range(len(names))]
    return "\n".join(
        "  ".join(
            [line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))]
        )
        for line in (names, *lines)
    )
