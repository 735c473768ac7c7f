"""Steps of several rows: the logits of each row's own steps, however long its tokens are, and in bounded chunks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lynxkv.integrations.hf import BatchCache, LynxCache, Model
from lynxkv.kv import KV
from lynxkv.layout import LayerSpec, TensorSpec
from lynxkv.models import prefill
from lynxkv.testing.tiny_models import WINDOW_TOKENS, tiny_model
from tests.integrations.test_cache import SLIDING, some_ids

CHUNK_TOKENS = 4


def specs_of(kv: KV) -> list[LayerSpec]:
    """What a cache of `kv` would state of its layers."""
    return [
        LayerSpec(
            kind=layer.kind,
            window=layer.window,
            start=layer.start,
            stop=layer.stop,
            tensors={
                name: TensorSpec(heads=tensor.shape[0], head_dim=tensor.shape[2], coding=0)
                for name, tensor in layer.tensors.items()
            },
        )
        for layer in kv.layers
    ]


def fill(cache: Any, kv: KV) -> None:
    for number, layer in enumerate(kv.layers):
        for name, tensor in layer.tensors.items():
            cache.target(number, name).copy_(tensor)


def one_row(model: Model, kv: KV, ids: list[int], rows: int) -> torch.Tensor:
    cache = LynxCache.allocate(model, kv.stop, 60, layers=specs_of(kv), rollback_tokens=60)
    fill(cache, kv)
    return model.step(cache, ids, rows=rows)


@pytest.mark.parametrize("family", ["llama", *SLIDING])
@pytest.mark.parametrize("rows", [1, 3])
def test_long_rows_run_in_chunks(family: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside rows that are shorter than a chunk, and whose part of the first ones is padding."""
    model = tiny_model(family)
    kvs = [prefill(model, some_ids(count, seed=count)) for count in (30, 9, 17)]
    suffixes = [some_ids(count, seed=count) for count in (3 * WINDOW_TOKENS, 3, 2 * CHUNK_TOKENS)]
    want = [one_row(model, kv, ids, rows) for kv, ids in zip(kvs, suffixes, strict=True)]
    monkeypatch.setattr("lynxkv.integrations.hf.model.CHUNK_TOKENS", CHUNK_TOKENS)
    queries: list[int] = []
    original = BatchCache.step_inputs

    def step_inputs(cache: BatchCache, present: torch.Tensor) -> Any:
        queries.append(present.shape[1])
        return original(cache, present)

    monkeypatch.setattr(BatchCache, "step_inputs", step_inputs)
    cache = model.new_batch_cache([specs_of(kv) for kv in kvs], 60)
    for number, kv in enumerate(kvs):
        fill(cache.row(number), kv)
    got = model.batch_step(cache, suffixes, rows=rows)
    assert got.shape == (3, rows, model.vocab_tokens)
    for number in range(3):
        torch.testing.assert_close(got[number], want[number], rtol=1e-4, atol=1e-5)
    assert sum(queries) == 3 * WINDOW_TOKENS
    assert max(queries) < CHUNK_TOKENS + rows
    # And on from there.
    got = model.batch_step(cache, [[5], [6], []])
    for number, token in ((0, 5), (1, 6)):
        own = one_row(model, kvs[number], [*suffixes[number], token], 1)
        torch.testing.assert_close(got[number], own, rtol=1e-4, atol=1e-5)
