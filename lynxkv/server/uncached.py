"""Answers to prompts that no cache holds: prefill, then plain decoding."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from torch import Tensor

from lynxkv.errors import InputError
from lynxkv.events import Event, GenerateResult, Phase, Span
from lynxkv.kv import KV
from lynxkv.models import CHUNK_TOKENS, DecoderModel, check_prompt
from lynxkv.sampling import Sampling, draw
from lynxkv.verified import VerifiedText


def generate_uncached(
    model: DecoderModel,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    sampling: Sampling,
    stop: Sequence[str] = (),
    top_logprobs: int | None = None,
    on_event: Callable[[Event], None] = lambda event: None,
    began_at: float | None = None,
    keep_tokens: int = 0,
    keep: Callable[[KV], None] = lambda kv: None,
) -> GenerateResult:
    """Answer `prompt_ids` as the model does without any cache; the text is that of the original.

    Args:
        top_logprobs: as for `generate`.
        began_at: what times count from, on `time.perf_counter`; now by default.
        keep_tokens: `keep` is given the KV of so many first tokens, once they have been run. It shares the run's memory
            and stands until `keep` returns.

    Raises:
        InputError: the prompt is empty, leaves no room in the model's context, or has ids outside its vocabulary.
    """
    began_at = time.perf_counter() if began_at is None else began_at
    check_prompt(model, prompt_ids)
    room = max_new_tokens
    if model.context_tokens is not None:
        room = min(room, model.context_tokens - len(prompt_ids))
    if room < 1:
        raise InputError(
            f"a prompt of {len(prompt_ids)} tokens leaves no room in the model's context of {model.context_tokens}",
            hint="shorten the prompt",
        )
    cache = model.new_cache(0, len(prompt_ids) + room, rollback_tokens=2 * CHUNK_TOKENS)
    generator = sampling.generator(model.device)

    def now() -> float:
        return time.perf_counter() - began_at

    text = VerifiedText(
        model.to_text,
        eos_token_ids=model.eos_token_ids,
        stop=stop,
        max_tokens=room,
        now=now,
        on_event=on_event,
        top_logprobs=top_logprobs,
    )

    def step(token_ids: Sequence[int]) -> Tensor:
        before = now()
        logits = model.step(cache, token_ids)
        on_event(Span("plain", before, now(), len(token_ids)))
        return logits[-1]

    on_event(Phase("decode"))
    for first, last in ((0, keep_tokens), (keep_tokens, len(prompt_ids))):
        for start in range(first, last, CHUNK_TOKENS):
            logits = step(prompt_ids[start : min(start + CHUNK_TOKENS, last)])
        if last == keep_tokens > 0:
            keep(cache.to_kv(prompt_ids[:keep_tokens]))
    while not text.stopped:
        if text.token_ids:
            logits = step(text.token_ids[-1:])
        history = [*prompt_ids, *text.token_ids] if sampling.needs_history else []
        text.stand([draw(sampling.distribution(logits, history), generator)], logits[None])
    assert text.stopped is not None
    assert text.first_s is not None
    return GenerateResult(
        text=text.text,
        token_ids=text.token_ids,
        precision="exact",
        first_verified_s=text.first_s,
        total_s=now(),
        peak_bytes=cache.nbytes,
        peak_parts={"cache": cache.nbytes},
        stopped=text.stopped,
    )
