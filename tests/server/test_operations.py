"""Keys and what they may see, health, metrics, the log, and names that lead to this machine."""

from __future__ import annotations

import hashlib
import http.client
import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import openai
import pytest

from lynxkv.errors import InputError
from lynxkv.integrations.hf import Model
from lynxkv.server.hosts import is_loopback
from lynxkv.server.keys import Keys
from lynxkv.server.observing import JsonLines
from lynxkv.server.problems import Refusal
from tests.server.conftest import eventually, running
from tests.server.test_caches import publish, some_ids
from tests.server.test_refusals import CHAT, GOOD

if TYPE_CHECKING:
    from tests.server.conftest import Running


def get(server: Running, path: str, **headers: str) -> tuple[int, Any, bytes]:
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=30)
    connection.request("GET", path, headers=headers)
    response = connection.getresponse()
    body = response.read()
    connection.close()
    return response.status, response.headers, body


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    path = tmp_path / "keys"
    lines = [f"ann {digest('key-a')} pepper", f"bob {digest('key-b')} # own salt", f"metrics {digest('key-m')} shared"]
    path.write_text("# name, digest, salt\n\n" + "\n".join(lines))
    return Keys.read(path)


def test_who_asks(keys: Keys) -> None:
    ann, bob = keys.caller("Bearer key-a"), keys.caller("bearer key-b")
    assert (ann.name, ann.salt_sha256) == ("ann", digest("pepper"))
    assert (bob.name, bob.salt_sha256) == ("bob", digest(digest("key-b")))
    assert keys.caller("Bearer key-m").salt_sha256 is None
    for wrong in (None, "", "Bearer", "Bearer key-c", "Basic key-a", "key-a", "Bearer \udcff"):
        with pytest.raises(Refusal) as caught:
            keys.caller(wrong)
        assert caught.value.status == 401
    assert Keys().caller(None).name == "anybody"


@pytest.mark.parametrize("text", ["", "# none", "ann", "ann key-a", "ann " + "g" * 64])
def test_files_that_hold_no_keys(tmp_path: Path, text: str) -> None:
    (tmp_path / "keys").write_text(text)
    with pytest.raises(InputError):
        Keys.read(tmp_path / "keys")
    with pytest.raises(InputError, match="cannot read"):
        Keys.read(tmp_path / "none")


def test_a_key_neither_reads_nor_detects_the_caches_of_another(model: Model, tmp_path: Path, keys: Keys) -> None:
    root = tmp_path / "store"
    ids = some_ids(280)
    publish(model, str(root / "shared.lynx"), some_ids(300, seed=1))
    with running(model, str(root), keys=keys, publish=True) as server:

        def ask(key: str, prompt: Any, **lynx: Any) -> Any:
            client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)
            answer = client.completions.create(
                model="org/tiny", prompt=prompt, max_tokens=4, temperature=0, extra_body={"lynx": lynx}
            )
            return answer.model_extra["lynx"]  # type: ignore[index]

        def listed(key: str) -> list[str]:
            _, _, body = get(server, "/v1/lynx/caches", Authorization=f"Bearer {key}")
            return [entry["name"] for entry in json.loads(body)["data"]]

        assert ask("key-a", ids)["source"] == "prefill"
        eventually(lambda: len(server.service.catalog.entries) == 2)
        own = next(entry.name for entry in server.service.catalog.entries if entry.name != "shared.lynx")
        assert (ask("key-a", ids)["cache"], listed("key-a")) == (own, [own, "shared.lynx"])
        assert ask("key-a", [5], cache=own)["source"] == "cache"
        # Another key finds nothing, sees nothing, and is told the same of what is there and of what is not.
        assert listed("key-b") == listed("key-m") == ["shared.lynx"]
        refusals = []
        for name in (own, own.replace("auto/", "auto/0")):
            with pytest.raises(openai.NotFoundError) as caught:
                ask("key-b", [5], cache=name)
            refusals.append(str(caught.value).replace(name, "NAME"))
        assert refusals[0] == refusals[1]
        assert ask("key-b", ids)["source"] == "prefill"
        eventually(lambda: len(server.service.catalog.entries) == 3)
        for key in ("key-a", "key-b", "key-m"):
            assert ask(key, some_ids(310, seed=1))["cache"] == "shared.lynx"
        for path in ("/v1/models", "/v1/lynx/caches", "/metrics"):
            assert get(server, path)[0] == 401
        with pytest.raises(openai.AuthenticationError):
            ask("key-c", [5])
        assert get(server, "/metrics", Authorization="Bearer key-a")[0] == 403
        assert get(server, "/metrics", Authorization="Bearer key-m")[0] == 200
        assert get(server, "/health")[0] == get(server, "/ready")[0] == 200


