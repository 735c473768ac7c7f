"""Batches: every row's text is the one it would have alone, whatever the rows beside it are."""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from lynxkv.batch import BatchResult, generate_batch
from lynxkv.codecs.uniform import Uniform
from lynxkv.encoder import encode
from lynxkv.errors import IdentityError, InputError
from lynxkv.fetch import open_cache
from lynxkv.health import ADVICE
from lynxkv.integrations.hf import Model
from lynxkv.models import prefill
from lynxkv.pace import Pace
from lynxkv.runner import generate
from lynxkv.sampling import Sampling
from lynxkv.testing.readers import ScriptedReader
from lynxkv.testing.tiny_models import FAMILIES, WINDOW_TOKENS, tiny_model

COARSE = Uniform(key_step=0.7, value_step=0.9, radix=32)
NEW_TOKENS = 14
SUFFIXES = [[5, 6], [7], [8, 9, 10, 11, 12], [13]]
SLIDING = ("mistral", "gemma2", "gemma3", "qwen2-sliding")


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest) -> Model:
    return tiny_model(request.param)


@pytest.fixture(params=["llama", *SLIDING])
def windowed(request: pytest.FixtureRequest) -> Model:
    """One without windows beside those that have them."""
    return tiny_model(request.param)


@pytest.fixture
def llama() -> Model:
    return tiny_model("llama")


def make_caches(model: Model, folder: Path, lengths: list[int], codec: Any = COARSE) -> list[str]:
    urls = []
    for number, length in enumerate(lengths):
        ids = torch.randint(3, 48, (length,), generator=torch.Generator().manual_seed(number)).tolist()
        urls.append(str(folder / f"{number}.lynx"))
        encode(prefill(model, ids), urls[-1], codec=codec, identity=model.identity)
    return urls


def together(
    model: Model, urls: list[str], suffixes: list[list[int]], *, arrivals: list[int] | None = None, **options: Any
) -> BatchResult:
    with ExitStack() as stack:
        readers = {url: stack.enter_context(ScriptedReader(url, arrivals=list(arrivals or []))) for url in set(urls)}
        prompts = [(readers[url], suffix) for url, suffix in zip(urls, suffixes, strict=True)]
        return generate_batch(prompts, model, max_new_tokens=NEW_TOKENS, **options)


def alone(model: Model, url: str, suffix: list[int], **options: Any) -> list[int]:
    with open_cache(url) as reader:
        return generate(reader, model, suffix, max_new_tokens=NEW_TOKENS, speculate="off", **options).token_ids


@pytest.mark.parametrize("speculate", [5, "auto", "off"])
def test_several_prompts_over_several_caches(model: Model, tmp_path: Path, speculate: Any) -> None:
    first, second = make_caches(model, tmp_path, [30, 17])
    urls = [first, second, first, second]
    got = together(model, urls, SUFFIXES, arrivals=[0, 1, 1], speculate=speculate)
    assert [text.token_ids for text in got.texts] == [
        alone(model, url, suffix) for url, suffix in zip(urls, SUFFIXES, strict=True)
    ]
    assert [text.text for text in got.texts] == [model.to_text(text.token_ids) for text in got.texts]
    assert got.precision == "full"
    if speculate == 5:
        assert all(text.drafted <= 5 for text in got.texts)
        assert any(text.drafted for text in got.texts)


def test_rows_accept_prefixes_of_their_own(windowed: Model, tmp_path: Path) -> None:
    """Rows drift apart: with windows, each sees other slots than its neighbours."""
    endless = dataclasses.replace(windowed, eos_token_ids=frozenset())
    (url,) = make_caches(endless, tmp_path, [30], Uniform(key_step=1.0, value_step=1.0, radix=32))
    suffixes = [[first] for first in range(3, 27)]
    got = together(endless, [url] * len(suffixes), suffixes, speculate=6)
    assert [text.token_ids for text in got.texts] == [alone(endless, url, suffix) for suffix in suffixes]
    assert {text.drafted for text in got.texts} == {6}
    accepted = [text.accepted for text in got.texts]
    assert len(set(accepted)) > 2, accepted


