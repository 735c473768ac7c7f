"""Requests that get no answer: the status, the error object, and whether to ask again."""

from __future__ import annotations

import http.client
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from lynxkv.integrations.hf import Model
from lynxkv.server.names import cache_url
from lynxkv.server.options import ServeOptions
from lynxkv.server.problems import Refusal
from tests.server.conftest import running

if TYPE_CHECKING:
    from tests.server.conftest import Running

CHAT = "/v1/chat/completions"
GOOD: dict[str, Any] = {
    "model": "org/tiny",
    "messages": [{"role": "user", "content": "w7"}],
    "max_tokens": 2,
    "temperature": 0,
}


def send(
    server: Running, body: Any, path: str = CHAT, kind: str | None = "application/json", method: str = "POST"
) -> tuple[int, dict[str, Any], Any]:
    """Status, headers and object of a request; a body that is not bytes is sent as JSON."""
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=30)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request(method, path, data, {"content-type": kind} if kind else {})
    response = connection.getresponse()
    content = json.loads(response.read())
    connection.close()
    return response.status, {name.lower(): value for name, value in response.headers.items()}, content


def refused(server: Running, body: Any, status: int, code: str, **options: Any) -> dict[str, Any]:
    """The error object of a request that is refused as it should be."""
    found, headers, content = send(server, body, **options)
    assert (found, content["error"]["code"]) == (status, code), content
    assert set(content["error"]) == {"message", "type", "param", "code"}
    assert ("retry-after" in headers) != (headers.get("x-should-retry") == "false")
    error: dict[str, Any] = content["error"]
    return error


