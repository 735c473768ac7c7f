"""`lynxkv generate`: answer a question from a cache while the cache is still arriving."""

from __future__ import annotations

import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lynxkv.choices import CONCURRENCY, MAX_NEW_TOKENS, ResidualPolicy, Verify
from lynxkv.plotting import check_plot, check_writable
from lynxkv_cli._errors import FAILED, UsageProblem
from lynxkv_cli._models import ModelChoice
from lynxkv_cli._options import (
    CACHE_MAX_BYTES,
    CacheDir,
    CacheMaxBytes,
    Concurrency,
    Deadline,
    Device,
    Json,
    Model,
    ModelDtypeOption,
    Quiet,
    ResidualUrl,
    Tokens,
    Transport,
    Url,
    parse_link,
    parse_size,
    parse_speculate,
    read_text,
)
from lynxkv_cli._output import Output, can_style, seconds, size

if TYPE_CHECKING:
    from lynxkv.events import Event, GenerateResult
    from lynxkv.fetch import CacheReader
    from lynxkv.integrations import hf
    from lynxkv.layout import Identity
    from lynxkv.proof import Proof

UNVERIFIED = "unverified: this text is decoded on the Anchor alone and may differ from that of the full cache"

HELP = """Example: lynxkv generate readme.lynx --prompt "What is this?" --link 20mbit

Answer from a cache while it is still arriving: draft on the Anchor, verify with the Residual.

In a terminal the draft is dimmed and turns solid as it is verified; wrong tokens are struck through and
replaced. In a pipe only verified text reaches stdout. A summary follows on stderr.

Without --prompt the cached text goes on: the model answers a chat turn that was left open as it stands, and
continues any other text. With --verify exact and a cache made with --logits, the first token of such a text
needs no keys or values at all.

With --follow the cache may still be at work in `lynxkv encode --span-tokens`, here or on another machine: each
span is loaded as soon as it is published, so that the transfer overlaps the prefill.
"""


