"""The measures on inputs whose answer is known."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from lynxkv.bench.measure import (
    accepted_length,
    continue_greedily,
    empty_cache,
    live_cache,
    make_reference,
    measure,
    rounded,
)
from lynxkv.bench.stats import bootstrap, difference, mean, ratio
from lynxkv.integrations.hf import Model
from lynxkv.models import prefill
from lynxkv.testing.tiny_models import tiny_model

TOKENS = [3 + (7 * number) % 40 for number in range(60)]


@pytest.mark.parametrize(
    ("choices", "target", "accepted"),
    [([5, 6, 7], [5, 6, 7], 3), ([5, 9, 7], [5, 6, 7], 1), ([9, 6, 7], [5, 6, 7], 0), ([5], [5], 1)],
)
def test_a_draft_is_accepted_up_to_its_first_mismatch(choices: list[int], target: list[int], accepted: int) -> None:
    logits = torch.zeros(len(choices), 10)
    logits[torch.arange(len(choices)), torch.tensor(choices)] = 1
    assert accepted_length(logits, target) == accepted


def draft_step_by_step(model: Model, cache: object, suffix_ids: list[int], count: int) -> list[int]:
    out: list[int] = []
    step = suffix_ids
    for _ in range(count):
        out.append(int(model.step(cache, step)[0].argmax()))
        step = out[-1:]
    return out


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_one_pass_finds_what_drafting_token_by_token_finds(family: str) -> None:
    model = tiny_model(family)
    kv = prefill(model, TOKENS[:40])
    reference = make_reference(model, kv, TOKENS[40:50], ["w7 w9", "w11", "w3 w3 w5"], draft_tokens=12)
    noise = torch.Generator().manual_seed(0)
    cache = empty_cache(model, reference.kv, reference.room_tokens)
    for number, layer in enumerate(reference.kv.layers):
        for name, tensor in layer.tensors.items():
            exact = tensor.float()
            cache.target(number, name).copy_(exact + 0.2 * exact.std() * torch.randn(exact.shape, generator=noise))
    found = measure(model, cache, reference).accepted
    tokens = cache.tokens
    for prompt, accepted in zip(reference.prompts, found, strict=True):
        draft = draft_step_by_step(model, cache, prompt.suffix_ids, len(prompt.target_ids))
        cache.rollback(tokens)
        same = [ours == theirs for ours, theirs in zip(draft, prompt.target_ids, strict=True)]
        assert accepted == (same.index(False) if False in same else len(same))


@pytest.mark.parametrize("held", [0, 1, 5, 8])
def test_a_guess_changes_nothing_but_the_way(held: int) -> None:
    model = replace(tiny_model("mistral"), eos_token_ids=frozenset())
    cache = live_cache(model, rounded(prefill(model, TOKENS[:40])), 20)
    plain = continue_greedily(model, cache, [5, 6], 8)
    assert len(plain) == 8
    cache.rollback(40)
    wrong = [3 if token != 3 else 4 for token in plain]
    assert continue_greedily(model, cache, [5, 6], 8, guess=[*plain[:held], *wrong[held:]]) == plain
    cache.rollback(40)
    assert continue_greedily(model, cache, [5, 6], 8, guess=plain[:held]) == plain


OWN_ATTENTION: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("gemma2", {"query_pre_attn_scalar": 32, "attn_logit_softcapping": 0.5, "attn_implementation": "eager"}),
    ("gemma3", {"query_pre_attn_scalar": 32}),
]


@pytest.mark.parametrize(("family", "settings"), OWN_ATTENTION)
def test_the_original_is_at_no_distance_from_itself(family: str, settings: dict[str, Any]) -> None:
    model = tiny_model(family, **settings)
    reference = make_reference(model, prefill(model, TOKENS[:40]), TOKENS[40:50], ["w7 w9", "w11"], draft_tokens=8)
    cache = empty_cache(model, reference.kv, reference.room_tokens)
    for number, layer in enumerate(reference.kv.layers):
        for name, tensor in layer.tensors.items():
            cache.target(number, name).copy_(tensor)
    found = measure(model, cache, reference)
    assert found.accepted == [len(prompt.target_ids) for prompt in reference.prompts]
    assert all(layer.k[0] == layer.v[0] == layer.attention[0] == 0 for layer in found.layers)
    assert all(layer.k[1] > 0 and layer.v[1] > 0 and layer.attention[1] > 0 for layer in found.layers)
    assert all(found.agrees)
    assert found.gap == [0.0] * 10
    assert found.kl == pytest.approx([0.0] * 10, abs=1e-5)


@pytest.mark.parametrize(("family", "settings"), OWN_ATTENTION)
def test_errors_divergence_and_gaps_of_a_disturbed_cache(family: str, settings: dict[str, Any]) -> None:
    model = tiny_model(family, **settings)
    reference = make_reference(model, prefill(model, TOKENS[:40]), TOKENS[40:50], ["w7"], draft_tokens=8)
    cache = empty_cache(model, reference.kv, reference.room_tokens)
    for number, layer in enumerate(reference.kv.layers):
        for name, tensor in layer.tensors.items():
            cache.target(number, name).copy_(tensor.float() * (1.5 if name == "v" else 1.0))
    found = measure(model, cache, reference)
    for error in found.layers:
        assert error.k[0] == 0
        assert error.v[0] / error.v[1] == pytest.approx(0.25)
        assert error.attention[0] / error.attention[1] == pytest.approx(0.25)
    assert all(kl > 0 for kl in found.kl)
    assert all((gap == 0) == agrees for gap, agrees in zip(found.gap, found.agrees, strict=True))


def test_the_bootstrap_interval_of_a_mean_is_that_of_theory() -> None:
    values = np.random.default_rng(1).normal(10, 2, size=400)
    interval = bootstrap([values[:, None]], mean)
    assert interval is not None
    assert interval.value == pytest.approx(values.mean())
    half = 1.96 * values.std() / math.sqrt(len(values))
    assert interval.low == pytest.approx(values.mean() - half, abs=0.02)
    assert interval.high == pytest.approx(values.mean() + half, abs=0.02)


def test_strata_do_not_mix() -> None:
    # All the spread is between the strata, so resampling within them finds none.
    interval = bootstrap([np.full((5, 1), 1.0), np.full((15, 1), 9.0)], mean)
    assert interval is not None
    assert (interval.low, interval.value, interval.high) == pytest.approx((7.0, 7.0, 7.0))


def test_pairs_stay_together() -> None:
    base = np.random.default_rng(2).uniform(5, 30, size=50)
    shifted = bootstrap([np.stack([base + 3, base], 1)], difference)
    doubled = bootstrap([np.stack([base * 2, base], 1)], ratio)
    assert shifted is not None
    assert doubled is not None
    assert (shifted.low, shifted.value, shifted.high) == pytest.approx((3.0, 3.0, 3.0))
    assert (doubled.low, doubled.value, doubled.high) == pytest.approx((2.0, 2.0, 2.0))


def test_the_bootstrap_repeats_itself_and_knows_when_there_is_no_answer() -> None:
    units = np.random.default_rng(3).uniform(size=(20, 2))
    assert bootstrap([units], ratio) == bootstrap([units], ratio)
    units[:, 1] = 0
    assert bootstrap([units], ratio) is None
