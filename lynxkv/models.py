"""What lynxkv asks of a model, and prefilling a prompt with it.

`draft`, `runner` and `prefill` know a model through the two protocols here; `integrations` provide them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from lynxkv.errors import InputError
from lynxkv.kv import KV
from lynxkv.layout import Identity, LayerKind, LayerSpec, TensorName

CHUNK_TOKENS = 512


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """One layer of a model: its attention kind, and (heads, head_dim) of each tensor it keeps."""

    kind: LayerKind
    window: int | None
    tensors: dict[TensorName, tuple[int, int]]


@dataclass(frozen=True, kw_only=True)
class Prefilled:
    """What running a prompt leaves behind: its KV, and logits f32 [V] of its last position."""

    kv: KV
    logits: Tensor


class LiveCache(Protocol):
    """The cache a model decodes on: buffers of fixed place that are written, refined and rolled back in place.

    `on_layer`, if set, is called with a layer's number before a model step reads that layer.
    """

    on_layer: Callable[[int], None] | None

    @property
    def tokens(self) -> int:
        """Tokens held, counted from position 0."""

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""

    def target(self, layer: int, tensor: TensorName) -> Tensor:
        """The view [H, stop - start, D] that a stored layer decodes into."""

    def rollback(self, tokens: int) -> None:
        """Forget all but the first `tokens` tokens."""

    def to_kv(self, token_ids: Sequence[int] | None = None) -> KV:
        """The cache as `KV`, sharing memory."""


class BatchLiveCache(Protocol):
    """The cache that a batch of sequences decodes on; see `integrations.hf.batch_cache`."""

    @property
    def stored(self) -> int:
        """Slots for stored positions."""

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""

    def row(self, number: int) -> RowDestination:
        """One row, to be decoded into."""

    def copy_stored(self, source: int, rows: Sequence[int], layer: int, tensor: TensorName, tokens: slice) -> None:
        """Give stored tokens of one row's layer to others."""

    def forget_stored(self, row: int, position: int) -> None:
        """Let a row's stored positions from `position` on not count."""

    def forget_last(self, row: int, tokens: int) -> None:
        """Let a row's last `tokens` tokens not count."""

    def drop_row(self, row: int) -> None:
        """Forget a row; the last one takes its place."""

    def rollback(self, slots: int) -> None:
        """Forget all slots from `slots` on."""


class RowDestination(Protocol):
    """Where one row's stored positions are decoded to."""

    def target(self, layer: int, tensor: TensorName) -> Tensor:
        """The view [H, stop - start, D] of what the row stores of a layer."""
        ...


class DecoderModel(Protocol):
    """A decoder-only model as `draft`, `verify` and `runner` see it."""

    @property
    def identity(self) -> Identity: ...

    @property
    def device(self) -> torch.device:
        """Where its logits are."""

    @property
    def context_tokens(self) -> int | None:
        """The longest sequence it can process, None if unlimited."""

    @property
    def vocab_tokens(self) -> int: ...

    @property
    def eos_token_ids(self) -> frozenset[int]: ...

    def layer_specs(self) -> tuple[LayerShape, ...]: ...

    def new_cache(
        self, tokens: int, new_tokens: int, *, layers: Sequence[LayerSpec] | None = None, rollback_tokens: int = ...
    ) -> LiveCache:
        """Buffers for `tokens` stored tokens (of `layers`, as a cache states them) and `new_tokens` more."""

    def step(self, cache: Any, token_ids: Sequence[int], *, rows: int = 1) -> Tensor:
        """Run `token_ids` after what `cache` holds; logits f32 [rows, V] of the last `rows` positions."""

    def to_text(self, token_ids: Sequence[int]) -> str:
        """Text of `token_ids`, special tokens left out."""


