"""From logits to a distribution, the same function for the draft (q) and for the verification (p)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lynxkv.errors import InputError, NonFiniteError
from lynxkv.events import TokenLogprobs

# The least positive option value that f32 arithmetic on logits bears.
SMALLEST = 1e-6


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are chosen. Temperature 0 is greedy, and then top-p and the seed have no effect.

    Raises:
        InputError: a value is out of range.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        # Smaller numbers would over- or underflow f32 on the way to a distribution.
        if not (self.temperature == 0 or (math.isfinite(self.temperature) and self.temperature >= SMALLEST)):
            raise InputError(f"temperature is {self.temperature}", hint=f"use 0 for greedy, or {SMALLEST} and above")
        if not SMALLEST <= self.top_p <= 1:
            raise InputError(f"top_p is {self.top_p}", hint=f"use a number from {SMALLEST} to 1")
        if not SMALLEST <= self.repetition_penalty <= 1 / SMALLEST:
            raise InputError(
                f"repetition_penalty is {self.repetition_penalty}", hint="use a positive number; 1 is none"
            )
        if not -(2**63) <= self.seed < 2**63:
            raise InputError(f"seed is {self.seed}", hint="use an integer of 64 bits")

    @property
    def needs_history(self) -> bool:
        """Whether the distribution depends on earlier tokens other than through the logits."""
        return self.repetition_penalty != 1.0

    def generator(self, device: torch.device | str = "cpu") -> torch.Generator:
        """The one source of randomness of a run; draft and verification must share it, never restart it."""
        return torch.Generator(device).manual_seed(self.seed)

    def distribution(self, logits: Tensor, history: Sequence[int]) -> Tensor:
        """Probabilities f32 [V] of the next token.

        Order: repetition penalty, temperature, top-p. Greedy gives a one-hot distribution.

        Args:
            logits: [V], of the position before the token.
            history: ids of all tokens before it, the cached prompt included; read only if `needs_history`.

        Raises:
            NonFiniteError: a logit is NaN or +infinity, or all are -infinity: no token follows from them.
        """
        scores = logits.float()
        if self.needs_history:
            scores = self._penalised(scores, history)
        best = scores.argmax()  # a NaN counts as the highest
        highest = scores[best]
        if not math.isfinite(highest):
            raise NonFiniteError(
                "the model's logits are not finite",
                hint="load the model in float32 or bfloat16: float16 overflows in some models",
            )
        if self.temperature == 0:
            greedy = torch.zeros_like(scores)
            greedy[best] = 1.0
            return greedy
        # Shifted first, so that a tiny temperature gives -inf instead of an overflow.
        probabilities = torch.softmax((scores - highest) / self.temperature, dim=-1)
        return self._nucleus(probabilities) if self.top_p < 1 else probabilities

    def _penalised(self, scores: Tensor, history: Sequence[int]) -> Tensor:
        """Scores of tokens seen before, moved towards less likely: divided if positive, multiplied if negative."""
        seen = torch.tensor(sorted(set(history)), dtype=torch.long, device=scores.device)
        old = scores[seen]
        penalty = self.repetition_penalty
        return scores.scatter(0, seen, torch.where(old > 0, old / penalty, old * penalty))

    def _nucleus(self, probabilities: Tensor) -> Tensor:
        """The fewest most likely tokens whose sum reaches top_p, renormalised."""
        # All tokens below this together are less than what is left out, and most of a vocabulary need not be sorted.
        floor = (1 - self.top_p) / (2 * len(probabilities))
        likely = (probabilities > floor).nonzero()[:, 0]
        ordered, order = probabilities[likely].sort(descending=True, stable=True)
        before = ordered.cumsum(0) - ordered
        kept = torch.where(before < self.top_p, ordered, 0.0)
        return torch.zeros_like(probabilities).scatter(0, likely[order], kept / kept.sum())


def logprobs(logits: Tensor, token_id: int, top: int) -> TokenLogprobs:
    """Log probabilities of a token and of the `top` likeliest, from the logits [V] of the position before it.

    They are the model's own: no sampling option has a part in them.
    """
    values = logits.float().log_softmax(-1)
    best, ids = values.topk(min(top, len(values)))
    return TokenLogprobs(token_id, float(values[token_id]), list(zip(ids.tolist(), best.tolist(), strict=True)))


def draw(probabilities: Tensor, generator: torch.Generator) -> int:
    """One token id from a distribution [V]: the first at which its sums pass a number between 0 and their last."""
    sums = probabilities.cumsum(0, dtype=torch.float64)
    u = torch.rand((), generator=generator, dtype=torch.float64, device=probabilities.device)
    return int(torch.searchsorted(sums, u * sums[-1], right=True))
