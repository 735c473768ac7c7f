"""Proposing tokens on a cache that is still being refined. Knows neither models nor caches: a step is a function."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from lynxkv.errors import InputError
from lynxkv.sampling import Sampling, draw

# A suffix runs in pieces, so that the arrival of what is waited for can cut it short.
SUFFIX_CHUNK_TOKENS = 64
# Bounds the memory of a draft's distributions, and of the logits and distributions of its verification.
DRAFT_BYTES = 256 << 20
Speculate = Literal["auto", "off"] | int
Step = Callable[[Sequence[int]], Tensor]
"""Runs token ids after what the cache holds; logits f32 [1, V] of the last one's position."""


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
    step: Step,
    pending_ids: Sequence[int],
    draft: Draft,
    *,
    logits: Tensor | None = None,
    eos_token_ids: frozenset[int],
    history: Sequence[int],
    sampling: Sampling,
    generator: torch.Generator,
    max_tokens: int,
    go_on: Callable[[int], bool],
) -> Iterator[int]:
    """Run `pending_ids`, then append tokens to `draft` until it has `max_tokens`, yielding each.

    Ends early after an end-of-text token, or when `go_on` says no. It is called before every model step with the number
    of tokens that the next proposal still waits for; this is where the caller refines the cache.

    Args:
        pending_ids: what the cache lacks: the suffix, or the last token of a draft that goes on.
        logits: f32 [1, V] of the last position, where all of the suffix has been run already: nothing is pending.
        history: ids of all tokens before the draft, as `Sampling.distribution` wants them.
    """
    if not pending_ids and not go_on(0):
        return
    while len(draft.token_ids) < max_tokens and not draft.ended(eos_token_ids):
        for start in range(0, len(pending_ids), SUFFIX_CHUNK_TOKENS):
            if not go_on(len(pending_ids) - start):
                return
            logits = step(pending_ids[start : start + SUFFIX_CHUNK_TOKENS])
        assert logits is not None
        q = sampling.distribution(logits[0], [*history, *draft.token_ids] if sampling.needs_history else [])
        token = draw(q, generator)
        draft.token_ids.append(token)
        draft.q.append(q)
        yield token
        pending_ids = [token]


def draft_tokens(speculate: object, bytes_per_token: int) -> int:
    """The most tokens that the option `speculate` lets a draft have, and `DRAFT_BYTES` its distributions.

    Raises:
        InputError: it is no such option.
    """
    most = DRAFT_BYTES // bytes_per_token
    if speculate == "auto":
        return most
    if speculate == "off":
        return 0
    if not isinstance(speculate, int) or speculate < 1:
        raise InputError(f"speculate is {speculate!r}", hint="use auto, off, or a number of tokens")
    return min(speculate, most)
