"""The acceptance rule of speculative sampling: drafted tokens in, tokens of the target distribution out.

A draft token x, drawn from q, is accepted with probability min(1, p(x) / q(x)). The first rejected one is replaced by
a draw from max(0, p - q), renormalised; after full acceptance one more token is drawn from p. The text then follows p
exactly, whatever q was. For greedy decoding p and q are one-hot, and the rule is: keep the draft while it agrees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lynxkv.sampling import draw


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """`accepted` draft tokens stand, and `next_token` follows them."""

    accepted: int
    next_token: int


def accept(
    token_ids: Sequence[int],
    q: Sequence[Tensor],
    p: Callable[[int], Tensor],
    generator: torch.Generator,
) -> Acceptance:
    """Apply the rule to a draft; an empty draft gives one token from p.

    Args:
        token_ids: the n draft tokens.
        q: for each, the distribution [V] that it was drawn from.
        p: p(i) is the target distribution [V] after i draft tokens, 0 <= i <= n; asked for in order, as far as needed.
        generator: the run's source of randomness, on the device of the distributions.
    """
    for position, token in enumerate(token_ids):
        target, drafted = p(position), q[position]
        # u * q < p has probability min(1, p / q), without a division.
        u = torch.rand((), generator=generator, device=target.device)
        if u * drafted[token] < target[token]:
            continue
        return Acceptance(accepted=position, next_token=draw(_residual(target, drafted), generator))
    return Acceptance(accepted=len(token_ids), next_token=draw(p(len(token_ids)), generator))


def agreement(q: Sequence[Tensor], p: Iterable[Tensor]) -> float:
    """How many draft tokens a target is likely to accept, were each judged with those before it taken for granted.

    A draft that fails early may be nearly right or wrong everywhere: `accept` cannot tell, and this can. A token drawn
    from q is accepted with probability sum(min(p, q)).

    Args:
        q: for each draft token, the distribution [V] that it was drawn from.
        p: for each, the target distribution [V] after the draft before it.
    """
    return sum(float(torch.minimum(target, drafted).sum()) for target, drafted in zip(p, q, strict=True))


def _residual(p: Tensor, q: Tensor) -> Tensor:
    """What p has over q, renormalised; p itself where rounding leaves nothing."""
    excess = (p - q).clamp(min=0)
    total = excess.sum()
    return excess / total if total > 0 else p
