"""The sparse fetch against its algorithm written out, and against full attention where it fetches everything."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lynxkv.bench.baselines.sparq import SparQ, SparQFetch
from lynxkv.bench.measure import live_cache, rounded
from lynxkv.integrations.hf.queries import replaced_attention
from lynxkv.models import prefill
from lynxkv.testing.tiny_models import tiny_model

TOKENS = [3 + (7 * number) % 40 for number in range(40)]
EVERYTHING = SparQ(components=64, top_tokens=4096)


def written_out(query: Tensor, k: Tensor, v: Tensor, method: SparQ) -> Tensor:
    """Algorithm 1 of the paper for the queries [G, D] that share the keys and values [S, D] of one head."""
    count, dim = k.shape
    part = query.abs().sum(0).topk(method.components).indices
    rough = torch.stack([
        torch.softmax(q[part] @ k[:, part].T / math.sqrt(dim * float(q[part].abs().sum() / q.abs().sum())), 0)
        for q in query
    ])  # fmt: skip
    local = torch.arange(count) >= count - method.top_tokens // 4
    best = (rough.sum(0) + 100 * local).topk(method.top_tokens).indices
    out = []
    for q, weights in zip(query, rough, strict=True):
        covered = weights[best].sum()
        exact = torch.softmax(q @ k[best].T / math.sqrt(dim), 0) @ v[best]
        out.append(covered * exact + (1 - covered) * v.mean(0))
    return torch.stack(out)


def test_it_is_the_algorithm_of_the_paper() -> None:
    generator = torch.Generator().manual_seed(0)
    query, keys, values = (torch.randn(1, heads, n, 16, generator=generator) for heads, n in ((6, 5), (2, 50), (2, 50)))
    mask = torch.ones(5, 50, dtype=torch.bool).tril(45)[None, None]
    method = SparQ(components=4, top_tokens=12)
    output, weights = SparQFetch(method).attend(None, None, query, keys, values, mask, scaling=0.25)
    assert weights is None
    for number in range(5):
        for head in range(2):
            k, v = (x[0, head, : 46 + number] for x in (keys, values))
            expected = written_out(query[0, 3 * head : 3 * head + 3, number], k, v, method)
            assert torch.allclose(output[0, number, 3 * head : 3 * head + 3], expected, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {}),
        ("mistral", {}),
        ("gemma2", {"query_pre_attn_scalar": 32, "attn_logit_softcapping": 0.5, "attn_implementation": "eager"}),
        ("gemma3", {"query_pre_attn_scalar": 32}),
    ],
)
def test_all_components_and_tokens_are_full_attention(family: str, settings: dict[str, Any]) -> None:
    model = tiny_model(family, **settings)
    cache = live_cache(model, rounded(prefill(model, TOKENS)), 20)
    plain = model.step(cache, [5, 6, 7], rows=3)
    cache.rollback(len(TOKENS))
    with replaced_attention(model, SparQFetch(EVERYTHING).attend):
        assert torch.allclose(model.step(cache, [5, 6, 7], rows=3), plain, atol=1e-4)
        cache.rollback(len(TOKENS))
        few = model.step(cache, [5, 6, 7], rows=3)
    cache.rollback(len(TOKENS))
    assert torch.allclose(few, plain, atol=1e-4)
    with replaced_attention(model, SparQFetch(SparQ(components=1, top_tokens=1)).attend):
        assert not torch.allclose(model.step(cache, [5, 6, 7], rows=3), plain, atol=1e-4)


def test_bytes_are_those_of_distinct_elements() -> None:
    model = tiny_model()  # 3 layers of 2 heads of 8
    original = rounded(prefill(model, TOKENS))
    cache = live_cache(model, original, 20)
    few = SparQ(components=3, top_tokens=8).stored(original)
    assert few.sizes.full_bytes == few.sizes.total_bytes == 2 * 3 * 2 * 2 * 8 * 40
    for times in (1, 3):  # the same step fetches nothing new
        with replaced_attention(model, few.sparse.attend), few.sparse.answer(cache):
            for _ in range(times):
                model.step(cache, [5])
                cache.rollback(len(TOKENS))
        # Of 8 tokens 2 are the latest: the query's own, which is not stored, and the last stored one.
        head = 3 * 40 + 7 * (8 - 3) + 7 * 8 + 8
        assert few.sizes.full_bytes == few.sizes.anchor_bytes == 2 * 3 * 2 * head
    whole = EVERYTHING.stored(original)
    with replaced_attention(model, whole.sparse.attend), whole.sparse.answer(cache):
        model.step(cache, [5, 6, 7])
    assert whole.sizes.full_bytes == whole.sizes.total_bytes + 2 * 3 * 2 * 8  # and the means of V


def test_a_window_is_fetched_from_as_far_as_it_reaches() -> None:
    model = tiny_model("mistral")  # windows of 8
    original = rounded(prefill(model, TOKENS))
    cache = live_cache(model, original, 20)
    whole = EVERYTHING.stored(original)
    with replaced_attention(model, whole.sparse.attend), whole.sparse.answer(cache):
        model.step(cache, [5, 6, 7])
    # Components of all 8 tokens that are stored, V of the 7 that are seen.
    assert whole.sizes.full_bytes == 2 * 3 * 2 * (8 * 8 + 7 * 8 + 8)
