"""`lynxkv encode`: prefill a prompt, or take a dumped KV cache, and publish it as Anchor and Residual."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lynxkv.choices import CODEC_NAMES, Dtype, Target, parse_codec
from lynxkv_cli._errors import UsageProblem
from lynxkv_cli._models import ModelChoice
from lynxkv_cli._options import LINK_FORM, Device, Json, Model, ModelDtypeOption, Quiet, parse_link, read_text
from lynxkv_cli._output import Output, seconds, size

if TYPE_CHECKING:
    from lynxkv.encoder import EncodeReport
    from lynxkv.layout import Identity
    from lynxkv.planning import Workload
    from lynxkv.spans import PromptReport

    # How to encode, once it is known for whom: of a model's identity, and the numbers that it keeps.
    Known = Callable[[Identity | None, Workload], dict[str, Any]]

HELP = """Example: lynxkv encode @README.md --model smollm2 --out readme.lynx

Prefill a prompt and publish its KV cache.

The prompt is text, @FILE, or - for stdin. For a chat model it becomes the start of a user turn that is left
open, so that a question can follow it. Nothing appears at the URL before the cache is complete. The URL goes
to stdout.

A codec may be given parameters: default:radix=5 or alg1:alpha=100,chunk_dtype=f32. `lynxkv bench codec` measures
what they do. With --codec auto it is chosen for a link and a target, as `lynxkv plan` does, and said why.

If a cache beside the new one holds the first tokens of the prompt, for the same model and by the same codec, it is
loaded, and only the rest is prefilled and published, as a cache that continues it: --no-continue says no. With
--span-tokens the prompt is published span by span while it is prefilled, as NAME.0000.lynx, NAME.0001.lynx and so
on; the last span is NAME.lynx itself. What a killed writer leaves is continued by the next run.

With --from the keys and values come from a safetensors file that another tool wrote, as arrays layer.<i>.k
and layer.<i>.v of shape [heads, tokens, head_dim], and token_ids if known; --model then only records whose
they are.
"""


def encode(
    out: Annotated[
        str,
        typer.Option("--out", "-o", metavar="URL", help="Where the cache goes: a folder or any fsspec URL."),
    ],
    prompt: Annotated[
        str | None,
        typer.Argument(metavar="[PROMPT|@FILE|-]", help="The text to prefill.", show_default=False),
    ] = None,
    model: Model = None,
    model_dtype: ModelDtypeOption = "float32",
    device: Device = "cpu",
    codec: Annotated[
        str,
        typer.Option(
            metavar="NAME[:P=V,...]", help=f"One of {', '.join(CODEC_NAMES)}, with parameters if need be; or auto."
        ),
    ] = "default",
    basis: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The model's basis, if not the one that calibrate has kept."),
    ] = None,
    link: Annotated[
        str | None,
        typer.Option(metavar="RATE[/ROUND_TRIP]", help="For --codec auto: the link it is to be read over, 1gbit/20ms."),
    ] = None,
    target: Annotated[
        Target | None,
        typer.Option("--target", help="For --codec auto: what to be at least as close to the original as; default."),
    ] = None,
    dtype: Annotated[Dtype, typer.Option(help="What decoding returns; fp32 only with the codec raw.")] = "bf16",
    from_file: Annotated[
        Path | None,
        typer.Option("--from", metavar="KV.safetensors", help="Take this KV cache, prefill nothing."),
    ] = None,
    span_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Publish every N tokens as soon as they are prefilled; generate --follow reads along.",
        ),
    ] = None,
    continue_stored: Annotated[
        bool,
        typer.Option(
            "--continue/--no-continue",
            help="Prefill only what no cache beside the new one holds of the prompt's start.",
        ),
    ] = True,
    token_ids: Annotated[
        bool, typer.Option("--token-ids/--no-token-ids", help="Store the token ids, or only their digest.")
    ] = True,
    chunk_tokens: Annotated[
        int, typer.Option(metavar="N", min=1, help="Tokens a prefill step; bounds its memory.")
    ] = 512,
    exact: Annotated[bool, typer.Option("--exact", help="Add what leads back to the original's very bits.")] = False,
    logits: Annotated[
        bool, typer.Option("--logits", help="Store the last position's logits: they give the prompt's next token.")
    ] = False,
    residual_out: Annotated[
        str | None,
        typer.Option(metavar="URL", help="A folder or prefix for the Residual, if it is not to be beside the Anchor."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a cache that is there already.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Encode a prompt or a KV file to `out`."""
    output = Output.of(as_json=as_json, quiet=quiet)
    text = None
    if prompt is not None and from_file is None:
        if model is None:
            raise UsageProblem("a prompt needs a model", hint="add --model smollm2")
        text = read_text(prompt, name="prompt", note=output.note)
    elif from_file is None or prompt is not None:
        hint = "lynxkv encode @README.md --model smollm2 --out readme.lynx"
        raise UsageProblem("give a prompt or --from, one of the two", hint=hint)
    elif logits or span_tokens is not None:
        wanted = "--logits" if logits else "--span-tokens"
        raise UsageProblem(f"{wanted} needs a prompt", hint=f"nothing is prefilled with --from; leave {wanted} out")

    named = None if model is None else ModelChoice(ref=model, dtype=model_dtype, device=device)
    auto = codec == "auto"
    if auto and link is None:
        raise UsageProblem("--codec auto needs to know the link", hint=f"add --link; {LINK_FORM}")
    if not auto and (link is not None or target is not None):
        raise UsageProblem("--link and --target go with --codec auto", hint="leave them out, or add --codec auto")
    over = parse_link(link)
    choice = parse_codec("default" if auto else codec)
    if out.startswith("memory:"):
        raise UsageProblem("memory:// ends with this command", hint="give a folder or a URL that lasts")
    from lynxkv.bases import find_basis, load_basis
    from lynxkv.codecs import get_codec
    from lynxkv.encoder import check_options
    from lynxkv.planning import plan
    from lynxkv.store import Store

    # What can be refused without the model is refused before it is loaded.
    method = get_codec(choice.name, **choice.params)
    given = load_basis(basis) if basis is not None else None
    check_options(method, dtype, basis=given is not None or method.needs_basis)
    Store(out).check_target(overwrite=force)
    if residual_out is not None:
        Store.of_residuals(residual_out).check_writable()
    settings: dict[str, Any] = {
        "codec": method,
        "basis": given,
        "dtype": dtype,
        "exact": exact or choice.exact,
        "store_token_ids": token_ids,
        "overwrite": force,
        "residual_url": residual_out,
    }
    why = None

    def known(identity: Identity | None, workload: Workload) -> dict[str, Any]:
        """How to encode so much of a model."""
        nonlocal why
        if over is not None:
            own = given or find_basis(identity.fingerprint if identity is not None else None)
            chosen = plan(workload, over, target or "default", basis=own is not None)
            why = chosen.why
            found = parse_codec(chosen.choice.codec or "raw")
            settings["codec"] = get_codec(found.name, **found.params)
            settings["basis"] = own if settings["codec"].needs_basis else None
            settings["exact"] |= found.exact
            output.note(f"{chosen.choice.codec}: {why}")
        return settings

    if from_file is not None:
        report, identity = _from_file(from_file, named, out, known, output)
    else:
        assert named is not None
        assert text is not None
        settings |= {
            "span_tokens": span_tokens,
            "continue_stored": continue_stored,
            "chunk_tokens": chunk_tokens,
            "logits": logits,
        }
        report, identity = _from_prompt(text, named, out, known, output)
    sums = {
        name: sum(getattr(span, name) for span in report.spans)
        for name in ("bytes_anchor", "bytes_residual", "bytes_exact", "bytes_original")
    }
    method = settings["codec"]
    output.result(
        {
            "url": report.url,
            "cache_id": report.spans[-1].cache_id,
            "tokens": report.tokens,
            "codec": method.name,
            "codec_params": method.params(),
            "codec_why": why,
            "dtype": dtype,
            "model_id": identity.model_id if identity is not None else None,
            **sums,
            "continues": [asdict(span) for span in report.continued],
            "continued_tokens": report.continued_tokens,
            "spans": [asdict(span) for span in report.spans],
            "load_s": report.load_s,
            "prefill_s": report.prefill_s,
            "encode_s": report.encode_s,
        }
    )
    output.data(report.url)
    if report.continued:
        output.note(
            f"continues {report.continued[-1].name}: {report.continued_tokens} of {report.tokens} tokens were there, "
            f"loaded in {seconds(report.load_s)}; --no-continue prefills all"
        )
    more = f", exact {size(sums['bytes_exact'])}" if sums["bytes_exact"] else ""
    caches = f" in {len(report.spans)} caches" if len(report.spans) > 1 else ""
    output.note(
        f"{report.tokens - report.continued_tokens} tokens{caches}: Anchor {size(sums['bytes_anchor'])}, "
        f"Residual {size(sums['bytes_residual'])}{more}; "
        f"prefill {seconds(report.prefill_s)}, encode {seconds(report.encode_s)}"
    )


