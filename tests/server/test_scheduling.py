"""The queue, deadlines, clients that leave, and stopping."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import openai
import pytest

from lynxkv.errors import FetchError
from lynxkv.integrations.hf import Model
from lynxkv.runner import generate
from lynxkv.server.admission import Places, check_memory
from lynxkv.server.problems import Refusal
from lynxkv.server.worker import CancelledRun, Worker
from lynxkv.store.transport import transport_for
from lynxkv.testing.faults import FaultyTransport
from tests.server.conftest import eventually, running
from tests.server.test_refusals import GOOD, refused, send

if TYPE_CHECKING:
    from tests.server.conftest import Gate

CACHED: dict[str, Any] = {**GOOD, "max_tokens": 60, "lynx": {"cache": "docs/report.lynx"}}


def test_owners_take_turns() -> None:
    async def scenario() -> list[str]:
        worker, order, first, started = Worker(), list[str](), threading.Event(), threading.Event()

        def work(name: str) -> Callable[[Any], None]:
            def run(cancellation: Any) -> None:
                started.set()
                assert first.wait(30)
                order.append(name)

            return run

        holding = asyncio.ensure_future(worker.run("d", work("d1")))
        assert await asyncio.to_thread(started.wait, 30)
        names = ["a1", "a2", "a3", "b1", "c1", "b2"]
        runs = [asyncio.ensure_future(worker.run(name[0], work(name))) for name in names]
        await asyncio.sleep(0)  # all have been added
        first.set()
        await asyncio.gather(holding, *runs)
        worker.close()
        return order

    assert asyncio.run(scenario()) == ["d1", "a1", "b1", "c1", "a2", "b2", "a3"]


def test_cancelling_takes_from_the_queue_or_ends_the_run() -> None:
    async def scenario() -> None:
        worker, started, ended = Worker(), threading.Event(), threading.Event()
        never: list[int] = []

        def run(cancellation: Any) -> None:
            started.set()
            try:
                while True:
                    cancellation.check()
                    time.sleep(0.001)
            except CancelledRun:
                ended.set()
                raise

        running_now = asyncio.ensure_future(worker.run("a", run))
        waiting = asyncio.ensure_future(worker.run("a", lambda cancellation: never.append(1)))
        await asyncio.to_thread(started.wait, 30)
        waiting.cancel()
        running_now.cancel()
        for task in (running_now, waiting):
            with pytest.raises(asyncio.CancelledError):
                await task
        assert await asyncio.to_thread(ended.wait, 30)
        assert await worker.run("a", lambda cancellation: 5) == 5
        worker.close()
        assert never == []

    asyncio.run(scenario())


def test_places_are_bounded_and_shared() -> None:
    places = Places(4, shared=True)
    with places.take("a"), places.take("a"):
        with pytest.raises(Refusal, match="too many"), places.take("a"):
            pass
        with places.take("b"), places.take("b"), pytest.raises(Refusal), places.take("c"):
            pass
        assert places.taken == 2
    assert places.taken == 0
    places.closed = True
    with pytest.raises(Refusal, match="stopping"), places.take("a"):
        pass


def test_a_run_waits_for_memory_or_will_never_have_it() -> None:
    check_memory(60, 40, 100)
    with pytest.raises(Refusal) as short:
        check_memory(60, 41, 100)
    assert (short.value.status, short.value.retry_after_s) == (503, 1)
    with pytest.raises(Refusal) as never:
        check_memory(101, 0, 100)
    assert (never.value.status, never.value.code) == (400, "context_length_exceeded")


def test_a_full_queue_and_a_deadline(model: Model, store: Path, gate: Gate) -> None:
    with running(model, str(store), queue=1, deadline_s=0.5) as server, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(refused, server, CACHED, 504, "deadline_exceeded")
        assert gate.reached.wait(30)
        refused(server, CACHED, 503, "overloaded")
        waiting.result()
        gate.opened.set()
        eventually(lambda: server.service.places.taken == 0)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("cached", [False, True])
def test_a_client_that_leaves_frees_its_place(
    model: Model, store: Path, gate: Gate, stream: bool, cached: bool
) -> None:
    body = json.dumps({**CACHED, "stream": stream, **({} if cached else {"lynx": {}})}).encode()
    with running(model, str(store), queue=1) as server:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as client:
            head = ["POST /v1/chat/completions HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
            lines = [*head, f"Content-Length: {len(body)}"]
            client.sendall("\r\n".join([*lines, "", ""]).encode() + body)
            assert gate.reached.wait(30)
            assert server.service.places.taken == 1
        eventually(lambda: server.service.places.taken == 0)
        gate.opened.set()
        # The next one is answered, and the run that was left has not gone on.
        assert send(server, {**GOOD, "max_tokens": 1})[0] == 200
        assert gate.steps < 8


@pytest.mark.parametrize("shard", ["anchor", "residual"])
def test_a_store_that_hangs_holds_nobody_up_for_long(
    model: Model, store: Path, monkeypatch: pytest.MonkeyPatch, shard: str
) -> None:
    # Whoever waits for it leaves or comes to the deadline: place and worker are free long before it is given up.
    made: list[FaultyTransport] = []

    def hanging(*arguments: Any) -> FaultyTransport:
        made.append(FaultyTransport(transport_for(*arguments), share=1, faults=("missing_answer",), only=shard))
        return made[-1]

    monkeypatch.setattr("lynxkv.server.hot.transport_for", hanging)
    body = json.dumps(CACHED).encode()
    with running(model, str(store), deadline_s=1) as server:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as client:
            head = ["POST /v1/chat/completions HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
            client.sendall("\r\n".join([*head, f"Content-Length: {len(body)}", "", ""]).encode() + body)
            eventually(lambda: bool(made and made[0].injected))
        eventually(lambda: server.service.places.taken == 0)
        assert send(server, GOOD)[0] == 200
        refused(server, CACHED, 504, "deadline_exceeded")
        assert send(server, GOOD)[0] == 200


def test_clients_beside_one_another_get_their_own_answers(model: Model, store: Path) -> None:
    questions = [f"w{number} w7" for number in range(10, 18)]
    bodies = [
        {**CACHED, "max_tokens": 8, "messages": [{"role": "user", "content": question}]} for question in questions
    ]
    with running(model, str(store)) as server:
        alone = [send(server, body)[2]["choices"] for body in bodies]
        with ThreadPoolExecutor(8) as pool:
            together = [answer[2]["choices"] for answer in pool.map(lambda body: send(server, body), bodies)]
    assert together == alone


def test_a_cache_that_fails_while_it_streams(
    model: Model, store: Path, monkeypatch: pytest.MonkeyPatch, gate: Gate
) -> None:
    def failing(*arguments: Any, on_event: Any, **options: Any) -> Any:
        def report(event: Any) -> None:
            on_event(event)
            if type(event).__name__ == "Verified":
                raise FetchError("the link is gone")

        return generate(*arguments, on_event=report, **options)

    monkeypatch.setattr("lynxkv.server.service.generate", failing)
    gate.opened.set()
    with running(model, str(store)) as server:
        stream = server.client.chat.completions.create(
            model="org/tiny", messages=GOOD["messages"], stream=True, extra_body={"lynx": CACHED["lynx"]}
        )
        with pytest.raises(openai.APIError, match="the link is gone"):
            list(stream)
        eventually(lambda: server.service.places.taken == 0)
