"""What OpenAI's client gets: the text of the full cache, whole or streamed, and nothing that a client must know of."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import openai
import pytest

import lynxkv
from lynxkv.events import Event, TokenLogprobs, Verified
from lynxkv.integrations.hf import Model, conversation, open_turn, suffix
from lynxkv.server.uncached import generate_uncached
from tests.server.conftest import DOCUMENT, QUESTION

if TYPE_CHECKING:
    from tests.server.conftest import Running

CACHE = {"lynx": {"cache": "docs/report.lynx"}}
MODEL = "org/tiny"
MESSAGES: Any = [{"role": "user", "content": QUESTION}]
SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "schemas" / "serve.schema.json").read_text("utf-8"))


def expected(model: Model, store: Path, suffix_ids: list[int], **options: Any) -> Any:
    """The serial answer, without speculation."""
    with lynxkv.open(store / "docs" / "report.lynx") as reader:
        return lynxkv.generate(reader, model, suffix_ids, speculate="off", **options)


def check_lynx(content: Any, name: str) -> None:
    """Hold a `lynx` field to the documented schema."""
    schema = {"$ref": f"#/$defs/{name}", "$defs": SCHEMA["$defs"]}
    jsonschema.validate(content, schema, cls=jsonschema.Draft202012Validator)


def test_models(server: Running) -> None:
    assert [model.id for model in server.client.models.list()] == [MODEL]
    assert server.client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError, match="there is no model"):
        server.client.models.retrieve("other")


def test_a_chat_over_a_cache(server: Running, model: Model, store: Path) -> None:
    answer = server.client.chat.completions.create(
        model=MODEL, messages=MESSAGES, temperature=0, max_tokens=16, extra_body=CACHE
    )
    own = expected(model, store, suffix(model.tokenizer, QUESTION), max_new_tokens=16)
    assert answer.choices[0].message.content == own.text
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == ("length" if own.stopped == "length" else "stop")
    cached = len(open_turn(model.tokenizer, DOCUMENT))
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == cached
    assert answer.usage.prompt_tokens == cached + len(suffix(model.tokenizer, QUESTION))
    assert answer.usage.completion_tokens == len(own.token_ids)
    lynx = answer.model_extra["lynx"]  # type: ignore[index]
    check_lynx(lynx, "figures")
    assert (lynx["source"], lynx["cache"], lynx["precision"]) == ("cache", "docs/report.lynx", "full")


def test_a_stream_is_the_same_text(server: Running, model: Model, store: Path) -> None:
    chunks = list(
        server.client.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            temperature=0,
            max_completion_tokens=16,
            stream=True,
            stream_options={"include_usage": True},
            extra_body=CACHE,
        )
    )
    own = expected(model, store, suffix(model.tokenizer, QUESTION), max_new_tokens=16)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == own.text
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-2]] == [None] * (len(chunks) - 2)
    assert chunks[-2].choices[0].finish_reason is not None
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(own.token_ids)
    # Nothing but the last chunk speaks of lynxkv.
    assert ["lynx" in (chunk.model_extra or {}) for chunk in chunks[:-1]] == [False] * (len(chunks) - 2) + [True]


def test_drafts_are_told_beside_the_text(server: Running, model: Model, store: Path) -> None:
    chunks = list(
        server.client.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            temperature=0,
            max_tokens=16,
            stream=True,
            extra_body={"lynx": {"cache": "docs/report.lynx", "draft": True}},
        )
    )
    own = expected(model, store, suffix(model.tokenizer, QUESTION), max_new_tokens=16)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == own.text
    events: list[dict[str, Any]] = [chunk.model_extra["lynx"] for chunk in chunks[1:]]  # type: ignore[index]
    for event in events:
        check_lynx(event, "event")
    names = [event["event"] for event in events]
    assert {"phase", "anchor", "residual", "accept", "span"} <= set(names)
    assert names[-1] == "end"
    accepted = [token for event in events if event["event"] == "accept" for token in event["token_ids"]]
    assert accepted == own.token_ids
    drafted = [event["token_id"] for event in events if event["event"] == "draft"]
    retracted = [token for event in events if event["event"] == "retract" for token in event["token_ids"]]
    assert drafted == [*accepted[: len(drafted) - len(retracted)], *retracted]


def test_a_completion_goes_on_from_the_cached_text(server: Running, model: Model, store: Path) -> None:
    answer = server.client.completions.create(
        model=MODEL, prompt="w11 w12", temperature=0, max_tokens=8, extra_body=CACHE
    )
    own = expected(model, store, [11, 12], max_new_tokens=8)
    assert answer.choices[0].text == own.text
    stream = server.client.completions.create(
        model=MODEL, prompt=[[11, 12]], temperature=0, max_tokens=8, stream=True, extra_body=CACHE
    )
    assert "".join(chunk.choices[0].text for chunk in stream) == own.text


def test_without_a_cache_the_prompt_is_prefilled(server: Running, model: Model) -> None:
    messages: Any = [
        {"role": "system", "content": [{"type": "text", "text": "w20"}]},
        {"role": "user", "content": "w21 w22"},
        {"role": "assistant", "content": "w23"},
        {"role": "user", "content": "w24"},
    ]
    answer = server.client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=12)
    stock: Any = model.tokenizer.apply_chat_template(
        [{**message, "content": "w20"} if message["role"] == "system" else message for message in messages],
        add_generation_prompt=True,
    )
    own = generate_uncached(model, stock["input_ids"], max_new_tokens=12, sampling=lynxkv.Sampling())
    assert answer.choices[0].message.content == own.text
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(stock["input_ids"])
    assert answer.model_extra["lynx"]["source"] == "prefill"  # type: ignore[index]


def test_a_chat_over_a_cache_goes_on(server: Running, model: Model, store: Path) -> None:
    messages: Any = [*MESSAGES, {"role": "assistant", "content": "w30"}, {"role": "user", "content": "w31"}]
    answer = server.client.chat.completions.create(
        model=MODEL, messages=messages, temperature=0, max_tokens=8, extra_body=CACHE
    )
    pairs = [(message["role"], message["content"]) for message in messages]
    ids = conversation(model.tokenizer, pairs, turn="open")
    assert open_turn(model.tokenizer, DOCUMENT) + ids == conversation(
        model.tokenizer, [("user", f"{DOCUMENT}\n\n{QUESTION}"), *pairs[1:]]
    )
    assert answer.choices[0].message.content == expected(model, store, ids, max_new_tokens=8).text


def test_a_cache_that_does_not_say_how_it_ends(server: Running, model: Model, store: Path) -> None:
    """As with `lynxkv generate`, it ends as those of its model do."""
    identity = replace(model.identity, turn=None)
    kv = lynxkv.prefill(model, open_turn(model.tokenizer, DOCUMENT))
    lynxkv.encode(kv, store / "unsaid.lynx", identity=identity, overwrite=True)
    answer = server.client.chat.completions.create(
        model=MODEL, messages=MESSAGES, temperature=0, max_tokens=4, extra_body={"lynx": {"cache": "unsaid.lynx"}}
    )
    with lynxkv.open(store / "unsaid.lynx") as reader:
        own = lynxkv.generate(reader, model, suffix(model.tokenizer, QUESTION), max_new_tokens=4)
    assert answer.choices[0].message.content == own.text
    lynxkv.remove(store / "unsaid.lynx")


def test_a_stop_text_ends_the_answer(server: Running, model: Model, store: Path) -> None:
    whole = expected(model, store, suffix(model.tokenizer, QUESTION), max_new_tokens=16).text
    stop = whole.split()[3]
    answer = server.client.chat.completions.create(
        model=MODEL, messages=MESSAGES, temperature=0, max_tokens=16, stop=[stop], extra_body=CACHE
    )
    assert answer.choices[0].message.content == whole[: whole.find(stop)]
    assert answer.choices[0].finish_reason == "stop"


def own_logprobs(model: Model, store: Path, ids: list[int], tokens: int) -> list[TokenLogprobs]:
    """Of the serial answer, without speculation."""
    told: list[TokenLogprobs] = []

    def on_event(event: Event) -> None:
        told.extend(event.logprobs or () if isinstance(event, Verified) else ())

    expected(model, store, ids, max_new_tokens=tokens, top_logprobs=2, on_event=on_event)
    return told


@pytest.mark.parametrize("draft", [False, True])
def test_log_probabilities_of_a_chat(server: Running, model: Model, store: Path, draft: bool) -> None:
    options: Any = {
        "model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 8, "logprobs": True, "top_logprobs": 2
    }  # fmt: skip
    told = own_logprobs(model, store, suffix(model.tokenizer, QUESTION), 8)
    whole = server.client.chat.completions.create(**options, extra_body=CACHE)
    chunks = server.client.chat.completions.create(
        **options, stream=True, extra_body={"lynx": {**CACHE["lynx"], "draft": draft}}
    )
    streamed = [
        entry
        for chunk in chunks
        for choice in chunk.choices
        for entry in (choice.logprobs.content or [] if choice.logprobs else [])
    ]
    assert whole.choices[0].logprobs is not None
    content = whole.choices[0].logprobs.content
    assert content is not None
    for found in (content, streamed):
        # The text of a token is spelled without what joins it to others.
        assert [entry.token for entry in found] == [spelled(model, item.token_id) for item in told]
        assert [entry.logprob for entry in found] == pytest.approx([item.logprob for item in told], abs=1e-5)
        assert [bytes(entry.bytes or ()).decode() for entry in found] == [entry.token for entry in found]
        tops = [top for entry in found for top in entry.top_logprobs]
        assert [top.token for top in tops] == [spelled(model, token) for item in told for token, _ in item.top]
        assert [top.logprob for top in tops] == pytest.approx([v for item in told for _, v in item.top], abs=1e-5)
    none = server.client.chat.completions.create(**{**options, "top_logprobs": 0}, extra_body=CACHE)
    assert none.choices[0].logprobs is not None
    assert [entry.top_logprobs for entry in none.choices[0].logprobs.content or []] == [[]] * len(told)
    without = server.client.chat.completions.create(
        **{**options, "logprobs": None, "top_logprobs": None}, extra_body=CACHE
    )
    assert without.choices[0].logprobs is None


@pytest.mark.parametrize("cached", [False, True])
def test_log_probabilities_of_a_completion(server: Running, model: Model, store: Path, cached: bool) -> None:
    options: Any = {
        "model": MODEL, "prompt": "w11 w12", "temperature": 1.5, "seed": 3, "max_tokens": 8, "logprobs": 1,
        "extra_body": CACHE if cached else {},
    }  # fmt: skip
    whole = server.client.completions.create(**options).choices[0].logprobs
    assert whole is not None
    assert whole.tokens is not None
    assert whole.token_logprobs is not None
    assert whole.top_logprobs is not None
    ends = itertools.accumulate(map(len, whole.tokens), initial=0)
    assert whole.text_offset == list(ends)[:-1]
    for token, value, top in zip(whole.tokens, whole.token_logprobs, whole.top_logprobs, strict=True):
        # The likeliest one, and the token that was drawn.
        assert top[token] == value <= max(top.values()) <= 0
        assert len(top) == 1 + (value < max(top.values()))
    pieces = [
        chunk.choices[0].logprobs for chunk in server.client.completions.create(**options, stream=True) if chunk.choices
    ]
    told = [piece for piece in pieces if piece is not None]
    joined = {name: [item for piece in told for item in getattr(piece, name)] for name in type(whole).model_fields}
    if not cached:  # how far a draft gets depends on the time, and with it what the seed gives
        assert joined == whole.model_dump()
    offsets = itertools.accumulate(map(len, joined["tokens"]), initial=0)
    assert joined["text_offset"] == list(offsets)[:-1]


def spelled(model: Model, token_id: int) -> str:
    return str(model.tokenizer.convert_ids_to_tokens(token_id))


def test_a_seed_repeats_a_sampled_text(server: Running) -> None:
    texts = [
        server.client.chat.completions.create(
            model=MODEL, messages=MESSAGES, temperature=1.5, top_p=0.9, seed=seed, max_tokens=16
        )
        .choices[0]
        .message.content
        for seed in (7, 7, 8)
    ]
    assert texts[0] == texts[1] != texts[2]
