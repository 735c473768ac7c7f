"""The progressive runner: its text is that of plain decoding on the full cache, whatever the anchor was."""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from lynxkv import draft
from lynxkv.codecs.uniform import Uniform
from lynxkv.encoder import encode
from lynxkv.errors import CacheNotFoundError, FetchError, IdentityError, InputError
from lynxkv.events import (
    AnchorProgress,
    Drafted,
    Event,
    GenerateResult,
    Note,
    Phase,
    Rejected,
    ResidualProgress,
    Span,
    TokenLogprobs,
    Verified,
)
from lynxkv.fetch import FetchOptions, SegmentStream, open_cache
from lynxkv.integrations.hf import LynxCache, Model
from lynxkv.models import prefill
from lynxkv.pace import Pace
from lynxkv.runner import generate
from lynxkv.sampling import Sampling
from lynxkv.testing.readers import ScriptedReader
from lynxkv.testing.statistics import chi_square_z
from lynxkv.testing.tiny_models import FAMILIES, tiny_model

PROMPT_TOKENS, NEW_TOKENS = 30, 24


class Tireless(Pace):
    """One more draft token always pays, whatever the clock of this machine says."""

    def pays(self, *args: Any, **options: Any) -> bool:
        return True


SAMPLED = Sampling(temperature=1.0, top_p=0.9, repetition_penalty=1.3)


def some_ids(count: int, seed: int = 0, vocab: int = 48) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocab, (count,), generator=generator).tolist()


def make_cache(
    model: Model, url: str, *, ids: Sequence[int] | None = None, codec: Any = None, **settings: Any
) -> tuple[str, list[int]]:
    """Encode a prompt with an anchor coarse enough to mislead the model now and then."""
    ids = list(ids or some_ids(PROMPT_TOKENS))
    codec = codec or Uniform(key_step=0.7, value_step=0.9, radix=32)
    encode(prefill(model, ids), url, codec=codec, identity=model.identity, overwrite=True, **settings)
    return url, ids


def plain_decoding(model: Model, url: str, suffix: list[int], new_tokens: int) -> list[int]:
    """Greedy decoding from the full cache without lynxkv's runner."""
    cache = LynxCache.load(url, model, new_tokens=len(suffix) + new_tokens)
    out: list[int] = []
    pending = suffix
    while len(out) < new_tokens and not (out and out[-1] in model.eos_token_ids):
        pending = [int(model.step(cache, pending)[0].argmax())]
        out += pending
    return out


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny models lose more than they gain by a second thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def llama() -> Model:
    return tiny_model("llama")


@pytest.fixture
def url(tmp_path: Path) -> str:
    return str(tmp_path / "cache.lynx")


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_is_that_of_plain_decoding(family: str, url: str) -> None:
    model = tiny_model(family)
    accepted = Counter[int]()
    for seed in range(5):
        coarse = Uniform(key_step=0.8, value_step=0.9, radix=32)
        make_cache(model, url, ids=some_ids(PROMPT_TOKENS, seed), codec=coarse)
        for suffix in ([5, 6, 7], some_ids(70, seed + 50)):
            want = plain_decoding(model, url, suffix, NEW_TOKENS)
            for speculate in (1, 7, "auto", "off"):
                with ScriptedReader(url) as reader:
                    got = generate(
                        reader,
                        model,
                        suffix,
                        max_new_tokens=NEW_TOKENS,
                        speculate=speculate,
                    )
                assert got.token_ids == want
                assert got.precision == "full"
                if speculate == 7:
                    accepted[got.accepted] += 1
    # The anchors were coarse enough to be wrong at more than one place.
    assert len(accepted) > 2, accepted


def test_rejection_is_tried_at_every_position(llama: Model, url: str) -> None:
    accepted = Counter[int]()
    for seed in range(40):
        step = (0.2, 0.5, 1.0)[seed % 3]
        make_cache(
            llama, url, ids=some_ids(PROMPT_TOKENS, seed), codec=Uniform(key_step=step, value_step=step, radix=32)
        )
        want = plain_decoding(llama, url, [5], NEW_TOKENS)
        with ScriptedReader(url) as reader:
            got = generate(reader, llama, [5], max_new_tokens=NEW_TOKENS, speculate=5)
        assert got.token_ids == want
        accepted[got.accepted] += 1
    assert set(accepted) == {0, 1, 2, 3, 4, 5}, accepted


