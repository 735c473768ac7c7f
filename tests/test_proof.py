"""Proofs: equal texts are equal, and a forged one is found out where it differs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from lynxkv.codecs.uniform import Uniform
from lynxkv.encoder import encode
from lynxkv.errors import IdentityError
from lynxkv.events import GenerateResult
from lynxkv.fetch import open_cache
from lynxkv.integrations.hf import Model
from lynxkv.models import prefill_with_logits
from lynxkv.proof import Proof, prove
from lynxkv.runner import generate
from lynxkv.testing.tiny_models import tiny_model

PROMPT = [5, 9, 30, 12, 7, 7, 21, 40, 3, 18, 26, 33]


@pytest.fixture(params=["llama", "gemma2"])
def model(request: pytest.FixtureRequest) -> Model:
    return dataclasses.replace(tiny_model(request.param), eos_token_ids=frozenset())


@pytest.fixture
def url(model: Model, tmp_path: Path) -> str:
    filled, out = prefill_with_logits(model, PROMPT), str(tmp_path / "cache.lynx")
    codec = Uniform(key_step=0.7, value_step=0.9, radix=32)
    encode(filled.kv, out, codec=codec, identity=model.identity, exact=True, logits=filled.logits)
    return out


def run(model: Model, url: str, suffix: list[int], **options: Any) -> GenerateResult:
    with open_cache(url) as reader:
        return generate(reader, model, suffix, max_new_tokens=16, speculate=6, **options)


def proof_of(model: Model, url: str, suffix: list[int], result: GenerateResult) -> Proof:
    with open_cache(url) as reader:
        return prove(reader, model, suffix, result)


@pytest.mark.parametrize("verify", ["none", "full", "exact"])
@pytest.mark.parametrize("suffix", [[4, 17], []])
def test_a_greedy_text_is_that_of_plain_decoding(model: Model, url: str, suffix: list[int], verify: Any) -> None:
    result = run(model, url, suffix, verify=verify)
    proof = proof_of(model, url, suffix, result)
    assert (proof.equal, proof.tokens, proof.differs_at, proof.gap_there) == (True, 16, None, None)
    assert proof.explained
    assert 0 <= proof.rounding < 1e-4
    assert proof.smallest_gap > 0


@pytest.mark.parametrize("place", [0, 7, 15])
def test_a_forged_token_is_found(model: Model, url: str, place: int) -> None:
    result = run(model, url, [4, 17])
    tokens = list(result.token_ids)
    tokens[place] = (tokens[place] + 1) % 48
    proof = proof_of(model, url, [4, 17], dataclasses.replace(result, token_ids=tokens))
    assert (proof.equal, proof.tokens, proof.differs_at) == (False, place + 1, place)
    assert proof.gap_there is not None
    assert proof.gap_there >= proof.smallest_gap
    assert not proof.explained


def test_a_text_of_another_cache_is_not_proved(model: Model, url: str, tmp_path: Path) -> None:
    with open_cache(url) as reader, pytest.raises(IdentityError):
        prove(reader, tiny_model("phi"), [4], run(model, url, [4]))
