"""On a real model: where no draft pays, `generate` waits for the cache, says why, and the text is the same."""

from __future__ import annotations

from typing import Any

import pytest

from lynxkv.encoder import encode
from lynxkv.events import Drafted, Event, GenerateResult, Span
from lynxkv.fetch import CacheReader, open_cache
from lynxkv.integrations.hf import Model, open_turn, suffix
from lynxkv.models import prefill
from lynxkv.pace import Pace
from lynxkv.runner import generate
from lynxkv.store import Link
from lynxkv.testing.readers import ScriptedReader

pytestmark = pytest.mark.model

DOCUMENT = """The lighthouse at Cape Varn was built in 1871 by Ada Thornquist, an engineer from Bergen. It stands 41
metres tall and its lamp can be seen from 22 nautical miles away."""
COARSE = "alg1:alpha=20000,chunk_dtype=f32"
NEW_TOKENS = 12


@pytest.fixture(scope="module")
def caches(smollm2: Model, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """One that `default` has made, and one whose Anchor misleads."""
    from lynxkv.choices import parse_codec
    from lynxkv.codecs import get_codec

    kv = prefill(smollm2, open_turn(smollm2.tokenizer, DOCUMENT))
    urls = {}
    for text in ("default", COARSE):
        choice = parse_codec(text)
        urls[text] = str(tmp_path_factory.mktemp("waiting") / "document.lynx")
        encode(kv, urls[text], codec=get_codec(choice.name, **choice.params), identity=smollm2.identity)
    return urls


def ask(reader: CacheReader, model: Model, **options: Any) -> tuple[GenerateResult, list[Event]]:
    """An answer, and what of its events is drafting."""
    events: list[Event] = []
    with reader:
        result = generate(
            reader,
            model,
            suffix(model.tokenizer, "Who built the lighthouse?"),
            max_new_tokens=NEW_TOKENS,
            on_event=events.append,
            **options,
        )
    drafting = [event for event in events if isinstance(event, Drafted) or getattr(event, "track", "") == "draft"]
    return result, drafting


def test_a_residual_as_soon_as_the_anchor_leaves_nothing_to_draft(smollm2: Model, caches: dict[str, str]) -> None:
    url, pace = caches["default"], Pace()
    want, _ = ask(open_cache(url), smollm2, speculate="off")
    for _ in range(3):
        got, events = ask(ScriptedReader(url, arrivals=[10**6]), smollm2, pace=pace)
        assert got.token_ids == want.token_ids
        assert (got.drafted, got.first_draft_s) == (0, None)
        assert got.notes == ["no draft: the full cache is there before a draft would pay"]
        assert not [event for event in events if isinstance(event, Drafted)]


def test_after_drafts_that_all_fail_the_runs_that_follow_wait(smollm2: Model, caches: dict[str, str]) -> None:
    """Over a slow link too, where a draft would delay nothing: not even the question runs on the Anchor."""
    url, pace = caches[COARSE], Pace()
    want, _ = ask(open_cache(url), smollm2, speculate="off")
    first, events = ask(ScriptedReader(url), smollm2, speculate=8, pace=pace)
    assert (first.token_ids, first.drafted) == (want.token_ids, 8)
    assert first.accepted < 8
    assert [event for event in events if isinstance(event, Span)]
    # What many such windows would teach, were not a token of them right.
    for _ in range(20):
        pace.verified("full", 32, 0.0)
    for _ in range(2):
        got, events = ask(open_cache(url, link=Link.parse("8mbit/20ms")), smollm2, pace=pace)
        assert (got.token_ids, got.drafted, got.accepted) == (want.token_ids, 0, 0)
        assert not events
        assert got.notes == [
            "no draft: hardly a token of earlier ones passed, so the full cache is waited for: the Anchor is coarse "
            "for this text; `lynxkv encode --codec quality` makes a finer one"
        ]
