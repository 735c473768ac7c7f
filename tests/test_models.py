from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from lynxkv.errors import InputError
from lynxkv.models import prefill, prefill_with_logits
from lynxkv.testing.tiny_models import tiny_model


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "the prompt is empty"),
        ([3] * 41, "41 tokens, more than the 40"),
        ([3, 48], "vocabulary"),
        ([-1], "vocabulary"),
        ([3.0, 4.0], "not an integer"),
    ],
)
def test_prompts_that_cannot_be_run_are_refused(ids: list[Any], message: str) -> None:
    model = dataclasses.replace(tiny_model("llama"), context_tokens=40)
    with pytest.raises(InputError, match=message):
        prefill(model, ids)


def test_tensors_and_arrays_of_ids_are_lists_of_them() -> None:
    model, ids = tiny_model("llama"), [3, 9, 12, 7]
    plain = prefill(model, ids)
    tensors: list[Any] = [torch.tensor(ids), np.array(ids)]
    for given in tensors:
        assert prefill(model, given).token_ids == ids
        assert torch.equal(prefill(model, given).layers[0].tensors["k"], plain.layers[0].tensors["k"])
    batch: Any = torch.tensor([ids])
    with pytest.raises(InputError, match="not an integer"):
        prefill(model, batch)


def test_a_prefill_step_takes_at_least_one_token() -> None:
    with pytest.raises(InputError, match="chunk_tokens is 0"):
        prefill(tiny_model("llama"), [3], chunk_tokens=0)


def test_prefill_never_asks_for_logits_of_the_whole_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    rows: list[int] = []
    model.hf.lm_head.register_forward_hook(lambda module, args, output: rows.append(output.shape[1]))
    prefill(model, [3] * 100, chunk_tokens=32)
    assert rows == [1, 1, 1, 1]


@pytest.mark.parametrize("chunk_tokens", [7, 40, 64])
def test_prefill_gives_the_logits_of_the_last_position(chunk_tokens: int) -> None:
    model = tiny_model("llama")
    ids = torch.randint(3, 48, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    got = prefill_with_logits(model, ids, chunk_tokens=chunk_tokens)
    with torch.inference_mode():
        want = model.hf(torch.tensor([ids]), use_cache=False).logits[0, -1]
    assert got.logits.shape == (48,)
    torch.testing.assert_close(got.logits, want, rtol=1e-4, atol=1e-4)
    assert got.kv.token_ids == ids


def test_steps_longer_than_a_chunk_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama", max_position_embeddings=2048)
    lengths: list[int] = []
    model.hf.model.embed_tokens.register_forward_hook(lambda module, args, output: lengths.append(output.shape[1]))
    ids = torch.randint(3, 48, (1100,), generator=torch.Generator().manual_seed(0)).tolist()
    cache = model.new_cache(0, 1100)
    got = model.step(cache, ids, rows=80)
    assert lengths == [512, 512, 76][: len(lengths)] or lengths == [512, 588]
    with torch.inference_mode():
        want = model.hf(torch.tensor([ids]), use_cache=False).logits[0, -80:]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
