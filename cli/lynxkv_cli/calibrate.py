"""`lynxkv calibrate`: a model's basis, once, for smaller caches."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lynxkv_cli._errors import UsageProblem
from lynxkv_cli._models import ModelChoice
from lynxkv_cli._options import Device, Json, Model, ModelDtypeOption, Quiet, read_text
from lynxkv_cli._output import Output, size

HELP = """Example: lynxkv calibrate --model smollm2

Find a model's basis: the directions in which its keys and values vary.

It is made once a model, from a few texts, in the time of their prefill. `lynxkv encode --codec compact` then needs
about 0.7 bits an element less than `default` at the same fidelity. The basis is kept among this user's own, where
encode looks for it, and published beside every cache that needs it; readers fetch it once.
"""


def calibrate(
    model: Model = None,
    model_dtype: ModelDtypeOption = "float32",
    device: Device = "cpu",
    documents: Annotated[
        list[str] | None,
        typer.Option("--document", metavar="@FILE", help="Use this text instead of Python's own; may be given again."),
    ] = None,
    tokens: Annotated[int, typer.Option(metavar="N", min=64, help="Tokens of each text.")] = 2048,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="Write it here too, to be given as --basis.")
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Calibrate `model`."""
    output = Output.of(as_json=as_json, quiet=quiet)
    if model is None:
        raise UsageProblem("no model is named", hint="add --model smollm2")
    texts = [read_text(text, name="document", note=output.note) for text in documents or ()]
    import lynxkv
    from lynxkv.bases import check_savable, save_basis

    check_savable()
    if out is not None:
        check_savable(out)
    loaded = ModelChoice(ref=model, dtype=model_dtype, device=device).load(output.note)
    with output.progress() as progress:
        basis = lynxkv.calibrate(loaded, texts or None, tokens=tokens, progress=progress)
    # What was asked for by name first: if the other cannot be written, the work is not lost.
    given = save_basis(basis, out) if out is not None else None
    kept = save_basis(basis)
    path = given or kept
    output.result(
        {
            "path": str(path),
            "sha256": basis.sha256,
            "bytes": len(basis.data),
            "model_id": basis.model_id,
            "layers": len(basis.layers),
        }
    )
    output.data(str(path))
    output.note(f"a basis of {len(basis.layers)} layers, {size(len(basis.data))}")