class BatchModel(DecoderModel, Protocol):
    """A model that decodes several sequences together."""

    def new_batch_cache(self, stored: Sequence[Sequence[LayerSpec]], new_slots: int) -> BatchLiveCache:
        """Buffers for rows that store what `stored` says of their layers, and `new_slots` more tokens each."""

    def batch_step(self, cache: Any, token_ids: Sequence[Sequence[int]], *, rows: int = 1) -> Tensor:
        """Run each row's tokens after what `cache` holds; logits f32 [B, rows, V] of the last `rows` positions."""


def prefill(
    model: DecoderModel,
    token_ids: Sequence[int],
    *,
    chunk_tokens: int = CHUNK_TOKENS,
    progress: Callable[[int, int], None] | None = None,
) -> KV:
    """The KV tensors of a prompt, computed chunk by chunk; see `prefill_with_logits`."""
    return prefill_with_logits(model, token_ids, chunk_tokens=chunk_tokens, progress=progress).kv


def prefill_with_logits(
    model: DecoderModel,
    token_ids: Sequence[int],
    *,
    chunk_tokens: int = CHUNK_TOKENS,
    progress: Callable[[int, int], None] | None = None,
) -> Prefilled:
    """The KV tensors of a prompt and the logits of its last position, computed chunk by chunk.

    Beyond the KV itself, memory is bounded by the chunk: no logits but those of one position exist at any time.
    Sliding layers return their last `window` positions.

    Args:
        progress: called with (tokens done, tokens in all) after every chunk.

    Raises:
        InputError: the prompt is empty, longer than the model's context, or has ids outside the vocabulary, or
            `chunk_tokens` is below 1.
    """
    if chunk_tokens < 1:
        raise InputError(f"chunk_tokens is {chunk_tokens}", hint="a prefill step takes at least one token")
    token_ids = listed(token_ids)
    check_prompt(model, token_ids)
    total = len(token_ids)
    cache = model.new_cache(0, total, rollback_tokens=2 * chunk_tokens)
    logits = extend(model, cache, token_ids, chunk_tokens=chunk_tokens, progress=progress)
    return Prefilled(kv=cache.to_kv(token_ids), logits=logits)


def extend(
    model: DecoderModel,
    cache: LiveCache,
    token_ids: Sequence[int],
    *,
    stop: int | None = None,
    chunk_tokens: int = CHUNK_TOKENS,
    progress: Callable[[int, int], None] | None = None,
) -> Tensor:
    """Run those of a prompt's tokens before `stop`, by default all, that `cache` does not hold yet; at least one.

    Returns logits f32 [V] of the last one. `progress` is called with (tokens done, tokens of the prompt).
    """
    stop = len(token_ids) if stop is None else stop
    while cache.tokens < stop:
        end = min(cache.tokens + chunk_tokens, stop)
        logits = model.step(cache, token_ids[cache.tokens : end])
        if progress is not None:
            progress(end, len(token_ids))
    return logits[-1].clone()


def listed(token_ids: Sequence[int]) -> list[int]:
    """Token ids as a list; a tensor or an array of them is one sequence, too."""
    if isinstance(token_ids, Tensor | np.ndarray):
        return list(token_ids.tolist())
    return list(token_ids)


def check_prompt(model: DecoderModel, token_ids: Sequence[int]) -> None:
    """Refuse, with an InputError, a prompt that the model cannot process."""
    if not token_ids:
        raise InputError("the prompt is empty", hint="give at least one token")
    limit = model.context_tokens
    if limit is not None and len(token_ids) > limit:
        raise InputError(
            f"the prompt has {len(token_ids)} tokens, more than the {limit} of the model's context",
            hint="shorten the prompt or use a model with a longer context",
        )
    check_prompt_ids(model, token_ids)


def check_prompt_ids(model: DecoderModel, token_ids: Sequence[int]) -> None:
    """Refuse, with an InputError, token ids that the model does not have."""
    if not all(isinstance(token, Integral) for token in token_ids):
        raise InputError("a token id is not an integer", hint="give one sequence of token ids, without a batch")
    if min(token_ids) < 0 or max(token_ids) >= model.vocab_tokens:
        raise InputError(f"the prompt has token ids outside the model's vocabulary of {model.vocab_tokens}")