@pytest.mark.parametrize("arrivals", [[0, 0, 1, 1, 1, 1, 1, 1], [2, 2, 2], [100], [0, 0, 0, 0, 3]])
def test_refining_between_draft_steps_changes_nothing_in_the_text(llama: Model, url: str, arrivals: list[int]) -> None:
    make_cache(llama, url)
    endless = dataclasses.replace(llama, eos_token_ids=frozenset())
    want = plain_decoding(endless, url, [5, 6], NEW_TOKENS)
    with ScriptedReader(url, arrivals=arrivals) as reader:
        got = generate(reader, endless, [5, 6], max_new_tokens=NEW_TOKENS, pace=Tireless())
    assert got.token_ids == want
    # a draft ends when the last of the six segments has arrived
    assert got.drafted == {8: 7, 3: 2, 1: 0, 5: 24}[len(arrivals)]


def test_a_residual_that_is_there_already_leaves_nothing_to_speculate(llama: Model, url: str) -> None:
    make_cache(llama, url)
    events: list[Event] = []
    with ScriptedReader(url, arrivals=[100]) as reader:
        got = generate(reader, llama, [5], max_new_tokens=4, on_event=events.append)
    assert (got.drafted, got.accepted, got.first_draft_s) == (0, 0, None)
    assert not [event for event in events if isinstance(event, Drafted | Rejected)]

    assert got.notes == ["no draft: the full cache is there before a draft would pay"]


@pytest.mark.parametrize(
    ("options", "early"),
    [({"speculate": 4}, True), ({}, True), ({"verify": "none"}, True), ({"speculate": "off"}, False)],
)
@pytest.mark.parametrize("codec", [None, "int8"])
def test_a_step_runs_on_the_first_layers_while_the_others_arrive(
    llama: Model, url: str, monkeypatch: pytest.MonkeyPatch, codec: Any, options: dict[str, Any], early: bool
) -> None:
    make_cache(llama, url, codec=codec)
    # One segment a range, and none taken before it is waited for.
    monkeypatch.setattr("lynxkv.fetch.options.RANGE_BYTES", 1)
    monkeypatch.setattr(SegmentStream, "ready", lambda self: [])
    decoded = 0
    decoded_before_steps: list[int] = []
    step = Model.step

    def spy(self: Model, *args: Any, **options: Any) -> Any:
        decoded_before_steps.append(decoded)
        return step(self, *args, **options)

    def count(event: Event) -> None:
        nonlocal decoded
        decoded += isinstance(event, Span) and event.track == "decode"

    want = plain_decoding(llama, url, [5, 6], 4) if options.get("verify") != "none" else None
    monkeypatch.setattr(Model, "step", spy)
    with open_cache(url) as reader:
        got = generate(reader, llama, [5, 6], max_new_tokens=4, on_event=count, **options)
    assert want in (got.token_ids, None)
    assert (decoded_before_steps[0] < decoded_before_steps[-1]) is early


def test_a_missing_residual_leaves_the_anchors_text_only_where_that_is_allowed(llama: Model, url: str) -> None:
    make_cache(llama, url)
    with open_cache(url) as reader:
        want = generate(reader, llama, [5], max_new_tokens=NEW_TOKENS, verify="none").token_ids
    next(Path(url).glob("residual-*")).unlink()
    with open_cache(url) as reader, pytest.raises(CacheNotFoundError):
        generate(reader, llama, [5], max_new_tokens=NEW_TOKENS)
    events: list[Event] = []
    options = FetchOptions(if_residual_unavailable="anchor-only")
    with open_cache(url, options=options) as reader:
        got = generate(reader, llama, [5], max_new_tokens=NEW_TOKENS, speculate=4, on_event=events.append)
    assert (got.token_ids, got.precision, got.bytes_residual) == (want, "anchor", 0)
    assert got.notes[0].startswith("the Residual is not to be had, so the text is that of the Anchor alone: ")
    told = Counter(type(event) for event in events)
    assert told[Note] == 1
    drafted = [event.token_id for event in events if isinstance(event, Drafted)]
    assert [token for event in events if isinstance(event, Rejected) for token in event.token_ids] == drafted


