"""The acceptance rule: sampled text follows the target's distribution, whatever the draft's was.

A Markov chain over 12 tokens stands for the model: next-token logits depend on the last token, and through the
repetition penalty on all of them. Texts of three tokens are drawn by draft and verification and compared, all 1,728
of them at once, with their exact probabilities.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from lynxkv import verify
from lynxkv.sampling import Sampling, draw
from lynxkv.testing.statistics import chi_square_z
from lynxkv.verify import accept, agreement

VOCAB, LENGTH, TEXTS = 12, 3, 8000
Z = 4.0
PROMPT = [0, 4]
SAMPLINGS = {
    "plain": Sampling(temperature=1.0),
    "top-p": Sampling(temperature=0.9, top_p=0.8),
    "penalty": Sampling(temperature=1.2, repetition_penalty=1.6),
    "all": Sampling(temperature=0.8, top_p=0.85, repetition_penalty=1.5),
}

Chain = Callable[[Sequence[int]], Tensor]


def chain(seed: int, sampling: Sampling, noise: float = 0.0) -> Chain:
    """history -> next-token distribution; chains of one seed differ by `noise` in their logits."""
    table = 1.5 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed))
    table = table + noise * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed + 1000))
    known: dict[tuple[int, frozenset[int]], Tensor] = {}

    def next_token(history: Sequence[int]) -> Tensor:
        key = (history[-1], frozenset(history))
        if key not in known:
            known[key] = sampling.distribution(table[history[-1]], history)
        return known[key]

    return next_token


def exact(p: Chain) -> dict[tuple[int, ...], float]:
    out = {}
    for text in itertools.product(range(VOCAB), repeat=LENGTH):
        probability = 1.0
        for position, token in enumerate(text):
            probability *= float(p([*PROMPT, *text[:position]])[token])
        out[text] = probability
    return out


def after(p: Chain, drafted: Sequence[int]) -> Callable[[int], Tensor]:
    return lambda count: p([*PROMPT, *drafted[:count]])


def texts(p: Chain, q: Chain, draft_tokens: int, seed: int) -> Counter[tuple[int, ...]]:
    """Draft, verify, continue: the runner's use of the rule."""
    generator = torch.Generator().manual_seed(seed)
    counts: Counter[tuple[int, ...]] = Counter()
    for _ in range(TEXTS):
        drafted: list[int] = []
        distributions = []
        for _ in range(draft_tokens):
            distributions.append(q([*PROMPT, *drafted]))
            drafted.append(draw(distributions[-1], generator))
        outcome = accept(drafted, distributions, after(p, drafted), generator)
        text = [*drafted[: outcome.accepted], outcome.next_token]
        while len(text) < LENGTH:
            text.append(draw(p([*PROMPT, *text]), generator))
        counts[tuple(text[:LENGTH])] += 1
    return counts


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("draft_tokens", [0, 1, 2, 3])
def test_texts_follow_the_target(name: str, draft_tokens: int) -> None:
    p, q = chain(1, SAMPLINGS[name]), chain(1, SAMPLINGS[name], noise=1.0)
    assert chi_square_z(texts(p, q, draft_tokens, seed=5), exact(p)) < Z


def test_texts_follow_the_target_when_the_draft_is_unrelated() -> None:
    p, q = chain(1, SAMPLINGS["all"]), chain(2, SAMPLINGS["all"])
    assert chi_square_z(texts(p, q, 2, seed=6), exact(p)) < Z


def test_the_test_can_tell_the_draft_from_the_target() -> None:
    p, q = chain(1, SAMPLINGS["plain"]), chain(1, SAMPLINGS["plain"], noise=0.4)
    assert chi_square_z(texts(q, q, 2, seed=5), exact(p)) > 2 * Z


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(lambda p, q: p, id="resample from p"),
        pytest.param(lambda p, q: q, id="resample from q"),
        pytest.param(lambda p, q: (p - q).abs() / (p - q).abs().sum(), id="absolute difference"),
    ],
)
def test_a_wrong_residual_distribution_is_caught(
    wrong: Callable[[Tensor, Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "_residual", wrong)
    p, q = chain(1, SAMPLINGS["plain"]), chain(1, SAMPLINGS["plain"], noise=1.0)
    assert chi_square_z(texts(p, q, 2, seed=5), exact(p)) > 2 * Z


def test_a_history_that_forgets_the_draft_is_caught() -> None:
    p, q = chain(1, SAMPLINGS["penalty"]), chain(1, SAMPLINGS["penalty"], noise=1.0)

    def forgetful(history: Sequence[int]) -> Tensor:
        return p(history[-1:])

    assert chi_square_z(texts(forgetful, q, 2, seed=5), exact(p)) > 2 * Z


def one_hot(token: int) -> Tensor:
    return torch.eye(VOCAB)[token]


@pytest.mark.parametrize("agreed", range(5))
def test_greedy_keeps_the_draft_while_it_agrees(agreed: int) -> None:
    target, drafted = [3, 1, 4, 1, 5], [3, 1, 4, 1]
    if agreed < 4:
        drafted[agreed] = 9
    outcome = accept(drafted, [one_hot(token) for token in drafted], lambda n: one_hot(target[n]), torch.Generator())
    assert (outcome.accepted, outcome.next_token) == (agreed, target[agreed])


def test_target_is_asked_only_as_far_as_needed() -> None:
    asked = []

    def p(count: int) -> Tensor:
        asked.append(count)
        return one_hot(0)

    accept([0, 7, 0], [one_hot(0), one_hot(7), one_hot(0)], p, torch.Generator())
    assert asked == [0, 1]


def test_an_empty_draft_gives_one_token_of_the_target() -> None:
    outcome = accept([], [], lambda n: one_hot(6), torch.Generator())
    assert (outcome.accepted, outcome.next_token) == (0, 6)


def test_agreement_counts_what_each_position_would_accept() -> None:
    one, other = torch.eye(VOCAB)[3], torch.eye(VOCAB)[4]
    # Greedy: a draft that fails at once, and is right everywhere else.
    assert agreement([one, one, other, one], [other, one, other, one]) == 3
    assert agreement([], []) == 0
    p, q = chain(1, SAMPLINGS["plain"])(PROMPT), chain(1, SAMPLINGS["plain"], noise=1.0)(PROMPT)
    generator = torch.Generator().manual_seed(2)
    accepted = sum(accept([draw(q, generator)], [q], lambda count: p, generator).accepted for _ in range(4000))
    assert accepted / 4000 == pytest.approx(agreement([q], [p]), abs=0.03)
    assert 0.3 < agreement([q], [p]) < 0.95
