"""`lynxkv bench tasks`: questions with a right answer, asked of stored caches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lynxkv_cli._models import ModelChoice
from lynxkv_cli._options import Device, Json, ModelDtypeOption, Quiet
from lynxkv_cli._output import Output, progress_or_lines
from lynxkv_cli._tables import table

if TYPE_CHECKING:
    from lynxkv.bench.tasks import TaskRow

HELP = """Example: lynxkv bench tasks --quick

Plant pass keys and invented facts in real documents, store the documents' caches, and ask for them.

An answer counts if it holds the planted words. The row `original` is the model's own cache: what it gets wrong
no codec can get right, so `kept` counts the right answers among those the original gets right. Methods are named
as for `lynxkv bench codec`.
"""

METHODS = ("default:exact=true", "quality", "int8", "int4", "sparq")


def tasks(
    model: Annotated[
        str, typer.Option(metavar="MODEL", help="The alias smollm2, a Hugging Face folder or hub id, or a .gguf file.")
    ] = "smollm2",
    model_dtype: ModelDtypeOption = "float32",
    device: Device = "cpu",
    codecs: Annotated[
        list[str] | None,
        typer.Option("--codec", metavar="NAME[:P=V,...]", help="Ask this one; may be given again."),
    ] = None,
    tokens: Annotated[
        list[int] | None,
        typer.Option(metavar="N", min=64, help="Document tokens to cache, 1024 by default; may be given again."),
    ] = None,
    depths: Annotated[
        list[float] | None,
        typer.Option(
            "--depth", metavar="SHARE", min=0, max=1, help="Plant behind this share of the text; may be given again."
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="512 tokens, two depths, two codecs.")] = False,
    state: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Keep what is finished here, and go on from it.")
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Ask stored caches for what was planted in them."""
    output = Output.of(as_json=as_json, quiet=quiet)
    from lynxkv.bench.documents import standard_documents
    from lynxkv.bench.methods import parse_methods, with_bases
    from lynxkv.bench.tasks import DEPTHS, bench_tasks

    methods = parse_methods(codecs or (("default", "int4") if quick else METHODS))
    loaded = ModelChoice(ref=model, dtype=model_dtype, device=device).load(output.note)
    methods = with_bases(methods, loaded.identity.fingerprint)
    with output.progress() as bars:
        rows = bench_tasks(
            loaded,
            methods,
            standard_documents(),
            tokens=tuple(dict.fromkeys(tokens)) if tokens else (512,) if quick else (1024,),
            depths=tuple(dict.fromkeys(depths)) if depths else (0.3, 0.9) if quick else DEPTHS,
            state=state,
            progress=progress_or_lines(output, bars, "tasks", "questions"),
        )
    output.result({"model": loaded.identity.model_id or "unnamed", "rows": [asdict(row) for row in rows]})
    output.data(render(rows))


def render(rows: Sequence[TaskRow]) -> str:
    """The rows as a table, by length and kind."""
    return table(COLUMNS, sorted(rows, key=lambda row: (row.tokens, row.kind))).rstrip()


COLUMNS: dict[str, Any] = {
    "codec": lambda row: row.codec,
    "precision": lambda row: row.precision,
    "task": lambda row: row.kind,
    "tokens": lambda row: str(row.tokens),
    "right": lambda row: f"{row.right} of {row.asked}",
    "kept": lambda row: str(row.kept),
    "bits": lambda row: f"{row.bits:.2f}",
}
