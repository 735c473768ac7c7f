"""LynxCache against transformers' own cache, for every family, with steps, rollbacks and windows mixed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from lynxkv.encoder import encode
from lynxkv.errors import CacheNotFoundError, IdentityError, InputError
from lynxkv.fetch import FetchOptions
from lynxkv.integrations.hf import LynxCache, Model
from lynxkv.kv import KV
from lynxkv.layout import LayerSpec, TensorSpec
from lynxkv.models import prefill
from lynxkv.testing.tiny_models import FAMILIES, WINDOW_TOKENS, tiny_model

SLIDING = ["qwen2-sliding", "mistral", "gemma2", "gemma3"]


def some_ids(count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 48, (count,), generator=generator).tolist()


def one_pass(model: Model, ids: list[int]) -> torch.Tensor:
    """Logits [T, V] of stock transformers without any cache."""
    with torch.inference_mode():
        logits: torch.Tensor = model.hf(torch.tensor([ids]), use_cache=False).logits[0]
    return logits


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("steps", [[40], [1] * 40, [13, 1, 1, 5, 20], [3, 7, 30]])
def test_steps_of_any_length_give_the_logits_of_one_pass(family: str, steps: list[int]) -> None:
    model, ids = tiny_model(family), some_ids(40)
    want = one_pass(model, ids)
    cache = LynxCache.allocate(model, 0, 40, rollback_tokens=12)
    done = 0
    for count in steps:
        got = model.step(cache, ids[done : done + count], rows=count)
        torch.testing.assert_close(got, want[done : done + count], rtol=1e-4, atol=1e-4)
        done += count
    assert cache.tokens == 40


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("prompt", "draft"), [(3, 4), (6, 5), (30, 6), (8, 1), (9, 9)])
def test_a_rolled_back_draft_leaves_no_trace(family: str, prompt: int, draft: int) -> None:
    model = tiny_model(family)
    ids, wrong = some_ids(prompt + 12), some_ids(draft, seed=7)
    want = one_pass(model, ids)
    cache = LynxCache.allocate(model, 0, prompt + 12, rollback_tokens=20)
    model.step(cache, ids[:prompt])
    for token in wrong:
        model.step(cache, [token])
    cache.rollback(prompt)
    for position in range(prompt, prompt + 12):
        got = model.step(cache, [ids[position]])
        torch.testing.assert_close(got[0], want[position], rtol=1e-4, atol=1e-4)
        if position % 3 == 0:
            model.step(cache, wrong[:1])
            cache.crop(-1)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")
@pytest.mark.parametrize("argument", ["past_key_values", "cache"])
def test_stock_generate_takes_the_cache(family: str, argument: str) -> None:
    model, ids = tiny_model(family), some_ids(21)
    if argument != model.cache_argument and argument == "cache":
        pytest.skip("this transformers knows past_key_values only")
    settings = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0}
    hf: Any = model.hf
    want = hf.generate(torch.tensor([ids]), **settings)
    cache = LynxCache.allocate(model, 0, 40)
    model.step(cache, ids[:15])
    got = hf.generate(torch.tensor([ids]), **{argument: cache}, **settings)
    assert got.tolist() == want.tolist()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chunk_tokens", [1, 5, 64])
def test_prefill_in_chunks_returns_what_a_stock_cache_holds(family: str, chunk_tokens: int) -> None:
    model, ids = tiny_model(family), some_ids(33)
    done: list[tuple[int, int]] = []
    kv = prefill(model, ids, chunk_tokens=chunk_tokens, progress=lambda now, total: done.append((now, total)))
    stock: Any = DynamicCache(config=model.hf.config)
    with torch.inference_mode():
        model.hf(torch.tensor([ids]), use_cache=True, **{model.cache_argument: stock})
    assert kv.token_ids == ids
    assert (kv.start, kv.stop) == (0, 33)
    assert done[-1] == (33, 33)
    for layer, shape, own in zip(kv.layers, model.layer_specs(), stock.layers, strict=True):
        held = 33 if shape.window is None else shape.window
        assert (layer.kind, layer.window, layer.stop - layer.start, layer.stop) == (shape.kind, shape.window, held, 33)
        # transformers keeps one position less in a sliding layer than lynxkv does
        common = own.keys.shape[-2]
        torch.testing.assert_close(layer.tensors["k"][:, -common:], own.keys[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(layer.tensors["v"][:, -common:], own.values[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_decoding_into_targets_restores_the_cache(family: str) -> None:
    model, ids = tiny_model(family), some_ids(30)
    kv = prefill(model, ids)
    cache = LynxCache.allocate(model, 30, 10, layers=stored_layers(kv))
    fill(cache, kv)
    want = one_pass(model, [*ids, 5, 6])
    torch.testing.assert_close(model.step(cache, [5, 6], rows=2), want[30:], rtol=1e-4, atol=1e-4)
    # the last cached token can be run again, for a suffix that is empty
    cache.rollback(29)
    torch.testing.assert_close(model.step(cache, ids[29:])[0], want[29], rtol=1e-4, atol=1e-4)


def test_refining_in_place_reaches_a_running_model() -> None:
    model, ids = tiny_model("gemma2"), some_ids(30)
    kv = prefill(model, ids)
    cache = LynxCache.allocate(model, 30, 10)
    for number, layer in enumerate(kv.layers):
        for name in layer.tensors:
            cache.target(number, name).zero_()
    coarse = model.step(cache, [5])
    fill(cache, kv)
    cache.rollback(30)
    fine = model.step(cache, [5])
    assert not torch.allclose(coarse, fine, atol=1e-2)
    torch.testing.assert_close(fine[0], one_pass(model, [*ids, 5])[30], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", SLIDING)
def test_sliding_layers_stay_small(family: str) -> None:
    model = tiny_model(family)
    cache = LynxCache.allocate(model, 0, 200, rollback_tokens=16)
    for token in some_ids(200):
        model.step(cache, [token])
    for layer in cache.layers:
        if layer.window is not None:
            assert layer.capacity <= WINDOW_TOKENS + 16
            assert layer.length >= WINDOW_TOKENS


def test_rollback_beyond_what_a_sliding_layer_holds_is_refused() -> None:
    model = tiny_model("mistral")
    cache = LynxCache.allocate(model, 0, 100, rollback_tokens=8)
    for token in some_ids(60):
        model.step(cache, [token])
    with pytest.raises(InputError, match="cannot go back to 20"):
        cache.rollback(20)
    with pytest.raises(InputError, match="no longer held"):
        cache.target(0, "k")


def test_a_full_cache_and_a_batch_are_refused() -> None:
    model = tiny_model("llama")
    cache = LynxCache.allocate(model, 0, 4)
    model.step(cache, some_ids(4))
    with pytest.raises(InputError, match="room for 0 more tokens"):
        model.step(cache, [3])
    with pytest.raises(InputError, match="one sequence"):
        model.hf(torch.tensor([[3], [4]]), use_cache=True, **{model.cache_argument: LynxCache.allocate(model, 0, 4)})


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("layers", {"drop": 1}),
        ("layers[0].kind", {"kind": "full", "window": None}),
        ("layers[0].kind", {"window": 9}),
        ("layers[0].tensors", {"heads": 1}),
        ("layers[0].start", {"start": 25}),
    ],
)
def test_layers_of_another_model_are_refused_by_name(field: str, change: dict[str, int]) -> None:
    model = tiny_model("mistral")
    layers = stored_layers(prefill(model, some_ids(30)), **change)
    with pytest.raises(IdentityError) as caught:
        LynxCache.allocate(model, 30, 10, layers=layers)
    assert caught.value.field == field
    assert caught.value.hint


def stored_layers(kv: KV, *, drop: int = 0, heads: int | None = None, **first: int) -> list[LayerSpec]:
    """What a cache of `kv` states of its layers, the first one changed."""
    out = []
    for number, layer in enumerate(kv.layers[drop:]):
        stated = {"kind": layer.kind, "window": layer.window, "start": layer.start, "stop": layer.stop}
        if number == 0:
            stated.update(first)
        tensors = {
            name: TensorSpec(heads=heads or tensor.shape[0], head_dim=tensor.shape[2], coding=0)
            for name, tensor in layer.tensors.items()
        }
        out.append(LayerSpec(tensors=tensors, **stated))  # type: ignore[arg-type]
    return out


def fill(cache: LynxCache, kv: KV) -> None:
    for number, layer in enumerate(kv.layers):
        for name, tensor in layer.tensors.items():
            cache.target(number, name).copy_(tensor)


def test_room_for_less_than_no_token_is_refused() -> None:
    with pytest.raises(InputError, match="new_tokens is -1"):
        LynxCache.allocate(tiny_model("llama"), 10, -1)


def test_a_residual_elsewhere_is_loaded_or_its_absence_told(tmp_path: Path) -> None:
    model, hot, cold = tiny_model("llama"), tmp_path / "a.lynx", tmp_path / "cold"
    kv = prefill(model, some_ids(30))
    encode(kv, hot, identity=model.identity, residual_url=cold)
    encode(kv, tmp_path / "plain.lynx", identity=model.identity)
    with pytest.raises(CacheNotFoundError, match="is missing"):
        LynxCache.load(hot, model, new_tokens=4)

    def same(cache: LynxCache, other: LynxCache) -> bool:
        pairs = zip(cache.to_kv().layers, other.to_kv().layers, strict=True)
        return all(mine.tensors[name].equal(theirs.tensors[name]) for mine, theirs in pairs for name in mine.tensors)

    whole = LynxCache.load(hot, model, new_tokens=4, options=FetchOptions(residual_url=cold))
    assert whole.precision == "full"
    assert same(whole, LynxCache.load(tmp_path / "plain.lynx", model, new_tokens=4))
    coarse = LynxCache.load(hot, model, new_tokens=4, options=FetchOptions(if_residual_unavailable="anchor-only"))
    assert coarse.precision == "anchor"
    assert same(coarse, LynxCache.load(tmp_path / "plain.lynx", model, new_tokens=4, precision="anchor"))
    assert not same(coarse, whole)