def generate(
    url: Url,
    prompt: Annotated[
        str | None,
        typer.Option(
            "--prompt", "-p", metavar="TEXT|@FILE|-", help="What to ask after the cached text.", show_default=False
        ),
    ] = None,
    model: Model = None,
    model_dtype: ModelDtypeOption = "float32",
    device: Device = "cpu",
    max_new_tokens: Annotated[
        int, typer.Option(metavar="N", min=1, help="Stop after this many tokens.")
    ] = MAX_NEW_TOKENS,
    temperature: Annotated[float, typer.Option(metavar="X", min=0.0, help="0 is greedy.")] = 0.0,
    top_p: Annotated[
        float,
        typer.Option(metavar="X", min=0.0, max=1.0, help="Sample from the likeliest tokens of this total, above 0."),
    ] = 1.0,
    repetition_penalty: Annotated[
        float, typer.Option(metavar="X", min=0.0, help="Above 1 makes tokens that were there less likely.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(metavar="N", help="Of the sampler.")] = 0,
    stop: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="End before this text; may be given again.")
    ] = None,
    speculate: Annotated[
        str, typer.Option(metavar="auto|N|off", help="How many tokens to draft; off waits for the Residual.")
    ] = "auto",
    verify: Annotated[
        Verify,
        typer.Option(
            help="full: the text of the full cache; exact: of the original, needs encode --exact; none: decode on the "
            "Anchor, fetch no Residual."
        ),
    ] = "full",
    tokens: Tokens = None,
    follow: Annotated[
        bool,
        typer.Option("--follow", help="The cache is still being written with encode --span-tokens: load it meanwhile."),
    ] = False,
    follow_timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="With --follow: give up when nothing new has come for so long.")
    ] = 300.0,
    link: Annotated[
        str | None,
        typer.Option(metavar="RATE[/RTT]", help="Read over a simulated link, such as 200mbit/20ms."),
    ] = None,
    transport: Transport = "auto",
    concurrency: Concurrency = CONCURRENCY,
    deadline: Deadline = None,
    residual_url: ResidualUrl = None,
    if_residual_unavailable: Annotated[
        ResidualPolicy, typer.Option(help="anchor-only decodes on the Anchor alone then, and says so.")
    ] = "error",
    cache_dir: CacheDir = None,
    cache_max_bytes: CacheMaxBytes = CACHE_MAX_BYTES,
    prove: Annotated[
        bool, typer.Option("--prove", help="Decode again without speculation, and compare; for greedy texts.")
    ] = False,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE.json", help="Write a Chrome trace of the run, for Perfetto.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Draw the run's time line (needs lynxkv[bench]).")
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Generate after the cache at `url`."""
    output = Output.of(as_json=as_json, quiet=quiet)
    simulated = parse_link(link)
    drafts = parse_speculate(speculate)
    disk_bytes = parse_size(cache_max_bytes)
    if stop and not all(stop):
        raise UsageProblem("a --stop text is empty", hint="give the text to end before, or leave --stop out")
    if prove and (temperature or repetition_penalty != 1):
        raise UsageProblem("--prove compares greedy texts", hint="leave --temperature and --repetition-penalty out")
    if follow and tokens is not None:
        raise UsageProblem("--follow and --tokens exclude each other", hint="leave one out")
    if trace is not None:
        check_writable(trace)
    if plot is not None:
        check_plot(plot)
    question = None if prompt is None else read_text(prompt, name="question", note=output.note)
    import lynxkv
    from lynxkv.fetch import CacheReader

    sampling = lynxkv.Sampling(temperature=temperature, top_p=top_p, repetition_penalty=repetition_penalty, seed=seed)
    options = lynxkv.FetchOptions(
        transport=transport,
        concurrency=concurrency,
        deadline_s=deadline,
        residual_url=residual_url,
        if_residual_unavailable=if_residual_unavailable,
        cache_dir=cache_dir,
        cache_max_bytes=disk_bytes,
        follow_s=follow_timeout,
    )
    with CacheReader(url, tokens=tokens, follow=follow, options=options, header_only=True) as reader:
        identity = reader.extent.identity
        if verify == "exact":
            from lynxkv.decoder import check_precision

            check_precision(reader.extent, verify)
        unverified = verify == "none" and reader.bytes_residual > 0
    ref = model or _model_of(url, identity)

    from lynxkv.identity import check_identity
    from lynxkv_cli._views import view_for

    loaded = ModelChoice(ref=ref, dtype=model_dtype, device=device).load(output.note)
    check_identity(identity, loaded.identity)
    suffix_ids = _suffix_ids(loaded, question, identity.turn)
    if unverified:
        output.note(UNVERIFIED)
    from lynxkv.trace import Trace

    view, timeline = view_for(output.mode, styled=can_style(sys.stdout)), Trace()

    def on_event(event: Event) -> None:
        view.on_event(event)
        timeline.on_event(event)

    # The clock of the result starts here: with the model in memory, before the first byte of the cache.
    with lynxkv.open(url, tokens=tokens, follow=follow, link=simulated, options=options) as reader:
        try:
            result = lynxkv.generate(
                reader,
                loaded,
                suffix_ids,
                max_new_tokens=max_new_tokens,
                sampling=sampling,
                speculate=drafts,
                verify=verify,
                stop=stop or (),
                on_event=on_event,
            )
        finally:
            view.finish()
        cached_tokens, caches = reader.extent.tokens, len(reader.spans)
    if trace is not None:
        timeline.write(trace, result)
    if plot is not None:
        timeline.plot(plot, result)
    proof = None
    if prove:
        with lynxkv.open(url, tokens=tokens, options=options) as reader:
            proof = _prove(reader, loaded, suffix_ids, result, output)
    output.result(
        {
            "url": url,
            "model_id": loaded.identity.model_id,
            "cached_tokens": cached_tokens,
            "caches": caches,
            **asdict(result),
            "proof": {**asdict(proof), "explained": proof.explained} if proof else None,
        }
    )
    for note in result.notes:
        output.note(note)
    if caches > 1 or tokens is not None:
        output.note(f"on the first {cached_tokens} tokens, in {caches} caches")
    output.note(summary(result))
    if proof is not None:
        output.note(verdict(proof, result))
        if not proof.explained:
            raise typer.Exit(FAILED)


def _prove(
    reader: CacheReader, model: hf.Model, suffix_ids: list[int], result: GenerateResult, output: Output
) -> Proof:
    from lynxkv.proof import prove

    with output.progress() as progress:
        return prove(reader, model, suffix_ids, result, progress=partial(progress, "prove"))


def verdict(proof: Proof, result: GenerateResult) -> str:
    """What a proof found, for people."""
    plain = f"plain decoding from the {result.precision} cache"
    figures = f"least gap of two logits {proof.smallest_gap:.2g}, rounding between passes {proof.rounding:.1g}"
    if proof.equal:
        return f"proved: all {proof.tokens} tokens are those of {plain}; {figures}"
    blame = "" if proof.explained else "rounding does not explain it: please report this with the output of --json; "
    return (
        f"{blame}token {proof.differs_at} differs from that of {plain}, which ranks it {proof.gap_there:.2g} below its "
        f"own; {figures}"
    )


def _suffix_ids(model: hf.Model, question: str | None, turn: str | None) -> list[int]:
    """What follows the cached tokens. Without a question only a turn known to be open is closed."""
    from lynxkv.integrations.hf import suffix

    if question is None:
        return suffix(model.tokenizer, turn=turn or "none")
    return suffix(model.tokenizer, question, turn=turn)


def _model_of(url: str, identity: Identity) -> str:
    """What to load for a cache whose model was not named. A file alone never makes anything be downloaded."""
    from lynxkv.checkpoints import ALIASES

    for alias, (_, _, model_id) in ALIASES.items():
        if identity.model_id == model_id:
            return alias
    if identity.model_id is None:
        raise UsageProblem(f"{url} does not say which model it belongs to", hint="name it with --model")
    raise UsageProblem(f"{url} belongs to {identity.model_id}", hint="name the model, or where it is, with --model")


def summary(result: GenerateResult) -> str:
    """The figures of a run, for people."""
    share = f" ({result.accepted / result.drafted:.0%})" if result.drafted else ""
    second, exact = "", ""
    if result.first_provisional_s is not None:
        second = (
            f"provisional {result.provisional}, accepted {result.accepted_exact}; "
            f"first provisional token {seconds(result.first_provisional_s)}\n"
        )
    if result.bytes_exact:
        exact = f", exact {size(result.bytes_exact)}"
    unverified = f"{UNVERIFIED}\n" if result.precision == "anchor" else ""
    firsts = f"first token {seconds(result.first_verified_s)}"
    if result.precision != "anchor":
        firsts = f"first draft token {seconds(result.first_draft_s)}, first verified {firsts.removeprefix('first ')}"
    buffers = ", ".join(f"{name.replace('_', ' ')} {size(count)}" for name, count in result.peak_parts.items())
    return (
        f"{unverified}drafted {result.drafted}, accepted {result.accepted}{share}\n"
        f"{firsts}, all {len(result.token_ids)} tokens {seconds(result.total_s)}\n"
        f"{second}Anchor {size(result.bytes_anchor)}, Residual {size(result.bytes_residual)}{exact}; "
        f"buffers at their largest {size(result.peak_bytes)} ({buffers})"
    )
