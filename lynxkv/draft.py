"""Proposing tokens on a cache that is still being refined."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lynxkv.models import DecoderModel, LiveCache
from lynxkv.sampling import Sampling, draw

# A suffix runs in pieces, so that the arrival of what is waited for can cut it short.
SUFFIX_CHUNK_TOKENS = 64


@dataclass
class Draft:
    """Proposed tokens, each with the distribution [V] that it was drawn from."""

    token_ids: list[int] = field(default_factory=list)
    q: list[Tensor] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes of the distributions."""
        return sum(distribution.nbytes for distribution in self.q)

    def ended(self, eos_token_ids: frozenset[int]) -> bool:
        """Whether the last token ends the text."""
        return bool(self.token_ids) and self.token_ids[-1] in eos_token_ids


def propose(
    model: DecoderModel,
    cache: LiveCache,
    pending_ids: Sequence[int],
    draft: Draft,
    *,
    history: Sequence[int],
    sampling: Sampling,
    generator: torch.Generator,
    max_tokens: int,
    go_on: Callable[[], bool],
) -> Iterator[int]:
    """Run `pending_ids` on `cache`, then append tokens to `draft` until it has `max_tokens`, yielding each.

    Ends early after an end-of-text token, or when `go_on`, called before every model step, says no: this is where the
    caller refines the cache.

    Args:
        pending_ids: what the cache lacks: the suffix, or the last token of a draft that goes on.
        history: ids of all tokens before the draft, as `Sampling.distribution` wants them.
    """
    while len(draft.token_ids) < max_tokens and not draft.ended(model.eos_token_ids):
        for start in range(0, len(pending_ids), SUFFIX_CHUNK_TOKENS):
            if not go_on():
                return
            logits = model.step(cache, pending_ids[start : start + SUFFIX_CHUNK_TOKENS])
        q = sampling.distribution(logits[0], [*history, *draft.token_ids] if sampling.needs_history else [])
        token = draw(q, generator)
        draft.token_ids.append(token)
        draft.q.append(q)
        yield token
        pending_ids = [token]
