"""`lynxkv bench decode`: how soon an answer is there, from a cache behind a link."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lynxkv_cli._errors import UsageProblem
from lynxkv_cli._models import ModelChoice
from lynxkv_cli._options import Device, Json, ModelDtypeOption, Quiet, parse_link, read_text
from lynxkv_cli._output import Output, progress_or_lines, size
from lynxkv_cli._tables import table

if TYPE_CHECKING:
    from lynxkv.bench.decode import DecodeBench, Speedup

HELP = """Example: lynxkv bench decode --quick

Measure from opening a cache to its first draft token, first verified token and k-th verified token.

A system is a codec and a mode: default@progressive drafts on the Anchor, default@exact goes on to the original,
int8@whole waits for all of the cache, int8@layers runs steps behind the layers that arrive; prefill computes the
prompt again. default@draft drafts k tokens, default@held the same without refining meanwhile. The baselines of
bench codec, as kivi:bits=4@whole, are fetched whole. All answer the same questions in turns, over the same
simulated link, through the same loader. The limits are bytes over the link's rate, two round trips and one model
step. Bookkeeping is the share of drafting that goes into neither model steps nor refining. Take a machine that
does nothing else.
"""


def decode(
    model: Annotated[
        str, typer.Option(metavar="MODEL", help="The alias smollm2, a Hugging Face folder or hub id, or a .gguf file.")
    ] = "smollm2",
    model_dtype: ModelDtypeOption = "float32",
    device: Device = "cpu",
    systems: Annotated[
        list[str] | None,
        typer.Option("--system", metavar="CODEC[@MODE]", help="Measure this one; may be given again."),
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option(metavar="SYSTEM", help="Compare all others with this one; int8@whole, or else the first."),
    ] = None,
    document: Annotated[
        str | None, typer.Option(metavar="@FILE", help="Use this text instead of Python's own.")
    ] = None,
    tokens: Annotated[
        list[int] | None,
        typer.Option(metavar="N", min=16, help="Document tokens to cache, 2048 by default; may be given again."),
    ] = None,
    links: Annotated[
        list[str] | None,
        typer.Option(
            "--link", metavar="RATE[/RTT]", help="200mbit/20ms and 25mbit/20ms by default; may be given again."
        ),
    ] = None,
    kth: Annotated[int, typer.Option(metavar="K", min=1, help="Verified tokens to wait for.")] = 32,
    repeats: Annotated[int, typer.Option(metavar="N", min=1, help="Times that everything is measured.")] = 8,
    quick: Annotated[
        bool, typer.Option("--quick", help="One link, five systems, four repeats: about five minutes.")
    ] = False,
    state: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Keep what is finished here, and go on from it.")
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure answers from caches behind links."""
    output = Output.of(as_json=as_json, quiet=quiet)
    for link in links or ():
        parse_link(link)
    changes: dict[str, Any] = {"kth": kth, "repeats": min(repeats, 4) if quick else repeats}
    if quick:
        changes["links"] = ("100mbit/20ms",)
    if links:
        changes["links"] = tuple(dict.fromkeys(links))
    if tokens:
        changes["tokens"] = tuple(dict.fromkeys(tokens))
    text = None if document is None else read_text(document, name="document", note=output.note)
    from lynxkv.bench.decode import DEFAULT_SYSTEMS, QUICK_SYSTEMS, DecodePlan, bench_decode
    from lynxkv.bench.documents import Document, standard_documents

    chosen = systems or (QUICK_SYSTEMS if quick else DEFAULT_SYSTEMS)
    compared = baseline or ("int8@whole" if "int8@whole" in chosen else chosen[0])
    if compared not in chosen:
        raise UsageProblem(f"the baseline {compared} is not among the systems", hint=f"add --system {compared}")
    measured = standard_documents()[0]
    if text is not None:
        measured = Document(name=Path(str(document).removeprefix("@")).name, kind="file", text=text, prompts=())
    loaded = ModelChoice(ref=model, dtype=model_dtype, device=device).load(output.note)
    with output.progress() as bars:
        bench = bench_decode(
            loaded,
            chosen,
            DecodePlan(document=measured, **changes),
            state=state,
            progress=progress_or_lines(output, bars, "decode", "answers"),
        )
    speedups = bench.speedups(compared)
    output.result(
        {
            "model": bench.model,
            "document": measured.name,
            "kth": bench.plan.kth,
            "rows": [asdict(row) for row in bench.rows],
            "speedups": [asdict(speedup) for speedup in speedups],
        }
    )
    output.data(render(bench, speedups))


def render(bench: DecodeBench, speedups: Sequence[Speedup]) -> str:
    """Rows and speed-ups as text, one table a length and link."""
    parts = []
    for tokens, rate, rtt in dict.fromkeys((row.tokens, row.link_bit_per_s, row.rtt_s) for row in bench.rows):
        own = [row for row in bench.rows if (row.tokens, row.link_bit_per_s) == (tokens, rate)]
        parts.append(
            f"{bench.model}, {tokens} tokens, {rate / 1e6:g} Mbit/s, round trip {rtt * 1e3:g} ms, "
            f"medians of {own[0].repeats}; seconds\n"
        )
        parts.append(table(COLUMNS | {f"{bench.plan.kth}th\nverified": lambda row: f"{row.kth_verified_s:.2f}"}, own))
        paired = [item for item in speedups if (item.tokens, item.link_bit_per_s) == (tokens, rate)]
        if paired:
            parts.append(f"times sooner than {paired[0].baseline}, in pairs; median [least, most]\n")
            parts.append(table(SPEEDUPS | {f"{bench.plan.kth}th verified": _times("kth_verified")}, paired))
    return "\n".join(parts).rstrip()


def _times(name: str) -> Any:
    def show(item: Speedup) -> str:
        middle, least, most = getattr(item, name)
        return f"{middle:.2f} [{least:.2f}, {most:.2f}]"

    return show


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


COLUMNS: dict[str, Any] = {
    "system": lambda row: row.system,
    "first\nbytes": lambda row: size(row.bytes_anchor),
    "all\nbytes": lambda row: size(row.bytes_total),
    "first\ndraft": lambda row: _seconds(row.first_draft_s),
    "limit": lambda row: _seconds(row.limit_first_draft_s if row.first_draft_s is not None else None),
    "first\nverified": lambda row: _seconds(row.first_verified_s),
    "limit ": lambda row: _seconds(row.limit_first_verified_s),
    "drafted": lambda row: f"{row.drafted:.1f}",
    "accepted": lambda row: f"{row.accepted:.1f}",
    "book-\nkeeping": lambda row: "" if row.bookkeeping is None else f"{row.bookkeeping:.1%}",
    "text": lambda row: "equal" if row.text_equal else "DIFFERS",
    "peak": lambda row: size(row.peak_bytes),
}
SPEEDUPS: dict[str, Any] = {"system": lambda item: item.system, "first token": _times("first_token")}
