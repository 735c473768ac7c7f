"""Requests that are decoded together: each gets the answer that it gets alone, and is let go on its own."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from lynxkv.encoder import encode
from lynxkv.integrations.hf import Model
from lynxkv.models import prefill
from lynxkv.store.transport import transport_for
from lynxkv.testing.faults import FaultyTransport
from lynxkv.testing.tiny_models import tiny_model
from tests.server.conftest import Running, eventually, running
from tests.server.test_caches import CODEC, damage, from_cache, publish, some_ids
from tests.server.test_refusals import GOOD, send

if TYPE_CHECKING:
    from tests.server.conftest import Gate

COMPLETIONS = "/v1/completions"


def over(cache: str, prompt: list[int] | str, **options: Any) -> dict[str, Any]:
    """A greedy completion over a cache."""
    body = {"model": "org/tiny", "prompt": prompt, "max_tokens": 12, "temperature": 0, "lynx": {"cache": cache}}
    return {**body, **options}


class Steps:
    """Counts the rows of batch steps; the third one waits until it may go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: list[int] = []
        self.go = threading.Event()
        original = Model.batch_step

        def batch_step(model: Model, cache: Any, token_ids: Any, *, rows: int = 1) -> Any:
            self.rows.append(len(token_ids))
            assert len(self.rows) != 3 or self.go.wait(30)
            return original(model, cache, token_ids, rows=rows)

        monkeypatch.setattr(Model, "batch_step", batch_step)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    return Steps(monkeypatch)


@pytest.fixture
def root(model: Model, tmp_path: Path) -> Path:
    """Two caches, one longer than the other."""
    publish(model, str(tmp_path / "long.lynx"), some_ids(60))
    publish(model, str(tmp_path / "short.lynx"), some_ids(40, seed=1))
    return tmp_path


@contextmanager
def all_wait(
    server: Running,
    gate: Gate,
    bodies: Sequence[dict[str, Any]],
    *,
    between: Callable[[int], None] = lambda waiting: None,
) -> Iterator[list[Future[Any]]]:
    """The answers to requests that wait together, from when this is left. `between` is called when so many wait."""
    with ThreadPoolExecutor(len(bodies) + 1) as pool:
        pool.submit(send, server, {"model": server.service.model_name, "prompt": "w5"}, path=COMPLETIONS)
        eventually(gate.reached.is_set)
        asked = []
        waiting = server.service._worker._waiting
        for number, body in enumerate(bodies, 1):
            asked.append(pool.submit(send, server, body, path=COMPLETIONS))
            eventually(lambda number=number: sum(map(len, waiting.values())) == number)  # type: ignore[misc]
            between(number)
        yield asked
        gate.opened.set()


def alone(server: Running, body: dict[str, Any]) -> Any:
    return send(server, body, path=COMPLETIONS)[2]["choices"]


def test_each_has_the_answer_that_it_gets_alone(model: Model, root: Path, gate: Gate, steps: Steps) -> None:
    bodies = [
        over("long.lynx", [5, 6], max_tokens=3),
        over("short.lynx", [7]),
        over("long.lynx", [8, 9, 10], logprobs=2),
        over("long.lynx", [11], stop=["w7", "w11"]),
        over("short.lynx", "", max_tokens=20),
    ]
    steps.go.set()
    with running(model, str(root), runs=1) as server:
        with all_wait(server, gate, bodies) as asked:
            pass
        answers = [future.result()[2] for future in asked]
        assert [answer["lynx"]["together"] for answer in answers] == [5] * 5
        assert b"lynxkv_decoded_together_sum 25.0" in server.service.metrics.page()
        # Rows leave as their texts end.
        assert steps.rows[0] == 5
        assert steps.rows == sorted(steps.rows, reverse=True)
        assert len(set(steps.rows)) > 2
        for body, answer in zip(bodies, answers, strict=True):
            own = alone(server, body)
            assert answer["choices"][0]["text"] == own[0]["text"]
            assert answer["choices"][0]["finish_reason"] == own[0]["finish_reason"]
        told, own = answers[2]["choices"][0]["logprobs"], alone(server, bodies[2])[0]["logprobs"]
        assert told["tokens"] == own["tokens"]
        assert told["token_logprobs"] == pytest.approx(own["token_logprobs"], abs=1e-5)
        eventually(lambda: server.service.memory.held == 0)


def test_no_more_than_the_bound_go_together(model: Model, root: Path, gate: Gate) -> None:
    bodies = [over("long.lynx", [number]) for number in range(5, 10)]
    with running(model, str(root), runs=1, batch=2) as server:
        with all_wait(server, gate, bodies) as asked:
            pass
        assert sorted(future.result()[2]["lynx"]["together"] for future in asked) == [1, 2, 2, 2, 2]