def test_rows_shorter_and_longer_than_a_window(windowed: Model, tmp_path: Path) -> None:
    endless = dataclasses.replace(windowed, eos_token_ids=frozenset())
    urls = make_caches(endless, tmp_path, [3, WINDOW_TOKENS, WINDOW_TOKENS + 1, 60])
    suffixes = [list(range(5, 5 + 2 * WINDOW_TOKENS)), [], [7], []]
    got = together(endless, urls, suffixes, arrivals=[1] * 20, speculate=2 * WINDOW_TOKENS)
    assert [text.token_ids for text in got.texts] == [
        alone(endless, url, suffix) for url, suffix in zip(urls, suffixes, strict=True)
    ]


def test_sliding_layers_keep_and_read_their_windows_alone(tmp_path: Path) -> None:
    gemma = tiny_model("gemma2")
    urls = make_caches(gemma, tmp_path, [60, 40])
    with ExitStack() as stack:
        stored = [stack.enter_context(open_cache(url)).extent.layers for url in urls]
    cache = gemma.new_batch_cache(stored, 10)
    sliding, full, _ = cache.layers
    assert (sliding.keys.shape[2], full.keys.shape[2]) == (WINDOW_TOKENS + 10, 70)
    _, masks = cache.step_inputs(torch.ones(2, 3, dtype=torch.bool))
    assert isinstance(masks, dict)
    for layer, kind, slots in ((sliding, "sliding_attention", WINDOW_TOKENS - 1 + 3), (full, "full_attention", 63)):
        keys, values = layer.update(*torch.ones(2, 2, 2, 3, 8))
        assert keys.shape[2] == values.shape[2] == masks[kind].shape[3] == slots


def test_a_shared_cache_is_fetched_once(llama: Model, tmp_path: Path) -> None:
    (url,) = make_caches(llama, tmp_path, [30])
    with open_cache(url) as reader:
        want = reader.bytes_anchor + reader.bytes_residual
    assert together(llama, [url] * 4, SUFFIXES, speculate=3).bytes_fetched == want
    assert together(llama, [url] * 4, SUFFIXES, verify="none").bytes_fetched < want


@pytest.mark.parametrize("verify", ["none", "full"])
@pytest.mark.parametrize("codec", ["int8", "raw", COARSE])
def test_precisions_and_caches_without_residual(llama: Model, tmp_path: Path, codec: Any, verify: Any) -> None:
    urls = make_caches(llama, tmp_path, [9, 21], codec)
    got = together(llama, urls, SUFFIXES[:2], verify=verify, speculate=4)
    assert [text.token_ids for text in got.texts] == [
        alone(llama, url, suffix, verify=verify) for url, suffix in zip(urls, SUFFIXES, strict=False)
    ]
    assert got.precision == ("anchor" if verify == "none" and codec is COARSE else "full")


def test_what_a_window_needs_is_stored(tmp_path: Path) -> None:
    """A sliding layer may hold just what the next token sees; the last cached one, run again, would see one more."""
    mistral = tiny_model("mistral")
    (url,) = make_caches(mistral, tmp_path, [30])
    with open_cache(url) as reader:
        layers = [dataclasses.replace(layer, start=layer.start + 1) for layer in reader.extent.layers]
    cache = mistral.new_batch_cache([layers, reader.extent.layers], 4)
    cache.forget_stored(1, 29)
    with pytest.raises(InputError, match=r"positions \[23, 30\) and cannot go back to 29"):
        cache.forget_stored(0, 29)


def test_an_empty_suffix_runs_the_last_cached_token_again(llama: Model, tmp_path: Path) -> None:
    urls = make_caches(llama, tmp_path, [9, 21])
    got = together(llama, urls, [[], [5, 6]], speculate=4)
    assert [text.token_ids for text in got.texts] == [alone(llama, urls[0], []), alone(llama, urls[1], [5, 6])]


