from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch

from lynxkv.draft import SUFFIX_CHUNK_TOKENS, Draft, propose
from lynxkv.integrations.hf import Model
from lynxkv.sampling import Sampling
from lynxkv.testing.tiny_models import tiny_model


@pytest.fixture
def model() -> Model:
    return dataclasses.replace(tiny_model("llama"), eos_token_ids=frozenset())


def run(
    model: Model,
    suffix: list[int],
    *,
    go_on: Callable[[int], bool] = lambda pending: True,
    max_tokens: int = 6,
    sampling: Sampling | None = None,
) -> Draft:
    draft, cache = Draft(), model.new_cache(0, 300)
    tokens: Iterator[int] = propose(
        partial(model.step, cache),
        suffix,
        draft,
        eos_token_ids=model.eos_token_ids,
        history=suffix,
        sampling=sampling or Sampling(),
        generator=torch.Generator().manual_seed(0),
        max_tokens=max_tokens,
        go_on=go_on,
    )
    assert list(tokens) == draft.token_ids
    return draft


def test_a_draft_is_plain_decoding_with_its_distributions(model: Model) -> None:
    draft = run(model, [5, 6, 7])
    cache, pending, want = model.new_cache(0, 20), [5, 6, 7], list[int]()
    for _ in range(6):
        pending = [int(model.step(cache, pending)[0].argmax())]
        want += pending
    assert draft.token_ids == want
    assert [int(q.argmax()) for q in draft.q] == want
    assert draft.nbytes == 6 * 48 * 4


def test_each_distribution_sees_the_draft_before_it(model: Model) -> None:
    draft = run(model, [5, 6, 7], sampling=Sampling(repetition_penalty=1e6), max_tokens=20)
    assert len(set(draft.token_ids)) == 20
    assert not set(draft.token_ids) & {5, 6, 7}


def test_a_draft_can_go_on_where_it_ended(model: Model) -> None:
    whole = run(model, [5, 6, 7])
    cache, draft = model.new_cache(0, 300), Draft()
    for pending, start, stop in (([5, 6, 7], 0, 2), (whole.token_ids[1:2], 2, 6)):
        tokens = propose(
            partial(model.step, cache),
            pending,
            draft,
            eos_token_ids=model.eos_token_ids,
            history=[],
            sampling=Sampling(),
            generator=torch.Generator().manual_seed(0),
            max_tokens=stop,
            go_on=lambda pending: True,
        )
        assert list(tokens) == whole.token_ids[start:stop]
    assert draft.token_ids == whole.token_ids
    assert len(draft.q) == 6


def test_it_ends_when_told_to_even_inside_the_suffix(model: Model) -> None:
    asked: list[int] = []

    def at_most(steps: int) -> Callable[[int], bool]:
        def go_on(pending: int) -> bool:
            asked.append(pending)
            return len(asked) <= steps

        asked.clear()
        return go_on

    suffix = [5] * (2 * SUFFIX_CHUNK_TOKENS + 1)
    assert run(model, suffix, go_on=at_most(2)).token_ids == []
    assert asked == [len(suffix), len(suffix) - SUFFIX_CHUNK_TOKENS, 1]
    assert len(run(model, [5, 6], go_on=at_most(3)).token_ids) == 3
    assert asked == [2, 1, 1, 1]


def test_it_starts_from_logits_where_the_suffix_has_been_run(model: Model) -> None:
    cache, draft = model.new_cache(0, 20), Draft()
    logits = model.step(cache, [5, 6, 7])
    step = partial(model.step, cache)
    tokens = propose(
        step,
        [],
        draft,
        logits=logits,
        eos_token_ids=model.eos_token_ids,
        history=[],
        sampling=Sampling(),
        generator=torch.Generator().manual_seed(0),
        max_tokens=6,
        go_on=lambda pending: True,
    )
    assert list(tokens) == run(model, [5, 6, 7]).token_ids


def test_it_ends_after_an_end_of_text(model: Model) -> None:
    tokens = run(model, [5, 6, 7]).token_ids
    ending = dataclasses.replace(model, eos_token_ids=frozenset([tokens[2]]))
    assert run(ending, [5, 6, 7]).token_ids == tokens[: tokens.index(tokens[2]) + 1]
