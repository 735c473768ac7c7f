"""Verification against the original cache: full text is provisional, the exact section decides."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lynxkv import runner
from lynxkv.codecs.uniform import Uniform
from lynxkv.encoder import encode
from lynxkv.errors import ChecksumError, FetchError, IdentityError, InputError
from lynxkv.events import Drafted, Event, GenerateResult, Phase, Provisional, Rejected, ResidualProgress, Verified
from lynxkv.fetch import open_cache
from lynxkv.integrations.hf import LynxCache, Model
from lynxkv.kv import KVLayer
from lynxkv.models import prefill_with_logits
from lynxkv.runner import generate
from lynxkv.sampling import Sampling
from lynxkv.testing.readers import ScriptedReader
from lynxkv.testing.statistics import chi_square_z
from lynxkv.testing.tiny_models import FAMILIES, tiny_model
from lynxkv.verify import Acceptance, accept

PROMPT_TOKENS, NEW_TOKENS = 30, 24
# Anchor and full precision are both coarse enough to mislead the model now and then.
COARSE = Uniform(key_step=0.9, value_step=1.1, radix=2)
SAMPLED = Sampling(temperature=1.0, top_p=0.9, repetition_penalty=1.3)


def some_ids(count: int, seed: int = 0, vocab: int = 48) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocab, (count,), generator=generator).tolist()


def make_cache(
    model: Model, url: str, *, ids: Sequence[int] | None = None, codec: Any = COARSE, **settings: Any
) -> LynxCache:
    """Encode a prompt with an exact section; returns the original rounded to bf16, on which plain decoding runs."""
    ids = list(ids or some_ids(PROMPT_TOKENS))
    filled = prefill_with_logits(model, ids)
    logits = filled.logits if settings.pop("logits", False) else None
    settings = {"exact": True, "identity": model.identity, **settings}
    encode(filled.kv, url, codec=codec, logits=logits, overwrite=True, **settings)
    cache = LynxCache.load(url, model, new_tokens=200)
    for number, layer in enumerate(filled.kv.layers):
        copy_rounded(layer, cache, number)
    return cache


def copy_rounded(layer: KVLayer, cache: LynxCache, number: int) -> None:
    for name, tensor in layer.tensors.items():
        cache.target(number, name).copy_(tensor.to(torch.bfloat16))


def plain_decoding(model: Model, cache: LynxCache, pending: list[int], new_tokens: int) -> list[int]:
    """Greedy decoding without lynxkv's runner."""
    out: list[int] = []
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
def test_greedy_text_is_that_of_the_original(family: str, url: str) -> None:
    model = tiny_model(family)
    kept, rejected = Counter[bool](), Counter[bool]()
    for seed in range(4):
        ids = some_ids(PROMPT_TOKENS, seed)
        for suffix in ([5, 6, 7], some_ids(70, seed + 50)):
            want = plain_decoding(model, make_cache(model, url, ids=ids), suffix, NEW_TOKENS)
            for speculate in (3, "auto", "off"):
                with ScriptedReader(url, arrivals=[1] * 9 if seed % 2 else []) as reader:
                    got = generate(
                        reader, model, suffix, max_new_tokens=NEW_TOKENS, speculate=speculate, verify="exact"
                    )
                assert got.token_ids == want
                assert got.precision == "exact"
                if speculate == 3:
                    kept[got.accepted > 0] += 1
                    rejected[got.accepted_exact < got.provisional] += 1
    # The first verification let tokens pass, and the second one refused some that had.
    assert kept[True]
    assert rejected[True]


def test_a_cache_whose_anchor_is_full_has_one_stage(llama: Model, url: str) -> None:
    want = plain_decoding(llama, make_cache(llama, url, codec="int4"), [5, 6], NEW_TOKENS)
    for speculate in (4, "auto"):
        with ScriptedReader(url) as reader:
            got = generate(reader, llama, [5, 6], max_new_tokens=NEW_TOKENS, speculate=speculate, verify="exact")
        assert got.token_ids == want
        assert (got.provisional, got.first_provisional_s) == (0, None)
        assert got.drafted > 0


