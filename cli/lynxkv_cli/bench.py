"""`lynxkv bench`: measurements on this machine, or on real caches, that can be run again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lynxkv.bench.sweeps import SWEEPS
from lynxkv_cli import bench_batch, bench_decode, bench_fetch, bench_kernels, bench_tasks
from lynxkv_cli._errors import UsageProblem
from lynxkv_cli._models import ModelChoice
from lynxkv_cli._options import Device, Json, ModelDtypeOption, Quiet, read_text
from lynxkv_cli._output import Output, progress_or_lines
from lynxkv_cli._tables import table

if TYPE_CHECKING:
    from lynxkv.bench.codec import CodecBench, Plan
    from lynxkv.bench.report import Comparison, Row
    from lynxkv.bench.stats import Interval

HELP = """Example: lynxkv bench codec --quick

Measure codecs on real caches, answers from caches behind links, loading, kernels on this machine.
"""

CODEC_HELP = """Example: lynxkv bench codec --quick

Measure what each codec costs in bits and in fidelity, against the original cache of a real model.

Bits an element count everything that is stored. Errors are those of attention outputs; KL and top-1 compare
the distributions of the next document tokens. Accepted is the part of a greedy draft, made on the cache, that
decoding on the original accepts: mean over all prompts with its 95 % interval.

A codec is a name, or a name with parameters: default:radix=5 or alg1:alpha=100,chunk_dtype=f32. With exact=true
the Residual leads on to the original's bits. Other people's methods go by the same option, written anew to be
measured: linear-split, kivi, kvquant, turboquant, cachegen, sparq, byte-planes; quanto and hqq, which need
lynxkv[baselines]. sparq fetches what its queries ask for: its bits are the mean of what answers fetched.

A sweep is a list of codecs that differ in one setting: alpha, chunk, page, split, sinks, scale-width, key-value,
step, radix or whole.
"""

BASELINES = ("int8", "int4", "alg1:alpha=100,chunk_dtype=f32")

app = typer.Typer(help=HELP, no_args_is_help=False, rich_markup_mode=None)
app.command("batch", help=bench_batch.HELP, short_help="Several prompts over one cache, decoded together.")(
    bench_batch.batch
)
app.command("decode", help=bench_decode.HELP, short_help="Time to the first tokens, from caches behind links.")(
    bench_decode.decode
)
app.command("fetch", help=bench_fetch.HELP, short_help="Loading a cache beside a bare download.")(bench_fetch.fetch)
app.command("kernels", help=bench_kernels.HELP, short_help="Speed of the kernels beside a copy.")(bench_kernels.kernels)
app.command("tasks", help=bench_tasks.HELP, short_help="What stored caches still know: planted keys and facts.")(
    bench_tasks.tasks
)


@app.command("codec", help=CODEC_HELP, short_help="Bits, errors and accepted draft length of every codec.")
def codec(
    model: Annotated[
        str, typer.Option(metavar="MODEL", help="The alias smollm2, a Hugging Face folder or hub id, or a .gguf file.")
    ] = "smollm2",
    model_dtype: ModelDtypeOption = "float32",
    device: Device = "cpu",
    codecs: Annotated[
        list[str] | None,
        typer.Option("--codec", metavar="NAME[:P=V,...]", help="Measure this one; may be given again."),
    ] = None,
    sweeps: Annotated[
        list[str] | None,
        typer.Option("--sweep", metavar="NAME", help="Measure these settings; may be given again, or with --codec."),
    ] = None,
    baselines: Annotated[
        list[str] | None,
        typer.Option("--baseline", metavar="CODEC", help="Compare all others with this one; may be given again."),
    ] = None,
    documents: Annotated[
        list[str] | None,
        typer.Option(
            "--document",
            metavar="NAME|@FILE",
            help="Use this one of the standard documents, or this text; may be given again.",
        ),
    ] = None,
    tokens: Annotated[
        list[int] | None,
        typer.Option(metavar="N", min=16, help="Document tokens to cache, 2048 by default; may be given again."),
    ] = None,
    prompts: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Ask at most this many questions of each document.")
    ] = None,
    draft_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Length of the draft.")] = 32,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Two documents, four prompts, 1024 tokens, codecs only: two minutes."),
    ] = False,
    state: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Keep what is finished here, and go on from it.")
    ] = None,
    csv: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the rows to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Write plots (needs lynxkv[bench]).")] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure codecs on the caches of real documents."""
    output = Output.of(as_json=as_json, quiet=quiet)
    changes: dict[str, Any] = {"draft_tokens": draft_tokens}
    unknown = [name for name in sweeps or () if name not in SWEEPS]
    if unknown:
        raise UsageProblem(f"there is no sweep {unknown[0]!r}", hint=f"choose one of {', '.join(SWEEPS)}")
    if documents:
        changes["documents"] = tuple(_document(text, output) for text in documents)
    if tokens:
        changes["tokens"] = tuple(dict.fromkeys(tokens))
    from lynxkv.bench.codec import Plan, bench_codec
    from lynxkv.bench.methods import BASELINE_METHODS, DEFAULT_METHODS, parse_methods, with_bases
    from lynxkv.bench.report import as_json as to_json
    from lynxkv.bench.report import comparisons, rows, write_csv

    swept = dict.fromkeys(codec for name in sweeps or () for codec in SWEEPS[name] if codec not in (codecs or ()))
    asked = [*(codecs or ()), *swept]
    methods = parse_methods(asked or (DEFAULT_METHODS if quick else (*DEFAULT_METHODS, *BASELINE_METHODS)))
    for baseline in baselines or ():
        if baseline not in [method.label for method in methods]:
            hint = f"add --codec {baseline}" if asked else "name it as in the table, or give it as --codec too"
            raise UsageProblem(f"the baseline {baseline} is not among the codecs", hint=hint)
    if plot is not None:
        from lynxkv.bench import plots
        from lynxkv.plotting import check_matplotlib

        check_matplotlib()
    plan = Plan.quick(**changes) if quick else Plan.standard(**changes)
    if prompts is not None:
        plan = plan.with_prompts(prompts)
    loaded = ModelChoice(ref=model, dtype=model_dtype, device=device).load(output.note)
    methods = with_bases(methods, loaded.identity.fingerprint)
    with output.progress() as bars:
        bench = bench_codec(
            loaded, methods, plan, state=state, progress=progress_or_lines(output, bars, "codecs", "cells")
        )
    compared = baselines or BASELINES
    if csv is not None:
        write_csv(rows(bench), csv)
    if plot is not None:
        plots.write_plots(bench, plot)
    output.result(to_json(bench, compared))
    output.data(render(bench, rows(bench), comparisons(bench, compared)))


