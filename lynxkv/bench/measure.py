"""How far decoding on a stored cache is from decoding on the original: errors, distributions, accepted drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lynxkv.bench.stored import SparseFetch
from lynxkv.errors import InputError
from lynxkv.integrations.hf import LynxCache, Model
from lynxkv.integrations.hf.queries import StoredAttention, replaced_attention, watch_attention
from lynxkv.integrations.hf.templates import suffix
from lynxkv.kv import KV, KVLayer
from lynxkv.layout import TensorName
from lynxkv.quantization import to_original

TENSORS: tuple[TensorName, TensorName] = ("k", "v")


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A question's tokens and the greedy continuation of the original cache after them, up to an end of text."""

    suffix_ids: list[int]
    target_ids: list[int]


@dataclass(frozen=True, kw_only=True)
class Reference:
    """What the original says of one document: measured once, used for all methods.

    The original is the model's KV rounded to bf16. `log_probs` [W, V] are of the W document tokens `next_ids` that
    follow the cached ones; `attention` is each layer's to the cached tokens meanwhile, with the model's own scale,
    softcap and windows, and `outputs` [H_q, q, D] what it gives on the original.
    """

    kv: KV
    next_ids: list[int]
    log_probs: Tensor
    attention: list[StoredAttention]
    outputs: list[Tensor]
    prompts: list[Prompt]

    @property
    def room_tokens(self) -> int:
        """Tokens that the longest pass adds to the cache."""
        return max(len(self.next_ids), *(len(prompt.suffix_ids) + len(prompt.target_ids) for prompt in self.prompts))


@dataclass(frozen=True, kw_only=True)
class LayerError:
    """Sums of squared errors and of squares of one layer, so that ratios can be taken over any set of layers."""

    k: tuple[float, float]
    v: tuple[float, float]
    attention: tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Fidelity:
    """One stored cache at one precision against the original.

    `kl` (nats) and `agrees` are by position of the next document tokens: divergence of the distributions, and whether
    the likeliest token is the same; `gap` is how far the original ranks the token that this cache prefers below its
    own (nats, 0 where they agree). `accepted` is by prompt: the length of the greedy draft that the original accepts.
    """

    layers: list[LayerError]
    kl: list[float]
    agrees: list[bool]
    gap: list[float]
    accepted: list[int]