@pytest.mark.parametrize("arrivals", [[], [7, 0, 0, 2, 1, 3], [0, 3, 3, 0, 2, 2, 0, 2], [100], [0, 100], [8, 3]])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("suffix", [[], [5, 6]])
def test_correcting_between_draft_steps_changes_nothing_in_the_text(
    family: str, url: str, arrivals: list[int], suffix: list[int]
) -> None:
    model = dataclasses.replace(tiny_model(family), eos_token_ids=frozenset())
    for seed in range(3):
        ids = some_ids(PROMPT_TOKENS, seed)
        original = make_cache(model, url, ids=ids)
        if not suffix:
            original.rollback(PROMPT_TOKENS - 1)
        want = plain_decoding(model, original, suffix or ids[-1:], NEW_TOKENS)
        for speculate in (4, "auto"):
            with ScriptedReader(url, arrivals=arrivals) as reader:
                got = generate(reader, model, suffix, max_new_tokens=NEW_TOKENS, speculate=speculate, verify="exact")
            assert got.token_ids == want


def test_what_arrived_with_the_residual_needs_no_second_stage(llama: Model, url: str) -> None:
    want = plain_decoding(llama, make_cache(llama, url), [5], NEW_TOKENS)
    events: list[Event] = []
    with ScriptedReader(url, arrivals=[100]) as reader:
        got = generate(reader, llama, [5], max_new_tokens=NEW_TOKENS, verify="exact", on_event=events.append)
    assert got.token_ids == want
    assert (got.provisional, got.accepted_exact, got.first_provisional_s) == (0, 0, None)
    assert not [event for event in events if isinstance(event, Provisional)]


def test_events_tell_both_stages(llama: Model, url: str) -> None:
    make_cache(llama, url, ids=some_ids(PROMPT_TOKENS, 3))
    model = dataclasses.replace(llama, eos_token_ids=frozenset())
    events: list[Event] = []
    with ScriptedReader(url) as reader:
        got = generate(
            reader, model, [5], max_new_tokens=NEW_TOKENS, speculate=6, verify="exact", on_event=events.append
        )
        total = reader.bytes_residual + reader.bytes_exact
        assert (got.bytes_residual, got.bytes_exact) == (reader.bytes_residual, reader.bytes_exact)
    phases = [event.name for event in events if isinstance(event, Phase)]
    assert phases == ["anchor", "draft", "refine", "verify", "draft", "refine", "verify", "decode"]
    (provisional,) = [event for event in events if isinstance(event, Provisional)]
    place = events.index(provisional)
    drafted = [event.token_id for event in events[:place] if isinstance(event, Drafted)]
    proposed = [event.token_id for event in events[place:] if isinstance(event, Drafted)]
    assert provisional.token_ids[: got.accepted] == drafted[: got.accepted]
    assert (len(drafted), len(provisional.token_ids)) == (got.drafted, got.accepted + 1)
    assert provisional.text == model.to_text(provisional.token_ids)
    second = [*provisional.token_ids, *proposed]
    assert len(second) == got.provisional
    assert second[: got.accepted_exact] == got.token_ids[: got.accepted_exact]
    rejected = [token for event in events[place:] if isinstance(event, Rejected) for token in event.token_ids]
    assert rejected == second[got.accepted_exact :]
    # Nothing stands before the original is there.
    whole = max(number for number, event in enumerate(events) if isinstance(event, ResidualProgress))
    first = next(number for number, event in enumerate(events) if isinstance(event, Verified))
    assert place < whole < first
    assert [token for event in events if isinstance(event, Verified) for token in event.token_ids] == got.token_ids
    done = [event.bytes for event in events if isinstance(event, ResidualProgress)]
    assert done == sorted(done)
    assert done[-1] == total
    times = (got.anchor_s, got.first_draft_s, got.full_s, got.first_provisional_s, got.exact_s, got.first_verified_s)
    assert list(times) == sorted(time or 0.0 for time in times)


