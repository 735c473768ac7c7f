"""Errors of a stored cache: measured on what is stored, attention as the model attends, one fetch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lynxkv
from lynxkv.errors import InputError, UnsupportedModelError
from lynxkv.fidelity import QUERIES, key_attention
from lynxkv.integrations.hf.queries import replaced_attention, watch_attention
from lynxkv.kv import KV
from lynxkv.store import Store
from lynxkv.testing.kv import random_kv
from lynxkv.testing.tiny_models import FAMILIES, WINDOW_TOKENS, tiny_model


def watched(model: Any, tokens: int, last: int) -> tuple[KV, list[Any]]:
    """The KV of some prompt, and the attention of its last tokens."""
    ids = [3 + number * number % 44 for number in range(tokens)]
    cache = model.new_cache(0, tokens)
    model.step(cache, ids[:-last])
    seen = watch_attention(model, cache, ids[-last:])
    return cache.to_kv(ids), seen


def by_definition(query: Tensor, k: Tensor, v: Tensor, *, scale: float, softcap: float | None, window: int) -> Tensor:
    """Causal attention, one query and head at a time; the last key is the last query's own."""
    heads, count, dim = query.shape
    out = torch.empty(heads, count, dim)
    for head in range(heads):
        keys, values = k[head * k.shape[0] // heads], v[head * k.shape[0] // heads]
        for number in range(count):
            stop = keys.shape[0] - count + number + 1
            start = max(0, stop - window)
            logits = keys[start:stop] @ query[head, number] * scale
            if softcap is not None:
                logits = softcap * torch.tanh(logits / softcap)
            out[head, number] = torch.softmax(logits, 0) @ values[start:stop]
    return out


@pytest.mark.parametrize("family", list(FAMILIES))
def test_every_family_can_be_watched(family: str) -> None:
    model = tiny_model(family)
    kv, seen = watched(model, 20, 6)
    for layer, attend in zip(kv.layers, seen, strict=True):
        k, v = layer.tensors["k"], layer.tensors["v"]
        own = attend.run(attend.query, attend.keys, attend.values, attend.mask)[0].transpose(0, 1)
        assert torch.equal(attend(k, v), own)
        assert not torch.equal(attend(k, v + 1), own)


OWN_ATTENTION = [
    ("llama", {}, None),
    ("gemma2", {"query_pre_attn_scalar": 32, "attn_logit_softcapping": 0.5, "attn_implementation": "eager"}, 0.5),
    ("gemma3", {"query_pre_attn_scalar": 32}, None),
]


@pytest.mark.parametrize(("family", "settings", "softcap"), OWN_ATTENTION)
def test_attention_has_the_models_mask_scale_softcap_and_window(
    family: str, settings: dict[str, Any], softcap: float | None
) -> None:
    model = tiny_model(family, **settings)
    kv, seen = watched(model, 20, 6)
    scale = settings.get("query_pre_attn_scalar", 8) ** -0.5
    for layer, attend in zip(kv.layers, seen, strict=True):
        # Sliding layers: the first queries see further back than the cache keeps.
        expected = by_definition(
            attend.query[0], attend.keys[0], attend.values[0],
            scale=scale, softcap=softcap, window=layer.window or 1000,
        )  # fmt: skip
        assert torch.allclose(attend(layer.tensors["k"], layer.tensors["v"]), expected, atol=1e-5)


@pytest.mark.parametrize(("family", "settings", "softcap"), OWN_ATTENTION)
def test_attention_to_what_is_stored_alone(family: str, settings: dict[str, Any], softcap: float | None) -> None:
    model = tiny_model(family, **settings)
    last = 10
    _, seen = watched(model, 24, last)
    scale = settings.get("query_pre_attn_scalar", 8) ** -0.5
    for shape, attend in zip(model.layer_specs(), seen, strict=True):
        stored = attend.on_stored()
        # Query i sees the stored positions that are less than a window behind it; the last ones of a window see none.
        count = last if shape.window is None else WINDOW_TOKENS - 1
        assert stored.query.shape[2] == count
        keys, values = (x[0, :, : x.shape[2] - last].clone() for x in (attend.keys, attend.values))
        expected = torch.cat([
            by_definition(
                attend.query[0, :, [number]], keys, values,
                scale=scale, softcap=softcap, window=1000 if shape.window is None else WINDOW_TOKENS - 1 - number,
            )
            for number in range(count)
        ], 1)  # fmt: skip
        longer = torch.cat([torch.full_like(keys[:, :5], 9.0), keys], 1)  # what no query sees any more
        for k in (keys, longer):
            assert torch.allclose(stored(k, values), expected, atol=1e-5)


def test_attention_replaced_is_restored() -> None:
    model = tiny_model()
    cache = model.new_cache(0, 20)
    before = model.step(cache, [5, 6, 7])

    def doubled(stock: Any, *arguments: Any, **settings: Any) -> Any:
        return 2 * stock(*arguments, **settings)[0], None

    def refused(*arguments: Any, **settings: Any) -> Any:
        raise InputError("refused")

    cache.rollback(0)
    with replaced_attention(model, doubled):
        assert not torch.allclose(model.step(cache, [5, 6, 7]), before)
        cache.rollback(0)
        with pytest.raises(InputError), replaced_attention(model, refused):
            model.step(cache, [5, 6, 7])
        cache.rollback(0)
        assert not torch.allclose(model.step(cache, [5, 6, 7]), before)  # by the outer one again
    cache.rollback(0)
    assert torch.equal(model.step(cache, [5, 6, 7]), before)


def test_the_stand_in_is_causal_and_windowed() -> None:
    keys, values = torch.randn(2, 2, 100, 8, generator=torch.Generator().manual_seed(0))
    for window in (None, WINDOW_TOKENS):
        expected = by_definition(keys[:, -QUERIES:], keys, values, scale=8**-0.5, softcap=None, window=window or 100)
        assert torch.allclose(key_attention(keys, window)(keys, values), expected, atol=1e-5)


def test_attention_that_cannot_be_seen_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    monkeypatch.setattr(type(model), "step", lambda *arguments: None)
    with pytest.raises(UnsupportedModelError, match="cannot be seen"):
        watch_attention(model, None, [3])


@pytest.mark.parametrize(
    ("codec", "exact", "precisions"),
    [("default", True, ["anchor", "full", "exact"]), ("default", False, ["anchor", "full"]), ("int8", False, ["full"])],
)
def test_every_precision_once_and_one_fetch(
    codec: str, exact: bool, precisions: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, kv = str(tmp_path / "a.lynx"), random_kv(tokens=300, windows=(None, 64))
    lynxkv.encode(kv, url, codec=codec, exact=exact)
    fetched: list[tuple[str, int, int]] = []
    read = Store.read

    def counted(store: Store, name: str, start: int, stop: int) -> bytes:
        fetched.append((name, start, stop))
        return read(store, name, start, stop)

    monkeypatch.setattr(Store, "read", counted)
    errors = lynxkv.compare(url, kv)
    assert len(set(fetched)) == len(fetched)
    assert list(dict.fromkeys(row.precision for row in errors)) == precisions
    assert len(errors) == 2 * 2 * len(precisions)
    last = {precision: sum(row.nmse for row in errors if row.precision == precision) for precision in precisions}
    assert sorted(last.values(), reverse=True) == list(last.values())
    assert all(row.nmse == row.max_abs == row.attention_nmse_both == 0 for row in errors if row.precision == "exact")
    anchor_only = lynxkv.compare(url, kv, precision="anchor")
    assert anchor_only == errors[: len(anchor_only)]


def test_a_longer_original_is_cut_and_another_is_refused(tmp_path: Path) -> None:
    url, kv = str(tmp_path / "a.lynx"), random_kv(tokens=100)
    lynxkv.encode(random_kv(tokens=100, windows=(30,)), url, codec="raw", dtype="fp32")
    with pytest.raises(InputError, match="different shapes"):
        lynxkv.compare(url, random_kv(tokens=101))
    with pytest.raises(InputError, match="different shapes"):
        lynxkv.compare(url, random_kv(tokens=100, heads=1))
    with pytest.raises(InputError, match="different shapes"):
        lynxkv.compare(url, random_kv(tokens=100, layers=3))
    with pytest.raises(InputError, match="different shapes"):
        lynxkv.compare(url, random_kv(tokens=100, windows=(20,)))
    for layer, stored in zip(kv.layers, lynxkv.load(url).layers, strict=True):
        layer.tensors = {name: torch.cat([x[:, :70], stored.tensors[name]], 1) for name, x in layer.tensors.items()}
    assert {row.max_abs for row in lynxkv.compare(url, kv)} == {0.0}


def test_layers_that_do_not_say_how_they_attend_are_refused(tmp_path: Path) -> None:
    url, kv = str(tmp_path / "a.lynx"), random_kv(tokens=20)
    kv.layers[1].tensors["v"] = kv.layers[1].tensors["v"][:1]
    lynxkv.encode(kv, url)
    with pytest.raises(InputError, match=r"layer 1 has \d heads of keys and 1 of values"):
        lynxkv.compare(url, kv)


def test_attention_that_overflows_is_refused(tmp_path: Path) -> None:
    url, kv = str(tmp_path / "a.lynx"), random_kv(tokens=20)
    kv.layers[1].tensors["k"][0, 12, 0] = 3e38
    lynxkv.encode(kv, url)
    with pytest.raises(InputError, match="layer 1: keys or values are too large"):
        lynxkv.compare(url, kv)
