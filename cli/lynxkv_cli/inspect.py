"""`lynxkv inspect`: what a cache is, where its bytes go and, against the original, how far off it is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lynxkv.errors import InputError
from lynxkv_cli._errors import UsageProblem
from lynxkv_cli._models import ModelChoice
from lynxkv_cli._options import Device, Json, Model, ModelDtypeOption, Quiet, ResidualUrl, Url
from lynxkv_cli._output import Output
from lynxkv_cli.check import superseded

if TYPE_CHECKING:
    from lynxkv.choices import Precision
    from lynxkv.fetch import FetchOptions
    from lynxkv.fidelity import TensorError
    from lynxkv.layout import Parent
    from lynxkv.report import InspectReport

QUERIES_OF = {
    "model": "the model itself, for the last tokens of the cached text",
    "keys": "the last keys in the place of queries, causal, logits scaled by 1 / sqrt(head_dim)",
}

HELP = """Example: lynxkv inspect readme.lynx

Say what a cache is (model, tokens, codec, identity) and where its bytes go.

Only headers and indexes are read, unless --against or --model asks for the error of every layer and tensor at
every precision: the largest difference, the normalised mean square error, and that of attention outputs.
With --model these are of the model's own attention, for the last tokens of the cached text; a file has no
queries, so that its last keys stand in for them. A Residual that cannot be read is named, and what the Anchor
alone says is shown; `lynxkv check` fails then.
"""


def inspect(
    url: Url,
    against: Annotated[
        Path | None, typer.Option(metavar="KV.safetensors", help="Compare with the KV cache in this file.")
    ] = None,
    model: Model = None,
    model_dtype: ModelDtypeOption = "float32",
    device: Device = "cpu",
    residual_url: ResidualUrl = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Describe the cache at `url`."""
    if against is not None and model is not None:
        raise UsageProblem("--against and --model exclude each other", hint="name one original to compare with")
    import lynxkv

    output = Output.of(as_json=as_json, quiet=quiet)
    options = lynxkv.FetchOptions(residual_url=residual_url)
    report = lynxkv.inspect(url, options=options)
    errors: list[TensorError] | None = None
    # What cannot be read cannot be compared.
    precision: Precision | None = "anchor" if report.residual_problem else None
    if against is not None:
        from lynxkv.kv import kv_from_safetensors

        errors = lynxkv.compare(url, kv_from_safetensors(against), precision=precision, options=options)
    elif model is not None:
        named = ModelChoice(ref=model, dtype=model_dtype, device=device)
        errors = _compare_with_model(url, named, precision, options, output)
    queries = None if errors is None else "keys" if model is None else "model"
    output.result(
        {
            **asdict(report),
            "queries": queries,
            "errors": None if errors is None else [asdict(error) for error in errors],
        }
    )
    output.data(describe(report))
    if errors is not None and queries is not None:
        output.data(f"\nattention of {QUERIES_OF[queries]}\n\n" + error_table(errors))


def _compare_with_model(
    url: str, choice: ModelChoice, precision: Precision | None, options: FetchOptions, output: Output
) -> list[TensorError]:
    """Prefill the cached tokens again, and watch the model attend to them."""
    import lynxkv
    from lynxkv.fidelity import QUERIES
    from lynxkv.identity import check_identity
    from lynxkv.integrations.hf.queries import watch_attention
    from lynxkv.models import check_prompt

    with lynxkv.open(url, options=options) as reader:
        stored, extent = reader.token_ids(), reader.extent
    if stored is None or extent.start:
        what = "does not store its token ids" if stored is None else f"starts at position {extent.start}"
        hint = "compare with --against and the KV cache it was made from"
        raise InputError(f"{url} {what}", hint=hint)
    model = choice.load(output.note)
    check_identity(extent.identity, model.identity)
    ids = stored.tolist()
    check_prompt(model, ids)
    output.note(f"prefilling {len(ids)} tokens")
    cache = model.new_cache(0, len(ids))
    if ids[:-QUERIES]:
        model.step(cache, ids[:-QUERIES])
    watched = watch_attention(model, cache, ids[-QUERIES:])
    return lynxkv.compare(url, cache.to_kv(ids), watched, precision=precision, options=options)


