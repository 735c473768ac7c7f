"""`lynxkv plan`: what caches of a model would weigh and how soon they would answer, before there are any."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lynxkv.choices import Target
from lynxkv_cli._errors import UsageProblem
from lynxkv_cli._options import LINK_FORM, Json, Quiet, parse_link
from lynxkv_cli._output import Output, seconds, size
from lynxkv_cli._tables import table

if TYPE_CHECKING:
    from lynxkv.planning import Plan

HELP = """Example: lynxkv plan --model smollm2 --tokens 2048 --link 200mbit/20ms

Say what each profile would weigh and how soon it would answer over a link, and which one to take.

The model's shape comes from its configuration alone: a folder with config.json will do, or the file itself.
Times are expected ones, since the cache is opened, up to the first draft token, the first verified one and the
32nd. They are reckoned from bits, errors and accepted lengths that were measured on one small model
(docs/codec-notes.md), and from the speeds given here; INT8, bf16 and a prefill stand beside for comparison.

The target is what verified text must at least be as close to the original as: int8, default, bf16 (rounding
itself) or exact. `lynxkv encode --codec auto` takes the same choice.
"""

TargetOption = Annotated[
    Target, typer.Option("--target", help="What verified text is to be at least as close to the original as.")
]


def plan(
    model: Annotated[
        str,
        typer.Option(metavar="MODEL", help="The alias smollm2, a model folder or its config.json, or a hub id."),
    ],
    tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Tokens of the prompt.")],
    link: Annotated[str, typer.Option(metavar="RATE[/ROUND_TRIP]", help="The link, say 200mbit or 1gbit/20ms.")],
    target: TargetOption = "default",
    calibrated: Annotated[
        bool, typer.Option("--calibrated", help="The model has been calibrated: compact may be chosen.")
    ] = False,
    token_ms: Annotated[float, typer.Option(metavar="MS", min=0.001, help="Milliseconds of a model step.")] = 20.0,
    prefill_rate: Annotated[
        float | None, typer.Option(metavar="N", min=0.001, help="Tokens a second of a prefill, to compare with.")
    ] = None,
    entropy_rate: Annotated[
        float | None,
        typer.Option(metavar="GB/S", min=0.001, help="bf16 that decoding entropy-coded anchors puts out: 4 CPU cores."),
    ] = None,
    fixed_rate: Annotated[
        float | None, typer.Option(metavar="GB/S", min=0.001, help="The same of fixed-rate anchors: 4 CPU cores.")
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Reckon with every profile."""
    output = Output.of(as_json=as_json, quiet=quiet)
    from lynxkv.planning import Speeds, Workload
    from lynxkv.planning import plan as make_plan
    from lynxkv.shapes import read_shape

    parsed = parse_link(link)
    if parsed is None:
        raise UsageProblem("there is no link", hint=LINK_FORM)
    shape = read_shape(model, report=output.note)
    workload = Workload(tokens=tokens, elements=shape.elements(tokens), channels=shape.channels)
    usual = Speeds()
    speeds = Speeds(
        token_s=token_ms / 1000,
        entropy_byte_s=usual.entropy_byte_s if entropy_rate is None else entropy_rate * 1e9,
        fixed_byte_s=usual.fixed_byte_s if fixed_rate is None else fixed_rate * 1e9,
        prefill_token_s=prefill_rate,
    )
    found = make_plan(workload, parsed, target, speeds, basis=calibrated)
    output.result(
        {
            "model_id": shape.model_id,
            "latent": shape.latent,
            "layers": len(shape.layers),
            **asdict(workload),
            "bytes_original": workload.original_bytes,
            "link_bit_s": parsed.bit_per_s,
            "rtt_s": parsed.rtt_s,
            "target": target,
            "calibrated": calibrated,
            "speeds": asdict(speeds),
            "estimates": [asdict(item) for item in found.estimates],
            "choice": found.choice.codec,
            "why": found.why,
        }
    )
    if shape.latent:
        output.note("the bits were measured on keys and values; those of a latent are taken to be the same")
    output.data(
        f"{shape.model_id}, {tokens} tokens: {workload.elements:,} elements, {size(workload.original_bytes)} in bf16\n"
    )
    output.data(render(found))


def render(found: Plan) -> str:
    """The estimates as a table, then the choice."""
    return table(COLUMNS, found.estimates) + f"\n{found.choice.codec}: {found.why}"


COLUMNS: dict[str, Any] = {
    "": lambda item: f"{item.name} (calibrated)" if item.needs_basis else item.name,
    "Anchor": lambda item: size(item.anchor_bytes) if item.codec else "",
    "Residual": lambda item: size(item.residual_bytes) if item.residual_bytes else "",
    "attn error": lambda item: f"{item.attn_nmse:.1e}" if item.attn_nmse else "0",
    "meets\ntarget": lambda item: "yes" if item.meets_target else "no",
    "first\ndraft": lambda item: seconds(item.first_draft_s) if item.first_draft_s else "",
    "first\nverified": lambda item: seconds(item.first_verified_s),
    "32nd\nverified": lambda item: seconds(item.last_verified_s),
    "drafted,\naccepted": lambda item: f"{item.drafted}, {item.accepted:.1f}" if item.drafted else "",
}