@pytest.mark.parametrize("leaver", [0, 1])
def test_who_leaves_does_not_hold_up_the_others(
    model: Model, root: Path, gate: Gate, steps: Steps, leaver: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one's reader is the one that reads the cache for all."""
    hung: list[FaultyTransport] = []

    def hanging(*arguments: Any) -> FaultyTransport:
        # The first request's Residual hangs until it leaves.
        inner, share = transport_for(*arguments), 0 if hung else 1
        hung.append(FaultyTransport(inner, share=share, faults=("missing_answer",), only="residual"))
        return hung[-1]

    if leaver == 0:
        monkeypatch.setattr("lynxkv.server.hot.transport_for", hanging)
    bodies = [over("long.lynx", [number], max_tokens=20, stream=True) for number in range(5, 8)]
    endless = replace(model, eos_token_ids=frozenset())
    with running(endless, str(root), runs=1) as server, ThreadPoolExecutor(4) as pool:
        pool.submit(send, server, {**GOOD, "max_tokens": 1})
        eventually(gate.reached.is_set)
        streams = []
        for number, body in enumerate(bodies, 1):
            streams.append(stream_of(server, body))
            eventually(lambda number=number: server.service.places.taken == number + 1)  # type: ignore[misc]
            eventually(
                lambda number=number: sum(map(len, server.service._worker._waiting.values())) == number  # type: ignore[misc]
            )
        gate.opened.set()
        if leaver == 0:
            eventually(lambda: bool(hung and hung[0].injected))
        else:
            eventually(lambda: len(steps.rows) == 3)
        streams[leaver].close()
        eventually(lambda: server.service.places.taken == 2)
        steps.go.set()
        texts = [text_of(stream) for number, stream in enumerate(streams) if number != leaver]
        eventually(lambda: server.service.places.taken == 0)
        assert min(steps.rows) <= 2
        own = [text_of(stream_of(server, body)) for number, body in enumerate(bodies) if number != leaver]
        assert texts == own


def stream_of(server: Running, body: dict[str, Any]) -> http.client.HTTPConnection:
    """The connection of a stream that has been asked for."""
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=60)
    connection.request("POST", COMPLETIONS, json.dumps(body), {"content-type": "application/json"})
    return connection


def text_of(connection: http.client.HTTPConnection) -> str:
    """The text of a stream that comes to its end."""
    lines = connection.getresponse().read().decode().splitlines()
    connection.close()
    assert lines[-2] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2] if line]
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


def test_a_cache_that_fails_fails_its_own(model: Model, root: Path, gate: Gate) -> None:
    bodies = [over("long.lynx", [5, 6]), over("short.lynx", [7]), over("long.lynx", [8])]
    with running(model, str(root), runs=1) as server:
        with all_wait(server, gate, bodies) as asked:
            damage(root / "short.lynx", "residual*")
        answers = [future.result() for future in asked]
        assert [status for status, _, _ in answers] == [200, 502, 200]
        assert answers[1][2]["error"]["code"] == "cache_damaged"
        for body, (_, _, answer) in list(zip(bodies, answers, strict=True))[::2]:
            assert answer["choices"] == alone(server, body)


def test_a_cache_that_is_replaced_while_requests_wait(model: Model, root: Path, gate: Gate) -> None:
    """Each has its answer from what it has opened. Small caches are in memory once they are open."""
    gate.opened.set()
    url = root / "long.lynx"
    kv = prefill(model, some_ids(50, seed=2))
    first = from_cache(model, url, [5, 6])
    gate.opened.clear()
    gate.reached.clear()

    def replace(waiting: int) -> None:
        if waiting == 2:
            encode(kv, str(url), codec=CODEC, identity=model.identity, overwrite=True)

    body = over("long.lynx", [5, 6], max_tokens=6)
    with running(model, str(root), runs=1) as server:
        with all_wait(server, gate, [body, body, body], between=replace) as asked:
            pass
        texts = [future.result()[2]["choices"][0]["text"] for future in asked]
    assert texts == [first, first, from_cache(model, url, [5, 6])]
    assert len(set(texts)) == 2


def test_a_prompt_that_does_not_fit_fails_alone(model: Model, root: Path, gate: Gate) -> None:
    bodies = [over("long.lynx", [5, 6]), over("long.lynx", [99]), over("long.lynx", [8])]
    with running(model, str(root), runs=1) as server:
        with all_wait(server, gate, bodies) as asked:
            pass
        answers = [future.result() for future in asked]
        assert [status for status, _, _ in answers] == [200, 400, 200]
        assert answers[0][2]["choices"] == alone(server, bodies[0])


def test_models_with_sliding_windows(tmp_path: Path, gate: Gate) -> None:
    gemma = tiny_model("gemma2")
    gate.opened.set()
    publish(gemma, str(tmp_path / "a.lynx"), some_ids(30))
    gate.opened.clear()
    gate.reached.clear()
    with running(gemma, str(tmp_path), runs=1) as server:
        bodies = [over("a.lynx", [number], model=server.service.model_name) for number in (5, 6)]
        with all_wait(server, gate, bodies) as asked:
            pass
        answers = [future.result()[2] for future in asked]
        assert [answer["lynx"]["together"] for answer in answers] == [2, 2]
        assert [answer["choices"] for answer in answers] == [alone(server, body) for body in bodies]


@pytest.mark.parametrize("answered", [0, 1])
def test_a_store_that_hangs_for_one_cache(
    model: Model, root: Path, monkeypatch: pytest.MonkeyPatch, answered: int
) -> None:
    """Requests for it wait, to open it or together for its Residual, however many; those for others, and for none, are
    answered.
    """

    def hanging(store: Any, *arguments: Any) -> FaultyTransport:
        share = 1 if "long" in store.url else 0
        inner = transport_for(store, *arguments)
        inner.is_remote = True
        return FaultyTransport(inner, share=share, faults=("missing_answer",), skip=answered)

    monkeypatch.setattr("lynxkv.server.hot.transport_for", hanging)
    with running(model, str(root), runs=1, queue=20) as server:
        hang = [stream_of(server, over("long.lynx", [number])) for number in range(5, 21)]
        eventually(lambda: server.service.places.taken == 16)
        # Once they are open, all wait for the first.
        eventually(lambda: sum(map(len, list(server.service._worker._waiting.values()))) == 15 * answered)
        assert send(server, over("short.lynx", [7]), path=COMPLETIONS)[0] == 200
        assert send(server, GOOD)[0] == 200
        assert server.service.places.taken == 16
        for connection in hang:
            connection.close()
        eventually(lambda: server.service.places.taken == 0)
        eventually(lambda: server.service.memory.held == 0)