def describe(report: InspectReport) -> str:
    """The report as text: facts first, then bytes by part."""
    identity, tokens = report.identity, report.tokens
    stored = "ids stored" if tokens.stored else "ids not stored"
    facts = [
        ("model", identity.model_id or "unknown"),
        ("revision", identity.revision),
        ("fingerprint", identity.fingerprint),
        ("adapter", identity.adapter),
        ("turn", identity.turn),
        ("tokens", f"{tokens.count}, positions [{tokens.start}, {tokens.stop}), {stored}"),
        ("continues", None if report.parent is None else _continued(report.parent)),
        ("layers", "; ".join(_layers(report))),
        ("codec", " ".join([report.codec, *(f"{name}={value}" for name, value in report.codec_params.items())])),
        ("basis", report.basis),
        ("dtype", report.dtype),
        ("format", f"{report.version}, written by {report.writer.get('tool')} {report.writer.get('version')}"),
        ("cache id", report.cache_id),
        ("Residual", f"cannot be read: {report.residual_problem}" if report.residual_problem else None),
    ]
    lines = [report.url, *(f"  {name:<12}{value}" for name, value in facts if value is not None)]
    lines += [*superseded(report), ""]
    rows = [("part", "bytes", "bits/element")]
    rows += [(f"{part.shard} {part.name}", f"{part.bytes:,}", f"{part.bits_per_element:.3f}") for part in report.parts]
    full = report.bytes_anchor + report.bytes_residual
    rows += [
        ("Anchor", f"{report.bytes_anchor:,}", f"{report.anchor_bits:.3f}"),
        ("Anchor + Residual", f"{full:,}", f"{report.full_bits:.3f}"),
    ]
    if report.bytes_exact:
        rows.append(("with the exact section", f"{full + report.bytes_exact:,}", f"{report.total_bits:.3f}"))
    rows.append((f"uncompressed {report.dtype}", f"{report.bytes_original:,}", ""))
    lines += _aligned(rows)
    lines += [
        "",
        f"{report.compression_anchor:.2f} times smaller than {report.dtype} before the first token, "
        f"{report.compression_full:.2f} times at full precision",
    ]
    return "\n".join(lines)


def error_table(errors: Iterable[TensorError]) -> str:
    """One row a layer, tensor and precision."""
    rows = [("layer", "tensor", "precision", "max abs", "NMSE", "attention NMSE", "K and V")]
    rows += [
        (
            str(error.layer),
            error.tensor,
            error.precision,
            f"{error.max_abs:.3e}",
            f"{error.nmse:.3e}",
            f"{error.attention_nmse:.3e}",
            f"{error.attention_nmse_both:.3e}",
        )
        for error in errors
    ]
    return "\n".join(_aligned(rows))


def _continued(parent: Parent) -> str:
    names = ", ".join(f"{span.name} to {span.stop}" for span in parent.spans)
    precision = "as computed" if parent.precision == "computed" else f"at {parent.precision} precision"
    return f"{names}; prefilled on them {precision}"


def _layers(report: InspectReport) -> Iterable[str]:
    for group in report.layer_groups:
        count = group.last - group.first + 1
        shapes = ", ".join(f"{name} {spec.heads} x {spec.head_dim}" for name, spec in group.layer.tensors.items())
        window = f" (window {group.layer.window})" if group.layer.window is not None else ""
        yield f"{count} {group.layer.kind}{window}: {shapes}"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows in columns: the first to the left, numbers to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for first, *rest in rows:
        numbers = [f"  {cell:>{width}}" for cell, width in zip(rest, widths[1:], strict=True)]
        lines.append((first.ljust(widths[0]) + "".join(numbers)).rstrip())
    return lines