@pytest.mark.parametrize("speculate", [3, "auto", "off"])
def test_ends_hold_in_both_stages(llama: Model, url: str, speculate: Any) -> None:
    def run(model: Model, new_tokens: int, stop: Sequence[str] = ()) -> GenerateResult:
        with ScriptedReader(url, arrivals=[0, 2, 9]) as reader:
            return generate(
                reader, model, [5], max_new_tokens=new_tokens, speculate=speculate, verify="exact", stop=stop
            )

    want = plain_decoding(llama, make_cache(llama, url), [5], NEW_TOKENS)
    for position in range(8):
        got = run(dataclasses.replace(llama, eos_token_ids=frozenset([want[position]])), NEW_TOKENS)
        assert got.token_ids == want[: want.index(want[position]) + 1]
        assert got.stopped == "eos"
        got = run(llama, position + 1)
        assert (got.token_ids, got.stopped) == (want[: position + 1], "length")
    text, end = llama.to_text(want), llama.to_text([want[3]])
    got = run(llama, NEW_TOKENS, [end])
    assert (got.text, got.stopped) == (text[: text.index(end)], "stop")


def test_without_speculation_the_original_is_waited_for(llama: Model, url: str) -> None:
    make_cache(llama, url)
    with open_cache(url) as reader:
        got = generate(reader, llama, [5], max_new_tokens=4, speculate="off", verify="exact")
        assert got.bytes_exact == reader.bytes_exact
    assert (got.drafted, got.provisional, got.first_provisional_s) == (0, 0, None)
    assert got.exact_s is not None


@pytest.mark.parametrize(("settings", "same"), [({"codec": "raw"}, True), ({"codec": "alg1"}, False)])
def test_other_codecs_reach_the_original_too(llama: Model, url: str, settings: dict[str, Any], same: bool) -> None:
    want = plain_decoding(llama, make_cache(llama, url, **settings), [5, 6], NEW_TOKENS)
    with open_cache(url) as reader:
        got = generate(reader, llama, [5, 6], max_new_tokens=NEW_TOKENS, verify="exact")
    assert (got.token_ids, got.precision) == (want, "exact")
    assert (got.bytes_exact == 0) == same


def test_the_exact_section_is_not_fetched_unless_asked_for(llama: Model, url: str) -> None:
    make_cache(llama, url)
    with open_cache(url) as reader:
        got = generate(reader, llama, [5], max_new_tokens=4)
    assert (got.precision, got.bytes_exact, got.exact_s) == ("full", 0, None)


def test_a_cache_without_exact_section_is_refused_before_any_work(llama: Model, url: str) -> None:
    make_cache(llama, url, exact=False)
    events: list[Event] = []
    with open_cache(url) as reader, pytest.raises(InputError, match="no exact section") as caught:
        generate(reader, llama, [5], verify="exact", on_event=events.append)
    assert "encode --exact" in str(caught.value.hint)
    assert not events


def test_a_model_too_narrow_for_full_values_is_refused(llama: Model, url: str) -> None:
    make_cache(llama, url)
    half: Any = tiny_model("llama").hf
    narrow = dataclasses.replace(llama, hf=half.to(torch.float16))
    with open_cache(url) as reader, pytest.raises(InputError, match="float16"):
        generate(reader, narrow, [5], verify="exact")
    with pytest.raises(InputError, match="float16"):
        LynxCache.load(url, narrow, new_tokens=4, precision="exact")


