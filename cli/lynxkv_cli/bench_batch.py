"""`lynxkv bench batch`: several prompts over one cache, or over several, decoded together."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from lynxkv_cli._models import ModelChoice
from lynxkv_cli._options import Device, Json, ModelDtypeOption, Quiet, parse_link, read_text
from lynxkv_cli._output import Output, size
from lynxkv_cli._tables import table

HELP = """Example: lynxkv bench batch --batch 1 --batch 4 --tokens 512

Measure what decoding several prompts together gains: verified tokens a second, how much of the drafts is accepted,
and the memory of the rows' caches. A cache is fetched and refined once a batch. With --caches the prompts take turns
among caches of different documents, which come over the one link together.
"""


def batch(
    model: Annotated[
        str, typer.Option(metavar="MODEL", help="The alias smollm2, a Hugging Face folder or hub id, or a .gguf file.")
    ] = "smollm2",
    model_dtype: ModelDtypeOption = "float32",
    device: Device = "cpu",
    batches: Annotated[
        list[int] | None,
        typer.Option("--batch", metavar="N", min=1, help="Prompts at once; 1, 2, 4, 8 and 16 by default; repeatable."),
    ] = None,
    caches: Annotated[
        list[int] | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Spread the prompts over so many caches; as many as there are --document by default; repeatable.",
        ),
    ] = None,
    codec: Annotated[str, typer.Option(metavar="CODEC", help="How the caches are encoded.")] = "default",
    documents: Annotated[
        list[str] | None,
        typer.Option(
            "--document", metavar="@FILE", help="Use this text instead of Python's own four, a cache each; repeatable."
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(metavar="N", min=16, help="Document tokens to cache, of each.")] = 2048,
    link: Annotated[str, typer.Option(metavar="RATE[/RTT]", help="Read over a simulated link.")] = "100mbit/20ms",
    new_tokens: Annotated[int, typer.Option(metavar="N", min=2, help="Verified tokens a prompt.")] = 32,
    repeats: Annotated[int, typer.Option(metavar="N", min=1, help="Times that everything is measured.")] = 3,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure batches."""
    output = Output.of(as_json=as_json, quiet=quiet)
    parse_link(link)
    texts = [read_text(document, name="document", note=output.note) for document in documents or ()]
    from lynxkv.bench.batch import BatchPlan, bench_batch
    from lynxkv.bench.documents import Document, standard_documents

    named = [
        Document(name=Path(argument.removeprefix("@")).name, kind="file", text=text, prompts=())
        for argument, text in zip(documents or (), texts, strict=True)
    ]
    plan = BatchPlan(
        documents=tuple(named) or standard_documents(),
        caches=tuple(dict.fromkeys(caches)) if caches else (max(1, len(named)),),
        codec=codec,
        tokens=tokens,
        link=link,
        new_tokens=new_tokens,
        repeats=repeats,
        **({"batches": tuple(dict.fromkeys(batches))} if batches else {}),
    )
    loaded = ModelChoice(ref=model, dtype=model_dtype, device=device).load(output.note)
    with output.progress() as bars:
        rows = bench_batch(loaded, plan, progress=bars)
    facts = {
        "model": loaded.identity.model_id,
        "documents": [document.name for document in plan.documents[: max(plan.caches)]],
        "codec": codec,
        "tokens": tokens,
        "link": link,
    }
    output.result({**facts, "rows": [asdict(row) for row in rows]})
    output.data(
        f"{facts['model'] or 'unnamed'}, {tokens} tokens, {codec}, {link}, {new_tokens} tokens a prompt; medians\n\n"
        + table(COLUMNS, rows).rstrip()
    )


COLUMNS: dict[str, Any] = {
    "batch": lambda row: str(row.batch),
    "over": lambda row: f"{row.caches} cache{'s' if row.caches > 1 else ''}",
    "drafted": lambda row: f"{row.drafted:.1f}",
    "accepted": lambda row: f"{row.accepted:.1f}",
    "first draft": lambda row: "" if row.first_draft_s is None else f"{row.first_draft_s:.2f} s",
    "first verified": lambda row: f"{row.first_verified_s:.2f} s",
    "all": lambda row: f"{row.total_s:.2f} s",
    "tokens/s": lambda row: f"{row.tokens_per_s:.1f}",
    "tokens/s after": lambda row: f"{row.decode_tokens_per_s:.1f}",
    "memory": lambda row: size(row.cache_bytes),
}