def test_memory_bounds_a_draft_whatever_is_asked_for(llama: Model, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make_cache(llama, url)
    monkeypatch.setattr(draft, "DRAFT_BYTES", 3 * 4 * llama.vocab_tokens * 5)
    endless = dataclasses.replace(llama, eos_token_ids=frozenset())
    with ScriptedReader(url) as reader:
        assert generate(reader, endless, [5], max_new_tokens=NEW_TOKENS, speculate=20).drafted == 5


def test_a_draft_that_fares_worse_than_was_learnt_is_told(llama: Model, url: str) -> None:
    make_cache(llama, url, codec=Uniform(key_step=2.0, value_step=2.0, radix=32))
    pace = Pace()
    pace.verified("full", 10_000, 10_000)
    for first in range(3, 40):
        before = pace.acceptance("full")
        with ScriptedReader(url) as reader:
            got = generate(reader, llama, [first], max_new_tokens=NEW_TOKENS, speculate=10, pace=pace)
        if got.accepted < got.drafted:
            break
        assert got.notes == []
        assert pace.acceptance("full") > before
    assert got.notes == [
        f"only {got.accepted} of {got.drafted} draft tokens passed: the Anchor is coarse for this text; "
        "`lynxkv encode --codec quality` makes a finer one"
    ]
    assert pace.acceptance("full") < before


@pytest.mark.parametrize("codec", ["raw", "int8"])
def test_caches_without_residual_are_decoded_at_once(llama: Model, url: str, codec: str) -> None:
    make_cache(llama, url, codec=codec)
    with open_cache(url) as reader:
        got = generate(reader, llama, [5, 6], max_new_tokens=NEW_TOKENS)
    assert got.token_ids == plain_decoding(llama, url, [5, 6], NEW_TOKENS)
    assert (got.precision, got.drafted, got.bytes_residual, got.full_s) == ("full", 0, 0, None)


def test_verification_turned_off_decodes_on_the_anchor_and_says_so(llama: Model, url: str) -> None:
    make_cache(llama, url)
    with open_cache(url) as reader:
        got = generate(reader, llama, [5, 6], max_new_tokens=NEW_TOKENS, verify="none")
    cache = LynxCache.load(url, llama, new_tokens=40, precision="anchor")
    first = int(llama.step(cache, [5, 6])[0].argmax())
    assert got.token_ids[0] == first
    assert (got.precision, got.drafted, got.bytes_residual, got.full_s) == ("anchor", 0, 0, None)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("speculate", ["auto", "off"])
def test_an_empty_suffix_runs_the_last_cached_token_again(family: str, url: str, speculate: Any) -> None:
    model = tiny_model(family)
    _, ids = make_cache(model, url)
    with ScriptedReader(url, arrivals=[0, 0, 4]) as reader:
        got = generate(reader, model, [], max_new_tokens=NEW_TOKENS, speculate=speculate)
    cache = LynxCache.load(url, model, new_tokens=NEW_TOKENS)
    cache.rollback(len(ids) - 1)
    pending, want = ids[-1:], list[int]()
    while len(want) < len(got.token_ids):
        pending = [int(model.step(cache, pending)[0].argmax())]
        want += pending
    assert got.token_ids == want


def test_hidden_token_ids_are_asked_for_by_name(llama: Model, url: str) -> None:
    make_cache(llama, url, store_token_ids=False)
    with open_cache(url) as reader:
        assert generate(reader, llama, [5], max_new_tokens=2).token_ids
        with pytest.raises(InputError, match="does not store its token ids"):
            generate(reader, llama, [])
        with pytest.raises(InputError, match="does not store its token ids"):
            generate(reader, llama, [5], sampling=Sampling(repetition_penalty=1.2))


def test_the_penalty_counts_cached_tokens(llama: Model, url: str) -> None:
    _, ids = make_cache(llama, url, ids=[5, 9, 11, 13] * 8)
    penalty = Sampling(repetition_penalty=1e6)
    with open_cache(url) as reader:
        got = generate(reader, llama, [6], max_new_tokens=20, sampling=penalty, speculate=8)
    assert not set(got.token_ids) & {*ids, 6}
    assert len(set(got.token_ids)) == len(got.token_ids)


def test_events_tell_the_story_and_add_up(llama: Model, url: str) -> None:
    make_cache(llama, url, ids=some_ids(PROMPT_TOKENS, 3))
    events: list[Event] = []
    with ScriptedReader(url, arrivals=[0, 0, 2, 0, 0]) as reader:
        got = generate(reader, llama, [5], max_new_tokens=NEW_TOKENS, speculate=9, on_event=events.append)
    phases = [event.name for event in events if isinstance(event, Phase)]
    assert phases == ["anchor", "draft", "refine", "verify", "decode"]
    drafted = [event.token_id for event in events if isinstance(event, Drafted)]
    verified = [token for event in events if isinstance(event, Verified) for token in event.token_ids]
    rejected = [token for event in events if isinstance(event, Rejected) for token in event.token_ids]
    assert verified == got.token_ids
    assert drafted == [*got.token_ids[: got.accepted], *rejected]
    assert "".join(event.text for event in events if isinstance(event, Verified)) == got.text
    assert got.text == llama.to_text(got.token_ids)
    # nothing stands before the cache is whole
    kinds = [type(event) for event in events]
    whole = max(number for number, event in enumerate(events) if isinstance(event, ResidualProgress))
    assert kinds.index(Verified) > whole
    for progress, total in ((AnchorProgress, got.bytes_anchor), (ResidualProgress, got.bytes_residual)):
        done = [event.bytes for event in events if isinstance(event, progress)]
        assert done == sorted(done)
        assert done[-1] == total


@pytest.mark.parametrize("options", [{"speculate": 6}, {"speculate": "off"}, {"sampling": Sampling(temperature=2.0)}])
def test_log_probabilities_are_those_of_the_full_cache(llama: Model, url: str, options: dict[str, Any]) -> None:
    """Before temperature, and of the refined cache: what drafts were proposed with has no part in them."""
    make_cache(llama, url)
    told: list[TokenLogprobs] = []

    def on_event(event: Event) -> None:
        told.extend(event.logprobs or () if isinstance(event, Verified) else ())

    with open_cache(url) as reader:
        got = generate(reader, llama, [5, 6], max_new_tokens=8, top_logprobs=3, on_event=on_event, **options)
        plain: list[Event] = []
        generate(reader, llama, [5, 6], max_new_tokens=2, on_event=plain.append)
    assert next(event.logprobs for event in plain if isinstance(event, Verified)) is None
    cache = LynxCache.load(url, llama, new_tokens=16)
    logits = llama.step(cache, [5, 6, *got.token_ids[:-1]], rows=len(got.token_ids))
    own = logits.log_softmax(-1)
    assert [entry.token_id for entry in told] == got.token_ids
    for entry, row in zip(told, own, strict=True):
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-5)
        best = row.topk(3)
        assert [token for token, _ in entry.top] == best.indices.tolist()
        assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_times_and_bytes_are_plausible(llama: Model, url: str) -> None:
    make_cache(llama, url)
    with ScriptedReader(url) as reader:
        got = generate(reader, llama, [5], max_new_tokens=NEW_TOKENS, speculate=4)
        assert got.first_draft_s is not None
        assert got.full_s is not None
        assert got.first_verified_s is not None
        assert got.anchor_s is not None
        assert 0 < got.anchor_s < got.first_draft_s < got.full_s < got.first_verified_s <= got.total_s
        assert (got.bytes_anchor, got.bytes_residual) == (reader.bytes_anchor, reader.bytes_residual)
    assert got.peak_bytes == sum(got.peak_parts.values())
    # K and V f32 of 30 prompt, 1 suffix and 24 new tokens, 3 layers, 2 heads, 8 dims
    assert got.peak_parts["cache"] == 2 * 4 * 55 * 3 * 2 * 8
    assert got.peak_parts["codes"] > 0