def _from_prompt(
    text: str, choice: ModelChoice, out: str, known: Known, output: Output
) -> tuple[PromptReport, Identity | None]:
    import lynxkv
    from lynxkv.integrations.hf import open_turn
    from lynxkv.planning import Workload
    from lynxkv.shapes import KVShape, LayerKV

    model = choice.load(output.note)
    ids = open_turn(model.tokenizer, text)
    layers = [
        LayerKV(channels=sum(heads * dim for heads, dim in layer.tensors.values()), window=layer.window)
        for layer in model.layer_specs()
    ]
    shape = KVShape(model_id=choice.ref, layers=tuple(layers))
    workload = Workload(tokens=len(ids), elements=shape.elements(len(ids)), channels=shape.channels)
    settings = known(model.identity, workload)

    def on_span(span: EncodeReport) -> None:
        if span.url != out:
            output.note(f"published {span.url}, {span.tokens} tokens")

    with output.progress() as progress:
        report = lynxkv.encode_prompt(
            model, ids, out, progress=progress, on_span=on_span, report=output.note, **settings
        )
    return report, model.identity


def _from_file(
    path: Path, choice: ModelChoice | None, out: str, known: Known, output: Output
) -> tuple[PromptReport, Identity | None]:
    import lynxkv
    from lynxkv.kv import kv_from_safetensors
    from lynxkv.planning import Workload
    from lynxkv.spans import PromptReport

    kv, identity = kv_from_safetensors(path), None
    if choice is not None:
        # Another tool made the prompt, so whether it ends inside a user turn is not known.
        identity = replace(choice.load(output.note).identity, turn=None)
    tensors = [x for layer in kv.layers for x in layer.tensors.values()]
    workload = Workload(
        tokens=kv.tokens,
        elements=sum(x.numel() for x in tensors),
        channels=sum(x.shape[0] * x.shape[2] for x in tensors),
    )
    settings = known(identity, workload)
    began = time.monotonic()
    with output.progress() as progress:
        encoded = lynxkv.encode(kv, out, identity=identity, progress=progress, **settings)
    report = PromptReport(
        url=encoded.url,
        tokens=encoded.tokens,
        spans=(encoded,),
        continued=(),
        continued_tokens=0,
        load_s=0.0,
        prefill_s=None,
        encode_s=time.monotonic() - began,
    )
    return report, identity
