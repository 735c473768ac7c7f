from __future__ import annotations

from collections import Counter

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor, TemperatureLogitsWarper, TopPLogitsWarper

from lynxkv.errors import InputError, NonFiniteError
from lynxkv.sampling import Sampling, draw
from lynxkv.testing.statistics import chi_square_z


def logits(seed: int, size: int = 40) -> torch.Tensor:
    return 3 * torch.randn(size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("top_p", [0.2, 0.9, 1.0])
@pytest.mark.parametrize("penalty", [0.8, 1.0, 1.4])
def test_distribution_is_that_of_transformers(seed: int, temperature: float, top_p: float, penalty: float) -> None:
    x, history = logits(seed), [3, 5, 5, 39]
    sampling = Sampling(temperature=temperature, top_p=top_p, repetition_penalty=penalty)
    scores = x[None]
    scores = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([history]), scores)
    scores = TemperatureLogitsWarper(temperature)(None, scores)
    scores = TopPLogitsWarper(top_p)(None, scores)
    torch.testing.assert_close(sampling.distribution(x, history), torch.softmax(scores[0], -1))


def test_greedy_is_one_hot_after_the_penalty() -> None:
    x = torch.tensor([1.0, 3.0, 2.9, -1.0])
    assert Sampling().distribution(x, [1]).tolist() == [0, 1, 0, 0]
    assert Sampling(repetition_penalty=1.5).distribution(x, [1]).tolist() == [0, 0, 1, 0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [[0.0, float("nan"), 2.0], [float("inf"), 0.0], [float("-inf")] * 3])
def test_logits_that_no_token_follows_from_are_refused(bad: list[float], temperature: float) -> None:
    with pytest.raises(NonFiniteError, match="logits"):
        Sampling(temperature=temperature).distribution(torch.tensor(bad), [])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_masked_tokens_are_never_drawn(temperature: float) -> None:
    p = Sampling(temperature=temperature).distribution(torch.tensor([float("-inf"), 0.0, float("-inf")]), [])
    assert p.tolist() == [0, 1, 0]


def test_ties_go_to_the_first_token() -> None:
    assert Sampling().distribution(torch.tensor([0.0, 2.0, 2.0]), []).argmax() == 1


def test_top_p_keeps_the_most_likely_token_however_small_it_is() -> None:
    p = Sampling(temperature=1.0, top_p=1e-6).distribution(logits(0), [])
    assert p.max() == 1
    assert draw(p, torch.Generator()) == int(p.argmax())


def test_a_tiny_temperature_is_greedy_and_finite() -> None:
    p = Sampling(temperature=1e-6).distribution(logits(1), [])
    assert p[logits(1).argmax()] == 1
    assert p.sum() == 1


def test_logits_are_left_alone() -> None:
    x = logits(2)
    before = x.clone()
    Sampling(temperature=0.7, top_p=0.5, repetition_penalty=1.3).distribution(x, [1, 2])
    assert torch.equal(x, before)


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": float("inf")},
    ],
)
def test_values_out_of_range_are_refused(values: dict[str, float]) -> None:
    with pytest.raises(InputError) as caught:
        Sampling(**values)  # type: ignore[arg-type]
    assert next(iter(values)) in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize("temperature", [0.3, 1.0, 4.0])
@pytest.mark.parametrize("top_p", [0.5, 0.95, 0.9999])
def test_a_nucleus_of_many_tokens_is_that_of_sorting_them_all(temperature: float, top_p: float) -> None:
    """With ties, of which the first are kept."""
    x = logits(7, 5000).round(decimals=1)
    ordered, order = torch.softmax(x / temperature, -1).sort(descending=True, stable=True)
    count = int((ordered.cumsum(0) - ordered < top_p).sum())
    p = Sampling(temperature=temperature, top_p=top_p).distribution(x, [])
    assert p.nonzero()[:, 0].tolist() == sorted(order[:count].tolist())
    torch.testing.assert_close(p[order[:count]], ordered[:count] / ordered[:count].sum())


def test_draws_follow_the_distribution_and_nothing_else() -> None:
    p = torch.tensor([0.0, 0.1, 0.0, 0.4, 1e-3, 0.499, 0.0])
    generator = torch.Generator().manual_seed(3)
    counts = Counter(draw(p, generator) for _ in range(20_000))
    assert set(counts) == {1, 3, 4, 5}
    assert chi_square_z(counts, dict(enumerate(p.tolist()))) < 4


@pytest.mark.parametrize("u", [0.0, 1 - 2.0**-53])
def test_what_is_drawn_can_be_drawn(u: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """At both ends of the numbers that are drawn, whatever the last sum rounds to."""
    monkeypatch.setattr(torch, "rand", lambda *_, **__: torch.tensor(u, dtype=torch.float64))
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        p = torch.softmax(torch.randn(50, generator=generator), 0)
        p[[0, 1, 48, 49]] = 0
        assert p[draw(p / p.sum(), generator)] > 0