@pytest.mark.parametrize("fail_after", [6, 7, 11])
@pytest.mark.parametrize("arrivals", [[], [100], [0, 6, 0, 0, 0, 0, 6]])
def test_a_lost_exact_section_gives_an_error_and_no_verified_text(
    llama: Model, url: str, fail_after: int, arrivals: list[int]
) -> None:
    make_cache(llama, url)
    events: list[Event] = []
    with (
        ScriptedReader(url, arrivals=arrivals, fail_after=fail_after) as reader,
        pytest.raises(FetchError, match="the link is gone"),
    ):
        generate(reader, llama, [5], max_new_tokens=8, speculate=4, verify="exact", on_event=events.append)
    assert not [event for event in events if isinstance(event, Verified)]


def test_damage_in_the_exact_section_is_told_by_its_type(llama: Model, url: str) -> None:
    make_cache(llama, url)
    (residual,) = Path(url).glob("residual-*")
    data = bytearray(residual.read_bytes())
    with open_cache(url) as reader:
        head = reader.read_residual_head()
    segment = next(item for item in head.segments if item.plan.part == "exact")
    data[head.header_bytes + segment.offset + 3] ^= 1
    residual.write_bytes(data)
    with open_cache(url) as reader:
        assert generate(reader, llama, [5], max_new_tokens=4).token_ids
    with open_cache(url) as reader, pytest.raises(ChecksumError):
        generate(reader, llama, [5], max_new_tokens=4, verify="exact")


@pytest.mark.parametrize("speculate", [3, "auto", "off"])
def test_stored_logits_give_the_first_token_before_any_kv(llama: Model, url: str, speculate: Any) -> None:
    for seed in range(5):
        original = make_cache(llama, url, ids=some_ids(PROMPT_TOKENS, seed), logits=True, store_token_ids=False)
        events: list[Event] = []
        with ScriptedReader(url, arrivals=[0, 2, 0, 9]) as reader:
            stored = reader.logits()
            assert stored is not None
            first = int(stored.argmax())
            want = [first, *plain_decoding(llama, original, [first], NEW_TOKENS - 1)]
            got = generate(
                reader,
                llama,
                [],
                max_new_tokens=NEW_TOKENS,
                speculate=speculate,
                verify="exact",
                on_event=events.append,
            )
        assert got.token_ids == want
        assert isinstance(events[0], Verified)
        assert events[0].token_ids == [first]
        assert got.first_verified_s < (got.anchor_s or 0.0)
        assert "".join(event.text for event in events if isinstance(event, Verified)) == got.text
        assert got.text == llama.to_text(want)


def test_stored_logits_alone_answer_with_one_token(llama: Model, url: str) -> None:
    make_cache(llama, url, logits=True)
    with ScriptedReader(url, fail_after=0) as reader:
        got = generate(reader, llama, [], max_new_tokens=1, verify="exact")
        assert got.bytes_anchor < reader.bytes_anchor
    assert (len(got.token_ids), got.stopped, got.precision, got.anchor_s) == (1, "length", "exact", None)


def test_stored_logits_are_for_the_exact_target_and_an_empty_suffix(llama: Model, url: str) -> None:
    make_cache(llama, url, logits=True)
    for suffix, verify in (([], "full"), ([5], "exact")):
        events: list[Event] = []
        with open_cache(url) as reader:
            generate(reader, llama, suffix, max_new_tokens=2, verify=verify, on_event=events.append)  # type: ignore[arg-type]
        assert isinstance(events[0], Phase)


def test_logits_of_another_vocabulary_are_refused(llama: Model, url: str) -> None:
    filled = prefill_with_logits(llama, some_ids(20))
    encode(filled.kv, url, exact=True, logits=filled.logits[:-1])
    with open_cache(url) as reader, pytest.raises(IdentityError) as caught:
        generate(reader, llama, [], verify="exact")
    assert caught.value.field == "logits.tokens"


