"""When drafting pays: estimates of a run's speeds, and what one more draft token costs and gains.

While the Residual is in flight the model is idle, so a draft token costs nothing until it delays the end of the
verification pass. That pass runs layer by layer behind the last tensors of the Residual. A token gains a step of plain
decoding, if it and all before it pass; one that hardly ever would is not proposed even where it costs nothing.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field

from lynxkv.layout import Precision

# Pseudo-counts of passed and failed tokens, from drafts of `default` on real documents: see docs/codec-notes.md. What
# passed the full cache nearly always passes the exact one.
PRIOR: dict[Precision, tuple[float, float]] = {"full": (24.0, 1.0), "exact": (199.0, 1.0)}
# Share of the newest step in the running mean of step times.
NEWEST = 0.3
# A verification as bad as this, or worse, is this unlikely if the estimate is right. Shorter drafts say too little.
SURPRISE = 0.01
LEAST_DRAFT = 8
# Shares of a probability that do not count.
NEGLIGIBLE = 1e-16
# A token less likely to stand than this is not proposed. Its step would keep cores from decoding what arrives, and
# somebody may watch it be struck through.
LEAST_CHANCE = 0.02
# What is left of what was known after a run that did not draft because of it.
REMEMBERED = 7 / 8


@dataclass
class Pace:
    """What is known of a model's speed and of how its drafts fare. Keep one per model and codec to learn over runs.

    Attributes:
        token_s: seconds of a model step on one token; None before the first.
        row_s: seconds that one more token adds to a step.
    """

    token_s: float | None = None
    row_s: float = 0.0
    _refuted: set[Precision] = field(default_factory=set)
    _passed: dict[Precision, float] = field(default_factory=lambda: defaultdict(float))
    _failed: dict[Precision, float] = field(default_factory=lambda: defaultdict(float))
    _long_step: tuple[int, float] | None = None

    def stepped(self, tokens: int, seconds: float) -> None:
        """A model step on this many tokens has taken so long."""
        if tokens == 1:
            self.token_s = seconds if self.token_s is None else (1 - NEWEST) * self.token_s + NEWEST * seconds
        else:
            self._long_step = tokens, seconds
        if self.token_s is not None and self._long_step is not None:
            tokens, seconds = self._long_step
            self.row_s = min(max(0.0, seconds - self.token_s) / (tokens - 1), self.token_s)

    def verified(self, target: Precision, drafted: int, agreed: float) -> None:
        """A cache of this precision agrees with so many tokens of a draft, each with those before it taken for granted:
        `verify.agreement`. One that the estimate makes unlikely shows that the prior is not of this codec."""
        if self.is_poor(target, drafted, agreed):
            self._refuted.add(target)
        self._passed[target] += agreed
        self._failed[target] += drafted - agreed

    def waited(self, target: Precision) -> None:
        """A run has not drafted, since hardly a token had passed: what is known grows old, and is tried again then."""
        self._passed[target] *= REMEMBERED
        self._failed[target] *= REMEMBERED

    def acceptance(self, target: Precision) -> float:
        """The probability that a token passes, if those before it do."""
        passed, failed = PRIOR[target]
        if target in self._refuted:  # no more than a token's worth
            passed, failed = passed / (passed + failed), failed / (passed + failed)
        passed, failed = passed + self._passed[target], failed + self._failed[target]
        return passed / (passed + failed)

    def pays(
        self, target: Precision, *, drafted: int, pending: int, suffix: int, left_s: float, tail_s: float = 0.0
    ) -> bool:
        """Whether to propose one more token after `drafted` ones. Before a step has been timed, yes.

        Args:
            pending: tokens that have to be run for it, perhaps none.
            suffix: tokens that the verification pass runs before the draft.
            left_s: seconds until the target cache is complete.
            tail_s: the last part of that, which a pass can run behind.
        """
        chance = self.acceptance(target) ** (drafted + 1)
        if chance < LEAST_CHANCE:
            return False
        if self.token_s is None:
            return True
        step_s = self._step_s(pending)
        now_s = _verified_s(0.0, self._step_s(suffix + drafted), left_s, tail_s)
        later_s = _verified_s(step_s, self._step_s(suffix + drafted + 1), left_s, tail_s)
        return chance * self.token_s > later_s - now_s

    def _step_s(self, tokens: int) -> float:
        assert self.token_s is not None
        return self.token_s + (tokens - 1) * self.row_s if tokens else 0.0

    def is_hopeless(self, target: Precision) -> bool:
        """Whether so little has passed that not even one token is proposed: waiting is all that is left."""
        return self.acceptance(target) < LEAST_CHANCE

    def is_poor(self, target: Precision, drafted: int, agreed: float) -> bool:
        """Whether a verification (see `verified`) came out worse than the estimate before it makes likely."""
        if drafted < LEAST_DRAFT:
            return False
        return at_most(round(agreed), drafted, self.acceptance(target)) < SURPRISE


def at_most(most: int, tokens: int, passes: float) -> float:
    """The probability that no more than `most` of `tokens` pass, each with a probability `passes` between 0 and 1."""
    if most >= tokens:
        return 1.0
    if most > tokens * passes:  # by those that fail, of which there are few then
        return 1.0 - at_most(tokens - most - 1, tokens, 1 - passes)
    # The likeliest of these outcomes is the last one; those before it are ever smaller shares of it.
    share, shares = 1.0, 0.0
    for count in range(most, -1, -1):
        shares += share
        share *= count / (tokens - count + 1) * (1 - passes) / passes
        if share < NEGLIGIBLE * shares:
            break
    ways = math.lgamma(tokens + 1) - math.lgamma(most + 1) - math.lgamma(tokens - most + 1)
    return math.exp(ways + most * math.log(passes) + (tokens - most) * math.log1p(-passes) + math.log(shares))


def _verified_s(begin_s: float, pass_s: float, left_s: float, tail_s: float) -> float:
    """When a pass ends that may begin now or later: not before what it runs behind, nor before the target is there."""
    return max(left_s, max(begin_s, left_s - tail_s) + pass_s)