def test_health_readiness_and_metrics(model: Model, store: Path) -> None:
    with running(model, str(store)) as server:
        status, _, body = get(server, "/ready")
        assert (status, json.loads(body)["ready"], json.loads(body)["caches"]) == (200, True, 2)
        names = [entry["name"] for entry in json.loads(get(server, "/v1/lynx/caches")[2])["data"]]
        assert names == ["docs/report.lynx"]  # the other is not of this model
        server.client.chat.completions.create(**GOOD, extra_body={"lynx": {"cache": "docs/report.lynx"}})
        with pytest.raises(openai.NotFoundError):
            server.client.chat.completions.create(**GOOD, extra_body={"lynx": {"cache": "none.lynx"}})
        page = get(server, "/metrics")[2].decode()
        for line in (
            'lynxkv_requests_total{route="/v1/chat/completions",status="200"} 1.0',
            'lynxkv_requests_total{route="/v1/chat/completions",status="404"} 1.0',
            'lynxkv_failures_total{code="cache_not_found"} 1.0',
            'lynxkv_answers_total{source="cache"} 1.0',
            'lynxkv_first_token_seconds_count{kind="verified"} 1.0',
            "lynxkv_requests_in_place 0.0",
            "lynxkv_catalog_caches 2.0",
        ):
            assert line in page.splitlines(), page
        server.service.places.closed = True
        assert get(server, "/ready")[0] == 503


def test_a_request_has_an_id_and_a_line_in_the_log(model: Model, store: Path, caplog: pytest.LogCaptureFixture) -> None:
    with running(model, str(store)) as server, caplog.at_level(logging.INFO, "lynxkv.server"):
        raw = server.client.chat.completions.with_raw_response.create(
            **GOOD, extra_body={"lynx": {"cache": "docs/report.lynx"}}, extra_headers={"x-request-id": "mine-1"}
        )
        assert raw.headers["x-request-id"] == "mine-1"
        _, headers, _ = get(server, "/nothing", **{"x-request-id": "not\tone"})
        assert len(headers["x-request-id"]) == 32
        eventually(lambda: len(caplog.records) == 2)
    first, second = (json.loads(JsonLines().format(record)) for record in caplog.records)
    assert first["request"] == "mine-1"
    assert (first["path"], first["status"], first["key"]) == (CHAT, 200, "anybody")
    assert (first["source"], first["cache"], first["new_tokens"]) == ("cache", "docs/report.lynx", 2)
    assert (second["path"], second["status"]) == ("/nothing", 404)
    # Neither prompts nor answers are logged.
    assert "w7" not in json.dumps(first)


def test_names_that_were_made_to_lead_here(server: Running) -> None:
    assert get(server, "/health", Host="localhost:80")[0] == 200
    for host in ("evil.example", "evil.example:8000", "127.0.0.1.evil.example", ""):
        assert get(server, "/health", Host=host)[0] == 421
    # Another page may neither read an answer nor ask whether it may.
    status, headers, _ = get(server, "/v1/models", Origin="https://evil.example")
    assert status == 200
    assert not [name for name in headers if name.lower().startswith("access-control")]
    for host in ("localhost", "127.0.0.1", "127.8.8.8", "::1", "[::1]"):
        assert is_loopback(host)