def test_the_first_token_is_drawn_from_the_stored_logits(llama: Model, url: str) -> None:
    """Temperature, top-p and penalty apply to it as to every other token."""
    ids = some_ids(PROMPT_TOKENS)
    make_cache(llama, url, ids=ids, logits=True)
    counts = Counter[int]()
    with open_cache(url) as reader:
        stored = reader.logits()
        assert stored is not None
        p = SAMPLED.distribution(torch.from_numpy(stored.copy()), ids)
        for seed in range(800):
            sampling = dataclasses.replace(SAMPLED, seed=seed)
            got = generate(reader, llama, [], max_new_tokens=1, verify="exact", sampling=sampling)
            counts[got.token_ids[0]] += 1
    assert chi_square_z(counts, {token: float(p[token]) for token in range(48)}) < 4


Rule = Callable[[Sequence[int], Sequence[Tensor], Callable[[int], Tensor], torch.Generator], Acceptance]


class DraftRowsAgain:
    """Wrong: the second stage divides by the distributions of the anchor instead of those of the full cache."""

    def __init__(self) -> None:
        self.rows: list[Tensor] = []
        self.calls = 0

    def __call__(
        self, token_ids: Sequence[int], q: Sequence[Tensor], p: Callable[[int], Tensor], generator: torch.Generator
    ) -> Acceptance:
        self.calls += 1
        first = self.calls % 2
        rows = list(q) if first else [*self.rows, *q[len(self.rows) :]][: len(q)]
        self.rows = rows if first else []
        return accept(token_ids, rows, p, generator)


def provisional_stands(
    token_ids: Sequence[int], q: Sequence[Tensor], p: Callable[[int], Tensor], generator: torch.Generator
) -> Acceptance:
    """Wrong: what passed once passes for good."""
    return accept(token_ids, [torch.zeros_like(row) for row in q], p, generator)


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [None, DraftRowsAgain, lambda: provisional_stands])
def test_sampled_text_of_two_stages_follows_the_original(
    wrong: Callable[[], Rule] | None, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two tokens over a vocabulary of 12, top-p and penalty on, against their exact probabilities."""
    model = tiny_model("llama", vocab_size=12, num_hidden_layers=1, initializer_range=0.4)
    model = dataclasses.replace(model, eos_token_ids=frozenset())
    ids, suffix = some_ids(20, vocab=12), [4, 7]
    cache = make_cache(model, url, ids=ids, codec=Uniform(key_step=4.0, value_step=4.0, radix=2))
    exact: dict[tuple[int, ...], float] = {}
    first = SAMPLED.distribution(model.step(cache, suffix)[0], [*ids, *suffix])
    for token in range(12):
        cache.rollback(len(ids) + len(suffix))
        second = SAMPLED.distribution(model.step(cache, [token])[0], [*ids, *suffix, token])
        exact.update({(token, other): float(first[token] * second[other]) for other in range(12)})
    if wrong is not None:
        monkeypatch.setattr(runner, "accept", wrong())
    texts, provisional, outcomes = Counter[tuple[int, ...]](), Counter[int](), Counter[tuple[int, int]]()
    with ScriptedReader(url, arrivals=[0, 1, 0, 1, 0, 1]) as reader:
        for seed in range(6000 if wrong is None else 1200):
            events: list[Event] = []
            sampling = dataclasses.replace(SAMPLED, seed=seed)
            got = generate(
                reader,
                model,
                suffix,
                max_new_tokens=2,
                speculate=1,
                sampling=sampling,
                verify="exact",
                on_event=events.append,
            )
            texts[tuple(got.token_ids)] += 1
            (passed,) = [event.token_ids for event in events if isinstance(event, Provisional)]
            provisional[passed[0]] += 1
            outcomes[got.accepted, got.accepted_exact] += 1
    z = chi_square_z(texts, exact)
    if wrong is not None:
        assert z > 8
        return
    assert z < 4
    # What passed the full cache would fail this test, and all outcomes of both rules occurred.
    assert chi_square_z(provisional, {token: float(first[token]) for token in range(12)}) > 8
    assert min(outcomes[a, b] for a in range(2) for b in range(3)) > 20, outcomes