def test_texts_end_at_stop_strings_and_end_of_text(llama: Model, tmp_path: Path) -> None:
    urls = make_caches(llama, tmp_path, [9, 21])
    endless = dataclasses.replace(llama, eos_token_ids=frozenset())
    free = [alone(endless, url, suffix) for url, suffix in zip(urls, SUFFIXES, strict=False)]
    ending = dataclasses.replace(llama, eos_token_ids=frozenset([free[0][3]]))
    got = together(ending, urls, SUFFIXES[:2], speculate=6, stop=[llama.to_text([free[1][5]])])
    assert got.texts[0].stopped == "eos"
    assert got.texts[0].token_ids == free[0][: free[0].index(free[0][3]) + 1]
    assert got.texts[1].stopped in ("stop", "eos")
    assert len(got.texts[1].token_ids) <= 6


def test_rows_are_told_why_there_is_no_draft_and_that_one_was_bad(llama: Model, tmp_path: Path) -> None:
    endless = dataclasses.replace(llama, eos_token_ids=frozenset())
    (url,) = make_caches(endless, tmp_path, [30], Uniform(key_step=3.0, value_step=3.0, radix=32))
    pace = Pace()
    pace.verified("full", 10_000, 10_000)
    got = together(endless, [url] * 4, SUFFIXES, speculate=10, pace=pace)
    for text in got.texts:
        assert text.notes in ([], [f"only {text.accepted} of 10 draft tokens passed: {ADVICE}"])
        assert set(text.peak_parts) == {"cache", "codes", "in_flight", "logits"}
        assert text.peak_bytes == sum(text.peak_parts.values())
        assert text.peak_parts["logits"] > 0
        assert text.peak_parts["cache"] == got.cache_bytes // 4
    assert any(text.notes for text in got.texts)
    for _ in range(100):
        pace.verified("full", 10_000, 0)
    got = together(endless, [url] * 4, SUFFIXES, pace=pace)
    assert {text.drafted for text in got.texts} == {0}
    assert {note for text in got.texts for note in text.notes} == {
        f"no draft: hardly a token of earlier ones passed, so the full cache is waited for: {ADVICE}"
    }
    got = together(endless, [url] * 4, SUFFIXES, arrivals=[1000])
    assert [text.notes for text in got.texts] == [["no draft: the full cache is there before a draft would pay"]] * 4


def test_sampling_is_seeded_by_row(llama: Model, tmp_path: Path) -> None:
    (url,) = make_caches(llama, tmp_path, [30])
    warm = Sampling(temperature=1.5, top_p=0.9, repetition_penalty=1.2, seed=4)
    first, again = (together(llama, [url] * 3, [[5]] * 3, speculate=4, sampling=warm) for _ in range(2))
    assert [text.token_ids for text in first.texts] == [text.token_ids for text in again.texts]
    assert len({tuple(text.token_ids) for text in first.texts}) == 3


def test_what_cannot_be_batched_is_refused(llama: Model, tmp_path: Path) -> None:
    (url,) = make_caches(llama, tmp_path, [9])
    with pytest.raises(InputError, match="no prompts"):
        generate_batch([], llama)
    with open_cache(url) as reader:
        with pytest.raises(InputError, match="full caches"):
            generate_batch([(reader, [5])], llama, verify="exact")
        with pytest.raises(InputError, match="verify is 'some'"):
            generate_batch([(reader, [5])], llama, verify="some")  # type: ignore[arg-type]
        with pytest.raises(InputError, match="stop is one string"):
            generate_batch([(reader, [5])], llama, stop="w7")
        with pytest.raises(IdentityError):
            generate_batch([(reader, [5])], tiny_model("llama", seed=1))
        with pytest.raises(InputError, match="vocabulary"):
            generate_batch([(reader, [500])], llama)
