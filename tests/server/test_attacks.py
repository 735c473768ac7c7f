"""What wants to keep a server busy or to break it: connections, clients that take nothing, caches in its store."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from lynxkv.integrations.hf import Model
from lynxkv.server.streams import EventStream
from tests.server.conftest import eventually, running
from tests.server.test_operations import get
from tests.server.test_refusals import CHAT, GOOD, send

if TYPE_CHECKING:
    from tests.server.conftest import Running

INVALID = Path(__file__).parents[2] / "format_spec" / "vectors" / "invalid"
HEAD = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.fixture
def impatient(model: Model, store: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    """A server with short limits."""
    monkeypatch.setattr("lynxkv.server.serving.HEAD_S", 0.2)
    monkeypatch.setattr("lynxkv.server.app.BODY_S", 0.2)
    with running(model, str(store)) as server:
        yield server


@contextmanager
def connected(server: Running) -> Iterator[socket.socket]:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as client:
        yield client


@pytest.mark.parametrize("sent", [b"", b"POST /v1", HEAD.encode()])
def test_a_head_that_does_not_come(impatient: Running, sent: bytes) -> None:
    with connected(impatient) as client:
        client.sendall(sent)
        assert client.recv(100) == b""


def test_a_head_that_comes_byte_by_byte(impatient: Running) -> None:
    with connected(impatient) as client:
        client.settimeout(0.01)
        for byte in (HEAD * 100).encode():
            try:
                client.sendall(bytes([byte]))
                if client.recv(100) == b"":
                    return
            except TimeoutError:
                continue
            except ConnectionError:
                return
    pytest.fail("the connection is still open")


def test_a_second_head_that_does_not_come(impatient: Running) -> None:
    with connected(impatient) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert client.recv(4096).startswith(b"HTTP/1.1 200")
        client.sendall(b"GET /hea")
        while data := client.recv(4096):
            assert b"HTTP/1.1" not in data


def test_a_body_that_does_not_come(impatient: Running) -> None:
    with connected(impatient) as client:
        client.sendall((HEAD + "Content-Length: 100\r\n\r\n{").encode())
        assert client.recv(100).startswith(b"HTTP/1.1 408")
        assert impatient.service.places.taken == 0


def test_answers_take_longer_than_heads_may(impatient: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Model.step

    def slow(*arguments: Any, **options: Any) -> Any:
        time.sleep(0.3)
        return original(*arguments, **options)

    monkeypatch.setattr(Model, "step", slow)
    connection = http.client.HTTPConnection(impatient.url.removeprefix("http://"), timeout=30)
    for _ in range(2):
        connection.request("POST", CHAT, json.dumps({**GOOD, "max_tokens": 1}), {"content-type": "application/json"})
        response = connection.getresponse()
        assert (response.status, bool(response.read())) == (200, True)
    connection.close()


@pytest.mark.parametrize("header", ["x: " + "a" * 100_000, "\r\n".join(f"x{number}: 1" for number in range(20_000))])
def test_a_head_that_is_too_large(server: Running, header: str) -> None:
    with connected(server) as client:
        try:
            client.sendall((HEAD + header + "\r\n\r\n").encode())
            answer = client.recv(100)
        except ConnectionError:
            answer = b""
        assert answer == b"" or answer.startswith(b"HTTP/1.1 400")
    assert send(server, GOOD)[0] == 200


def test_more_connections_than_there_may_be(model: Model, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lynxkv.server.serving.CONNECTIONS", 3)
    with running(model, str(store)) as server:
        with connected(server), connected(server), connected(server), connected(server) as fourth:
            assert fourth.recv(100) == b""

        def answers() -> bool:
            try:
                return get(server, "/health")[0] == 200
            except (http.client.HTTPException, OSError):
                return False

        eventually(answers)


def test_a_client_that_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lynxkv.server.streams.SEND_S", 0.05)
    stopped: list[bool] = []

    class Running:
        async def rest(self) -> Any:
            while True:
                yield b"data: {}"

        async def stop(self) -> None:
            stopped.append(True)

    async def forever(*message: Any) -> Any:
        await asyncio.Event().wait()

    async def scenario() -> None:
        async with asyncio.timeout(30):
            await EventStream(b"first", Running())({"type": "http"}, forever, forever)  # type: ignore[arg-type]

    asyncio.run(scenario())
    assert stopped == [True]


def test_caches_that_were_made_to_harm(model: Model) -> None:
    """All that the SPEC says must be rejected, in a store that is served: listed, and asked for by name."""
    with running(model, str(INVALID)) as server, ThreadPoolExecutor(8) as pool:
        names = sorted(path.name for path in INVALID.glob("*.lynx"))
        bodies = [{**GOOD, "max_tokens": 1, "lynx": {"cache": name}} for name in names]
        statuses = Counter(status for status, _, _ in pool.map(lambda body: send(server, body), bodies))
        assert statuses.keys() <= {400, 404, 502}
        assert statuses[502] > 100
        assert send(server, GOOD)[0] == 200
        eventually(lambda: server.service.memory.held == 0)
