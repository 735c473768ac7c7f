"""Whatever a request holds, it is read or refused, and nothing else happens."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

from hypothesis import given, settings
from hypothesis import strategies as st

from lynxkv.server.fields import parse
from lynxkv.server.names import cache_url
from lynxkv.server.problems import Refusal
from lynxkv.server.requests import LABELS, NEUTRAL, Kind, read_request
from lynxkv.server.responses import refused

T = TypeVar("T")
NAMES = (
    "model", "messages", "prompt", "lynx", "stream", "stream_options", "stop", "max_tokens", "max_completion_tokens",
    "temperature", "top_p", "seed", "logprobs", "top_logprobs", *NEUTRAL, *LABELS,
)  # fmt: skip
TEXT = st.text(st.characters(), max_size=8) | st.sampled_from(["user", "system", "error", "recompute", "\ud800", "\0"])
LEAF = st.none() | st.booleans() | st.integers() | st.floats() | TEXT
INNER = st.sampled_from(["role", "content", "type", "text", "cache", "draft", "on_failure", "include_usage", "name"])
VALUE = st.recursive(
    LEAF,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(INNER | TEXT, inner, max_size=4),
    max_leaves=8,
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system"]) | LEAF, "content": TEXT | VALUE}
)
USUAL: dict[str, Any] = {"model": "org/tiny", "messages": [{"role": "user", "content": "w5"}], "prompt": "w5"}


def outcome_of(work: Callable[[], T]) -> T | Refusal:
    """What `work` returns, or the refusal that it raises, which can be sent."""
    try:
        return work()
    except Refusal as refusal:
        content = json.loads(bytes(refused(refusal).body))
        return refusal if content["error"]["message"] else Refusal("no message", status=500)


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from(["chat", "completion"]),
    st.dictionaries(st.sampled_from(NAMES) | TEXT, VALUE | st.lists(MESSAGE, max_size=3), max_size=5),
    st.booleans(),
)
def test_any_object_is_read_or_refused(kind: Kind, content: dict[str, Any], usual: bool) -> None:
    own = {name: value for name, value in USUAL.items() if name != ("prompt" if kind == "chat" else "messages")}
    body = {**own, **content} if usual else content
    outcome = outcome_of(lambda: read_request(kind, body, max_new_tokens=64))
    if isinstance(outcome, Refusal):
        assert outcome.status == 400
        return
    for text in (outcome.model, *outcome.stop, *(message.text for message in outcome.messages)):
        text.encode()
    assert outcome.max_new_tokens is None or 1 <= outcome.max_new_tokens <= 64


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=40) | st.text(max_size=40).map(str.encode))
def test_any_bytes_are_an_object_or_refused(body: bytes) -> None:
    outcome = outcome_of(lambda: parse(body))
    if isinstance(outcome, Refusal):
        assert (outcome.status, outcome.code) == (400, "invalid_json")
    else:
        assert isinstance(outcome, dict)


@settings(max_examples=400, deadline=None)
@given(st.text("./\\%:~*?#[]{}\0 abé-_@=+", max_size=20), st.sampled_from(["", ".lynx"]))
def test_any_name_stays_under_the_root(name: str, end: str) -> None:
    outcome = outcome_of(lambda: cache_url("/srv/caches", name + end))
    if isinstance(outcome, Refusal):
        assert outcome.code == "invalid_cache_name"
        return
    parts = outcome.removeprefix("/srv/caches/").split("/")
    assert all(part and not part.startswith(".") for part in parts)
    assert not set(outcome) & set("\\%:~*?#[]{}\0")
