"""Where a run starts: which cached positions stand as fetched, what the model runs after them, and how far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lynxkv.errors import IdentityError, InputError
from lynxkv.fetch import CacheReader
from lynxkv.models import DecoderModel, check_prompt, check_prompt_ids, listed


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A cached prompt and its suffix, placed in the model's context.

    Attributes:
        base: positions before it stay as fetched; the model runs those from it on.
        suffix_ids: what it runs first. Empty: the first new token comes from the logits that the cache stores.
        history: ids of all tokens before the suffix, for samplers that look at them; else empty.
        room_tokens: new tokens that are wanted and fit.
    """

    base: int
    suffix_ids: list[int]
    history: list[int]
    room_tokens: int


def place(
    reader: CacheReader,
    model: DecoderModel,
    suffix_ids: Sequence[int],
    *,
    max_new_tokens: int,
    needs_history: bool,
    use_logits: bool,
) -> Prompt:
    """Place `suffix_ids` after the cache. If there are none, its logits are used if allowed, else its last token is run
    again.

    Raises:
        InputError: the cache does not start at 0, the suffix cannot be run, there is no room, or hidden token ids would
            be needed.
        IdentityError: logits are over another vocabulary than the model's.
    """
    extent = reader.extent
    if extent.start:
        raise InputError(f"the cache starts at position {extent.start}", hint="give one that starts at 0")
    base, suffix = extent.stop, listed(suffix_ids)
    run_last_again = not suffix and not (use_logits and _has_logits(reader, model))
    history = _cached_ids(reader) if needs_history or run_last_again else []
    if history:
        check_prompt_ids(model, history)
    if run_last_again:
        base, history, suffix = base - 1, history[:-1], history[-1:]
    if suffix:
        check_prompt(model, suffix)
    return Prompt(
        base=base,
        suffix_ids=suffix,
        history=history,
        room_tokens=_room(model, max_new_tokens, base, len(suffix)),
    )


def _room(model: DecoderModel, max_new_tokens: int, cached_tokens: int, suffix_tokens: int) -> int:
    if max_new_tokens < 1 or max_new_tokens != int(max_new_tokens):
        raise InputError(f"max_new_tokens is {max_new_tokens}", hint="ask for a whole number of tokens, at least one")
    limit = model.context_tokens
    if limit is None:
        return max_new_tokens
    room = limit - cached_tokens - suffix_tokens
    if room < 1:
        raise InputError(
            f"{cached_tokens} cached tokens and a suffix of {suffix_tokens} leave no room in the model's "
            f"context of {limit}",
            hint="shorten the suffix or encode a shorter prompt",
        )
    return min(max_new_tokens, room)


def _has_logits(reader: CacheReader, model: DecoderModel) -> bool:
    tokens = reader.extent.logits_tokens
    if tokens is not None and tokens != model.vocab_tokens:
        raise IdentityError(
            f"the cache's logits are over {tokens} tokens, the model's vocabulary has {model.vocab_tokens}",
            field="logits.tokens",
            hint="use the model that the cache was made with",
        )
    return tokens is not None


def _cached_ids(reader: CacheReader) -> list[int]:
    ids = reader.token_ids()
    if ids is None:
        raise InputError(
            "the cache does not store its token ids, which an empty suffix and a repetition penalty need",
            hint="give a suffix and no repetition penalty, or encode the cache with its token ids",
        )
    return [int(token) for token in ids]