@pytest.mark.parametrize(
    ("change", "code", "param"),
    [
        ({"model": None}, "invalid_value", "model"),
        ({"model": 3}, "invalid_value", "model"),
        ({"messages": None}, "invalid_value", "messages"),
        ({"messages": []}, "invalid_value", "messages"),
        ({"messages": ["w7"]}, "invalid_value", "messages[0]"),
        ({"messages": [{"role": "tool", "content": "w7"}]}, "invalid_value", "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "invalid_value", "messages[0].content"),
        ({"messages": [{"role": "assistant", "content": "w7"}]}, "invalid_value", "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "unsupported_value", None),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "invalid_value", "messages[0].content"),
        ({"max_tokens": 0}, "invalid_value", "max_tokens"),
        ({"max_tokens": 65}, "invalid_value", "max_tokens"),
        ({"max_tokens": True}, "invalid_value", "max_tokens"),
        ({"max_tokens": 1.5}, "invalid_value", "max_tokens"),
        ({"temperature": -1}, "invalid_value", "temperature"),
        ({"temperature": 1e-30}, "invalid_value", None),
        ({"top_p": 2}, "invalid_value", "top_p"),
        ({"seed": 1 << 70}, "invalid_value", "seed"),
        ({"stop": ["a", ""]}, "invalid_value", "stop"),
        ({"stop": ["a"] * 17}, "invalid_value", "stop"),
        ({"stop": 3}, "invalid_value", "stop"),
        ({"stream": "yes"}, "invalid_value", "stream"),
        ({"n": 2}, "unsupported_value", "n"),
        ({"logprobs": 2}, "invalid_value", "logprobs"),
        ({"top_logprobs": 2}, "invalid_value", "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "invalid_value", "top_logprobs"),
        ({"tools": [{"type": "function"}]}, "unsupported_value", "tools"),
        ({"temprature": 0}, "unknown_parameter", "temprature"),
        ({"\ud800": 0}, "unknown_parameter", None),
        ({"lynx": 3}, "invalid_value", "lynx"),
        ({"lynx": {"cash": 3}}, "unknown_parameter", "lynx.cash"),
        ({"lynx": {"draft": True}}, "invalid_value", "lynx.draft"),
        ({"lynx": {"cache": "foreign.lynx"}}, "cache_of_another_model", None),
        ({"messages": [{"role": "user", "content": "w7 " * 600}]}, "invalid_value", None),
    ],
)
def test_requests_that_are_wrong(server: Running, change: dict[str, Any], code: str, param: str | None) -> None:
    error = refused(server, {**GOOD, **change}, 400, code)
    assert error["type"] == "invalid_request_error"
    if param is not None:
        assert error["param"] == param


def test_labels_and_neutral_values_are_taken(server: Running) -> None:
    body = {
        **GOOD,
        "user": "me",
        "metadata": {"a": "b"},
        "n": 1,
        "presence_penalty": 0,
        "tools": None,
        "logit_bias": {},
    }
    assert send(server, body)[0] == 200


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[1]", b'{"model": NaN}', b"[" * 50_000, b'{"a": ' + b"9" * 5000 + b"}", b"\xff\xfe"]
)
def test_bodies_that_are_no_object(server: Running, body: bytes) -> None:
    refused(server, body, 400, "invalid_json")


def test_limits_and_routes(server: Running) -> None:
    refused(server, b" " * 100_001, 413, "request_too_large")
    refused(server, GOOD, 415, "unsupported_media_type", kind="text/plain")
    refused(server, GOOD, 415, "unsupported_media_type", kind=None)
    refused(server, GOOD, 404, "not_found", path="/v1/embeddings")
    refused(server, GOOD, 405, "not_found", method="PUT")
    refused(server, {**GOOD, "model": "gpt-9"}, 404, "model_not_found")
    refused(server, {"model": "org/tiny", "prompt": ""}, 400, "invalid_value", path="/v1/completions")
    refused(server, {"model": "org/tiny", "prompt": [99]}, 400, "invalid_value", path="/v1/completions")
    for token in (-1, 1 << 31, 1 << 70, 1e300):
        refused(server, {"model": "org/tiny", "prompt": [token]}, 400, "invalid_value", path="/v1/completions")
    refused(server, {"model": "org/tiny", "prompt": ["a", "b"]}, 400, "unsupported_value", path="/v1/completions")
    for change in ({"logprobs": True}, {"logprobs": 21}, {"logprobs": -1}):
        body = {"model": "org/tiny", "prompt": "w7", **change}
        assert refused(server, body, 400, "invalid_value", path="/v1/completions")["param"] == "logprobs"
    body = {"model": "org/tiny", "prompt": "w7", "top_logprobs": 1}
    refused(server, body, 400, "unknown_parameter", path="/v1/completions")


HOSTILE = [
    "../other/report.lynx",
    "docs/../../other/report.lynx",
    "docs/..lynx",
    "/etc/report.lynx",
    "file:///etc/report.lynx",
    "s3://bucket/report.lynx",
    "zip::report.lynx",
    "..\\report.lynx",
    "%2e%2e/report.lynx",
    "docs//report.lynx",
    "./report.lynx",
    "~/report.lynx",
    "rep*rt.lynx",
    "report.lynx?x",
    "report.lynx#",
    "report.lynx\x00",
    "report.lynx\n",
    "report.lynx/anchor.safetensors",
    "report",
    ".lynx",
    "",
    "a" * 600 + ".lynx",
]


@pytest.mark.parametrize("name", HOSTILE)
def test_names_lead_nowhere_else(name: str) -> None:
    with pytest.raises(Refusal) as caught:
        cache_url("/srv/caches", name)
    assert caught.value.code == "invalid_cache_name"


@pytest.mark.parametrize("name", ["report.lynx", "docs/report.lynx", "2026/may/näme-1.2 b.lynx"])
def test_names_of_caches(name: str) -> None:
    assert cache_url("s3://bucket/caches/", name) == f"s3://bucket/caches/{name}"


def test_a_hostile_name_is_refused_over_http(server: Running) -> None:
    refused(server, {**GOOD, "lynx": {"cache": "../report.lynx"}}, 400, "invalid_cache_name")


@pytest.mark.parametrize("stream", [False, True])
def test_caches_that_cannot_be_used(server: Running, store: Path, stream: bool) -> None:
    refused(server, {**GOOD, "stream": stream, "lynx": {"cache": "docs/none.lynx"}}, 404, "cache_not_found")
    damaged = store / "damaged.lynx"
    damaged.mkdir()
    for path in (store / "docs" / "report.lynx").iterdir():
        data = bytearray(path.read_bytes())
        data[-200] ^= 1
        (damaged / path.name).write_bytes(data)
    refused(server, {**GOOD, "stream": stream, "lynx": {"cache": "damaged.lynx"}}, 502, "cache_damaged")
    shutil.rmtree(damaged)  # other tests count what is in the store
    # A chat over a cache starts with its question.
    system = [{"role": "system", "content": "w5"}, *GOOD["messages"]]
    body = {**GOOD, "stream": stream, "messages": system, "lynx": {"cache": "docs/report.lynx"}}
    refused(server, body, 400, "invalid_value")


def test_more_memory_than_there_is(model: Model, store: Path) -> None:
    with running(model, str(store), memory_bytes=1 << 20) as server:
        refused(server, GOOD, 400, "context_length_exceeded")
        refused(server, {**GOOD, "lynx": {"cache": "docs/report.lynx"}}, 400, "context_length_exceeded")


def test_options_out_of_range() -> None:
    for options in ({"port": -1}, {"queue": 0}, {"deadline_s": float("nan")}, {"memory_bytes": -1}):
        with pytest.raises(ValueError, match=next(iter(options))):
            ServeOptions(**options)