@pytest.mark.parametrize("speculate", [3, "off"])
def test_end_of_text_and_length_hold_for_verified_text(llama: Model, url: str, speculate: Any) -> None:
    make_cache(llama, url)
    want = plain_decoding(llama, url, [5], NEW_TOKENS)
    for position in range(8):
        ending = dataclasses.replace(llama, eos_token_ids=frozenset([want[position]]))
        with ScriptedReader(url) as reader:
            got = generate(reader, ending, [5], max_new_tokens=NEW_TOKENS, speculate=speculate)
        assert got.token_ids == want[: want.index(want[position]) + 1]
        assert got.stopped == "eos"
        with ScriptedReader(url) as reader:
            got = generate(reader, llama, [5], max_new_tokens=position + 1, speculate=speculate)
        assert (got.token_ids, got.stopped) == (want[: position + 1], "length")


@pytest.mark.parametrize("speculate", [6, "off"])
def test_stop_strings_end_the_verified_text(llama: Model, url: str, speculate: Any) -> None:
    make_cache(llama, url)
    want = plain_decoding(llama, url, [5], NEW_TOKENS)
    stop = llama.to_text([want[3]])
    text = llama.to_text(want)
    with ScriptedReader(url) as reader:
        got = generate(reader, llama, [5], max_new_tokens=NEW_TOKENS, speculate=speculate, stop=[stop])
    assert got.text == text[: text.index(stop)]
    assert got.stopped == "stop"


