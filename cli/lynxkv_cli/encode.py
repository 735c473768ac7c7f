"""`lynxkv encode`: prefill a prompt, or take a dumped KV cache, and publish it as Anchor and Residual."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lynxkv.choices import CODEC_NAMES, Dtype, Target, parse_codec
from lynxkv_cli._errors import UsageProblem
from lynxkv_cli._options import LINK_FORM, Json, Model, Quiet, parse_link, read_text
from lynxkv_cli._output import Output, seconds, size

if TYPE_CHECKING:
    from torch import Tensor

    from lynxkv.kv import KV
    from lynxkv.layout import Identity
    from lynxkv.planning import Plan
    from lynxkv.store import Link

    # The cache, whose it is, the logits of its last position and the seconds that the prefill took.
    Source = tuple[KV, Identity | None, Tensor | None, float | None]

HELP = """Example: lynxkv encode @README.md --model smollm2 --out readme.lynx

Prefill a prompt and publish its KV cache.

The prompt is text, @FILE, or - for stdin. For a chat model it becomes the start of a user turn that is left
open, so that a question can follow it. Nothing appears at the URL before the cache is complete. The URL goes
to stdout.

A codec may be given parameters: default:radix=5 or alg1:alpha=100,chunk_dtype=f32. `lynxkv bench codec` measures
what they do. With --codec auto it is chosen for a link and a target, as `lynxkv plan` does, and said why.

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
    source: Callable[[Callable[[Identity | None], None]], Source]
    if prompt is not None and from_file is None:
        if model is None:
            raise UsageProblem("a prompt needs a model", hint="add --model smollm2")
        source = partial(_prefilled, read_text(prompt, name="prompt", note=output.note), model, chunk_tokens, output)
    elif from_file is not None and prompt is None:
        if logits:
            raise UsageProblem("--logits needs a prompt", hint="a KV file has no logits; leave --logits out")
        source = partial(_dumped, from_file, model, output)
    else:
        hint = "lynxkv encode @README.md --model smollm2 --out readme.lynx"
        raise UsageProblem("give a prompt or --from, one of the two", hint=hint)

    auto = codec == "auto"
    if auto and link is None:
        raise UsageProblem("--codec auto needs to know the link", hint=f"add --link; {LINK_FORM}")
    if not auto and (link is not None or target is not None):
        raise UsageProblem("--link and --target go with --codec auto", hint="leave them out, or add --codec auto")
    over = parse_link(link)
    choice = parse_codec("default" if auto else codec)
    if out.startswith("memory:"):
        raise UsageProblem("memory:// ends with this command", hint="give a folder or a URL that lasts")
    import lynxkv
    from lynxkv.bases import basis_of, load_basis
    from lynxkv.codecs import get_codec
    from lynxkv.encoder import check_options
    from lynxkv.store import Store

    # What can be refused without the model is refused before it is loaded.
    method = get_codec(choice.name, **choice.params)
    bases = [load_basis(basis)] if basis is not None else []
    check_options(method, dtype, basis=bool(bases) or method.needs_basis)
    Store(out).check_target(overwrite=force)
    if residual_out is not None:
        Store.of_residuals(residual_out).check_writable()

    def known(identity: Identity | None) -> None:
        """What can be refused without a prefill is refused before it."""
        if method.needs_basis and not bases:
            bases.append(basis_of(identity.fingerprint if identity is not None else None))

    kv, identity, last_logits, prefill_s = source(known)
    why = None
    if over is not None:
        chosen = _chosen(kv, over, target or "default")
        why = chosen.why
        choice = parse_codec(chosen.choice.codec or "raw")
        method = get_codec(choice.name, **choice.params)
        output.note(f"{chosen.choice.codec}: {why}")
    exact = exact or choice.exact
    started = time.monotonic()
    with output.progress() as progress:
        report = lynxkv.encode(
            kv,
            out,
            codec=method,
            basis=bases[0] if bases else None,
            dtype=dtype,
            identity=identity,
            exact=exact,
            logits=last_logits if logits else None,
            store_token_ids=token_ids,
            overwrite=force,
            residual_url=residual_out,
            progress=progress,
        )
    encode_s = time.monotonic() - started
    output.result(
        {
            "url": report.url,
            "cache_id": report.cache_id,
            "tokens": report.tokens,
            "codec": method.name,
            "codec_params": method.params(),
            "codec_why": why,
            "dtype": dtype,
            "model_id": identity.model_id if identity is not None else None,
            "bytes_anchor": report.bytes_anchor,
            "bytes_residual": report.bytes_residual,
            "bytes_exact": report.bytes_exact,
            "bytes_original": report.bytes_original,
            "prefill_s": prefill_s,
            "encode_s": encode_s,
        }
    )
    output.data(report.url)
    more = f", exact {size(report.bytes_exact)}" if exact else ""
    output.note(
        f"{report.tokens} tokens: Anchor {size(report.bytes_anchor)}, Residual {size(report.bytes_residual)}{more}; "
        f"prefill {seconds(prefill_s)}, encode {seconds(encode_s)}"
    )


def _chosen(kv: KV, link: Link, target: Target) -> Plan:
    from lynxkv.planning import Workload, plan

    tensors = [x for layer in kv.layers for x in layer.tensors.values()]
    workload = Workload(
        tokens=kv.tokens,
        elements=sum(x.numel() for x in tensors),
        channels=sum(x.shape[0] * x.shape[2] for x in tensors),
    )
    return plan(workload, link, target)


def _prefilled(
    text: str, model_ref: str, chunk_tokens: int, output: Output, known: Callable[[Identity | None], None]
) -> Source:
    import lynxkv
    from lynxkv.integrations.hf import open_turn

    model = lynxkv.load_model(model_ref, report=output.note)
    known(model.identity)
    ids = open_turn(model.tokenizer, text)
    started = time.monotonic()
    with output.progress() as progress:
        filled = lynxkv.prefill_with_logits(
            model, ids, chunk_tokens=chunk_tokens, progress=partial(progress, "prefill")
        )
    return filled.kv, model.identity, filled.logits, time.monotonic() - started


def _dumped(path: Path, model_ref: str | None, output: Output, known: Callable[[Identity | None], None]) -> Source:
    import lynxkv
    from lynxkv.kv import kv_from_safetensors

    kv = kv_from_safetensors(path)
    identity = None
    if model_ref is not None:
        # Another tool made the prompt, so whether it ends inside a user turn is not known.
        identity = replace(lynxkv.load_model(model_ref, report=output.note).identity, turn=None)
    known(identity)
    return kv, identity, None, None