def _document(argument: str, output: Output) -> Any:
    from lynxkv.bench.documents import GENERAL_PROMPTS, Document, standard_documents

    standard = {document.name: document for document in standard_documents()}
    if argument in standard:
        return standard[argument]
    name = Path(argument[1:]).name if argument.startswith("@") else "stdin" if argument == "-" else argument[:20]
    return Document(
        name=name, kind="file", text=read_text(argument, name="document", note=output.note), prompts=GENERAL_PROMPTS
    )


def render(bench: CodecBench, all_rows: Sequence[Row], compared: Sequence[Comparison]) -> str:
    """The rows, the Pareto front and the comparisons as text, one table a length and kind."""
    from lynxkv.bench.report import front

    parts = []
    for tokens in bench.plan.tokens:
        measured = [row for row in all_rows if row.tokens == tokens]
        parts.append(_heading(bench.plan, measured[0]))
        parts.append(table(COLUMNS, measured))
        parts.append("Pareto front: nothing measured has both fewer bits and a smaller attention error")
        parts.append(table(FRONT, front(measured, tokens)))
        for baseline in dict.fromkeys(item.baseline for item in compared):
            against = [item for item in compared if (item.tokens, item.baseline) == (tokens, baseline)]
            parts.append(f"against {baseline}, paired; 95 % intervals")
            parts.append(table(PAIRED, against))
    return "\n".join(parts).rstrip()


def _heading(plan: Plan, row: Row) -> str:
    return (
        f"{row.model}, {row.tokens} tokens; documents: {row.documents}, prompts: {row.prompts}, "
        f"next tokens: {row.positions}\n"
        f"drafts of {plan.draft_tokens} tokens, of which at most {row.target_tokens_mean:.1f} can be accepted\n"
    )


FRONT: dict[str, Any] = {
    "codec": lambda point: point.codec,
    "precision": lambda point: point.precision,
    "bits": lambda point: f"{point.bits:.2f}",
    "attn error": lambda point: f"{point.attn_nmse:.1e}",
}
COLUMNS: dict[str, Any] = {
    "codec": lambda row: row.codec,
    "anchor\nbits": lambda row: f"{row.anchor_bits:.2f}",
    "full\nbits": lambda row: f"{row.full_bits:.2f}",
    "total\nbits": lambda row: f"{row.total_bits:.2f}",
    "attn error\nanchor": lambda row: f"{row.attn_nmse_anchor:.1e}",
    "attn error\nfull": lambda row: f"{row.attn_nmse_full:.1e}",
    "KL\nanchor": lambda row: f"{row.kl_anchor:.1e}",
    "KL\nfull": lambda row: f"{row.kl_full:.1e}",
    "top-1\nanchor": lambda row: f"{row.top1_anchor:.1%}",
    "top-1\nfull": lambda row: f"{row.top1_full:.1%}",
    "accepted\nanchor": lambda row: f"{row.accepted_mean:.1f} [{row.accepted_low:.1f}, {row.accepted_high:.1f}]",
    "accepted\nfull": lambda row: (
        f"{row.accepted_full_mean:.1f} [{row.accepted_full_low:.1f}, {row.accepted_full_high:.1f}]"
    ),
}
PAIRED: dict[str, Any] = {
    "codec": lambda item: item.codec,
    "accepted, difference": lambda item: _interval(item.accepted_difference, "+.1f"),
    "accepted, ratio": lambda item: _interval(item.accepted_ratio, ".2f"),
    "attn error anchor, ratio": lambda item: _interval(item.attn_ratio_anchor, ".3g"),
    "attn error full, ratio": lambda item: _interval(item.attn_ratio_full, ".3g"),
}


def _interval(interval: Interval | None, form: str) -> str:
    if interval is None:
        return ""
    return f"{interval.value:{form}} [{interval.low:{form}}, {interval.high:{form}}]"