def test_drafted_tokens_beyond_the_end_are_reported_as_rejected(llama: Model, url: str) -> None:
    make_cache(llama, url, codec=Uniform(key_step=0.01, value_step=0.01, radix=2))
    want = plain_decoding(llama, url, [5], NEW_TOKENS)
    events: list[Event] = []
    with ScriptedReader(url) as reader:
        got = generate(
            reader,
            llama,
            [5],
            max_new_tokens=NEW_TOKENS,
            speculate=8,
            stop=[llama.to_text([want[2]])],
            on_event=events.append,
        )
    assert got.accepted == len(got.token_ids) < 8
    (rejected,) = [event for event in events if isinstance(event, Rejected)]
    assert rejected.token_ids == want[got.accepted : 8]


@pytest.mark.parametrize("fail_after", [0, 2, 5])
@pytest.mark.parametrize("arrivals", [[], [100]])
def test_a_lost_residual_gives_an_error_and_no_verified_text(
    llama: Model, url: str, fail_after: int, arrivals: list[int]
) -> None:
    make_cache(llama, url)
    events: list[Event] = []
    with (
        ScriptedReader(url, arrivals=arrivals, fail_after=fail_after) as reader,
        pytest.raises(FetchError, match="the link is gone"),
    ):
        generate(reader, llama, [5], max_new_tokens=NEW_TOKENS, speculate=4, on_event=events.append)
    assert not [event for event in events if isinstance(event, Verified)]


def test_a_missing_residual_is_an_error_on_the_real_reader(llama: Model, url: str) -> None:
    make_cache(llama, url)
    for file in Path(url).glob("residual-*"):
        file.unlink()
    before = threading.active_count()
    with open_cache(url) as reader, pytest.raises(FileNotFoundError, match="Residual"):
        generate(reader, llama, [5], max_new_tokens=NEW_TOKENS)
    for thread in threading.enumerate():
        if thread.name.startswith("lynxkv-fetch"):
            thread.join(timeout=5)
    assert threading.active_count() <= before


def test_another_model_is_refused_before_anything_is_read(llama: Model, url: str) -> None:
    make_cache(llama, url)
    events: list[Event] = []
    for other in (tiny_model("llama", seed=1), tiny_model("qwen2")):
        with open_cache(url) as reader, pytest.raises(IdentityError) as caught:
            generate(reader, other, [5], on_event=events.append)
        assert caught.value.field == "fingerprint"
    assert not events