def make_reference(
    model: Model,
    kv: KV,
    next_ids: Sequence[int],
    questions: Sequence[str],
    *,
    draft_tokens: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Reference:
    """Measure the original: `kv` as the model computed it, rounded to bf16.

    Args:
        progress: called with (questions answered, questions in all).

    Raises:
        InputError: a question has no tokens, or the model's context has no room for it.
        UnsupportedModelError: the model's attention cannot be watched.
    """
    original = rounded(kv)
    suffixes = [suffix(model.tokenizer, question) for question in questions]
    if not all(suffixes):
        raise InputError("a question has no tokens")
    room = max(len(next_ids), *(len(ids) + draft_tokens for ids in suffixes))
    if model.context_tokens is not None and kv.stop + room > model.context_tokens:
        raise InputError(
            f"{kv.stop} cached tokens and {room} more are over the model's context of {model.context_tokens}",
            hint="ask for fewer tokens",
        )
    cache = live_cache(model, original, room)
    tokens = cache.tokens
    attention = [layer.on_stored() for layer in watch_attention(model, cache, next_ids)]
    cache.rollback(tokens)
    log_probs = torch.log_softmax(model.step(cache, next_ids, rows=len(next_ids)), -1)
    cache.rollback(tokens)
    prompts = []
    for done, ids in enumerate(suffixes, 1):
        prompts.append(Prompt(suffix_ids=ids, target_ids=continue_greedily(model, cache, ids, draft_tokens)))
        cache.rollback(tokens)
        progress(done, len(suffixes))
    return Reference(
        kv=original,
        next_ids=list(next_ids),
        log_probs=log_probs,
        attention=attention,
        outputs=[
            attend(layer.tensors["k"], layer.tensors["v"])
            for attend, layer in zip(attention, original.layers, strict=True)
        ],
        prompts=prompts,
    )


def measure(model: Model, cache: LynxCache, reference: Reference, sparse: SparseFetch | None = None) -> Fidelity:
    """Measure a live cache that holds a document's tokens and has room for `reference.room_tokens` more.

    The cache is rolled back to where it was. `sparse` stands in for the model's attention, and counts what it fetches.
    """
    tokens = cache.tokens
    accepted = []
    with replaced_attention(model, sparse.attend) if sparse else nullcontext():
        layers = [_layer_error(cache, reference, number) for number in range(len(reference.kv.layers))]
        log_probs = torch.log_softmax(model.step(cache, reference.next_ids, rows=len(reference.next_ids)), -1)
        cache.rollback(tokens)
        for prompt in reference.prompts:
            # The last target token needs no row after it.
            ids = [*prompt.suffix_ids, *prompt.target_ids[:-1]]
            with sparse.answer(cache) if sparse else nullcontext():
                logits = model.step(cache, ids, rows=len(prompt.target_ids))
            accepted.append(accepted_length(logits, prompt.target_ids))
            cache.rollback(tokens)
    exact = reference.log_probs
    best, chosen = exact.argmax(-1, keepdim=True), log_probs.argmax(-1, keepdim=True)
    return Fidelity(
        layers=layers,
        kl=(exact.exp() * (exact - log_probs)).sum(-1).tolist(),
        agrees=(best == chosen)[:, 0].tolist(),
        gap=(exact.gather(1, best) - exact.gather(1, chosen))[:, 0].tolist(),
        accepted=accepted,
    )


def accepted_length(logits: Tensor, target_ids: Sequence[int]) -> int:
    """How much of a greedy draft the target would accept, from one teacher-forced pass.

    Row i of logits [n, V] follows target_ids[:i]. As long as every argmax is the target's token, drafting would have
    gone the same way; the first that is not ends the accepted part.
    """
    same = logits.argmax(-1) == torch.tensor(list(target_ids), device=logits.device)
    return int(same.long().cumprod(0).sum())


def continue_greedily(
    model: Model, cache: LynxCache, ids: list[int], max_tokens: int, *, guess: Sequence[int] = ()
) -> list[int]:
    """The greedy continuation, `max_tokens` long or up to and including an end of text.

    Args:
        guess: what it may well be; one pass finds how far it holds, and decoding goes on from there.
    """
    out: list[int] = []
    if guess:
        start = cache.tokens + len(ids)
        logits = model.step(cache, [*ids, *guess[:-1]], rows=len(guess))
        held = accepted_length(logits, guess)
        out = list(guess[:held])
        if held < len(guess):
            out.append(int(logits[held].argmax()))
            cache.rollback(start + held)
    step = out[-1:] or ids
    while len(out) < max_tokens and not (out and out[-1] in model.eos_token_ids):
        out.append(int(model.step(cache, step)[0].argmax()))
        step = out[-1:]
    return out


def rounded(kv: KV) -> KV:
    """The original: K and V in bf16."""
    layers = []
    for number, layer in enumerate(kv.layers):
        tensors = {
            name: to_original(tensor, "bf16", where=f"layer {number} {name}") for name, tensor in layer.tensors.items()
        }
        layers.append(
            KVLayer(tensors=tensors, start=layer.start, stop=layer.stop, kind=layer.kind, window=layer.window)
        )
    return KV(layers=layers, start=kv.start, stop=kv.stop, token_ids=kv.token_ids)


def live_cache(model: Model, kv: KV, room_tokens: int) -> LynxCache:
    """A live cache that holds `kv`."""
    cache = empty_cache(model, kv, room_tokens)
    for number, layer in enumerate(kv.layers):
        for name, tensor in layer.tensors.items():
            cache.target(number, name).copy_(tensor)
    return cache


def empty_cache(model: Model, kv: KV, room_tokens: int) -> LynxCache:
    """Buffers of the shape of `kv` with room for `room_tokens` more, which can be rolled back."""
    return model.new_cache(kv.stop, room_tokens, rollback_tokens=2 * room_tokens)


def _layer_error(cache: LynxCache, reference: Reference, number: int) -> LayerError:
    original = reference.kv.layers[number].tensors
    decoded = {name: cache.target(number, name) for name in TENSORS}
    output = reference.attention[number](decoded["k"], decoded["v"])
    return LayerError(
        k=_sums(decoded["k"], original["k"]),
        v=_sums(decoded["v"], original["v"]),
        attention=_sums(output, reference.outputs[number]),
    )


def _sums(decoded: Tensor, original: Tensor) -> tuple[float, float]:
    """(sum of squared errors, sum of squares), in f64."""
    exact: Any = original.to(torch.float64)
    return float((decoded.to(torch.float64) - exact).square().sum()), float(exact.square().sum())