def test_a_cache_without_identity_is_still_held_to_the_models_shapes(llama: Model, url: str) -> None:
    encode(prefill(llama, some_ids(20)), url)
    with open_cache(url) as reader, pytest.raises(IdentityError, match="does not fit the model"):
        generate(reader, tiny_model("phi"), [5])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"max_new_tokens": 2.5}, "max_new_tokens is 2.5"),
        ({"stop": [5]}, "not a string"),
        ({"speculate": 0}, "speculate is 0"),
        ({"speculate": "often"}, "speculate is 'often'"),
        ({"verify": "some"}, "verify is 'some'"),
        ({"suffix_ids": [5] * 500}, "leave no room"),
        ({"suffix_ids": [48]}, "outside the model's vocabulary"),
        ({"suffix_ids": [5.0]}, "not an integer"),
        ({"stop": "w7"}, "stop is one string"),
        ({"stop": ["w7", ""]}, "a stop string is empty"),
    ],
)
def test_options_out_of_range_are_refused(llama: Model, url: str, options: dict[str, Any], message: str) -> None:
    make_cache(llama, url)
    with open_cache(url) as reader, pytest.raises(InputError, match=message):
        generate(reader, llama, **{"suffix_ids": [5], **options})


def test_text_ends_where_the_models_context_does(llama: Model, url: str) -> None:
    make_cache(llama, url)
    model = dataclasses.replace(llama, context_tokens=40)
    with open_cache(url) as reader:
        got = generate(reader, model, [5, 6], max_new_tokens=100)
    assert (len(got.token_ids), got.stopped) == (8, "length")


def test_same_seed_same_text_another_seed_another(llama: Model, url: str) -> None:
    make_cache(llama, url)

    def run(seed: int) -> GenerateResult:
        with ScriptedReader(url) as reader:
            sampling = dataclasses.replace(SAMPLED, seed=seed)
            return generate(reader, llama, [5], max_new_tokens=NEW_TOKENS, sampling=sampling, speculate=6)

    assert run(1).token_ids == run(1).token_ids
    assert len({tuple(run(seed).token_ids) for seed in range(4)}) > 1


@pytest.mark.slow
def test_sampled_text_of_a_run_follows_the_full_cache(url: str) -> None:
    """Two tokens over a vocabulary of 12, top-p and penalty on, against their exact probabilities."""
    model = tiny_model("llama", vocab_size=12, num_hidden_layers=1, initializer_range=0.4)
    ids = some_ids(20, vocab=12)
    make_cache(model, url, ids=ids, codec=Uniform(key_step=3.0, value_step=3.0, radix=32))
    suffix = [4, 7]
    exact: dict[tuple[int, ...], float] = {}
    cache = LynxCache.load(url, model, new_tokens=8)
    first = SAMPLED.distribution(model.step(cache, suffix)[0], [*ids, *suffix])
    for token in range(12):
        cache.rollback(len(ids) + len(suffix))
        second = SAMPLED.distribution(model.step(cache, [token])[0], [*ids, *suffix, token])
        exact.update({(token, other): float(first[token] * second[other]) for other in range(12)})
    never_ending = dataclasses.replace(model, eos_token_ids=frozenset())
    counts, anchor_counts, accepted = Counter[tuple[int, ...]](), Counter[tuple[int, ...]](), Counter[int]()
    with ScriptedReader(url) as reader:
        for seed in range(3000):
            sampling = dataclasses.replace(SAMPLED, seed=seed)
            events: list[Event] = []
            got = generate(
                reader,
                never_ending,
                suffix,
                max_new_tokens=2,
                speculate=2,
                sampling=sampling,
                on_event=events.append,
            )
            counts[tuple(got.token_ids)] += 1
            anchor_counts[tuple(event.token_id for event in events if isinstance(event, Drafted))] += 1
            accepted[got.accepted] += 1
    assert chi_square_z(counts, exact) < 4
    # The draft alone would fail this test, and all outcomes of the rule occurred.
    assert chi_square_z(anchor_counts, exact) > 8
    assert min(accepted[n] for n in range(3)) > 30, accepted
