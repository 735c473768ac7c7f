"""The queue, deadlines, clients that leave, and stopping."""

from __future__ import annotations

import json
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import openai
import pytest
import torch

from lynxkv.batch import generate_batch
from lynxkv.encoder import encode
from lynxkv.errors import FetchError
from lynxkv.fetch import open_cache
from lynxkv.integrations.hf import BatchCache, Model
from lynxkv.models import prefill
from lynxkv.pace import Pace
from lynxkv.runner import generate
from lynxkv.server.admission import Memory, Places, Sizes, free_bytes
from lynxkv.server.problems import Refusal
from lynxkv.server.runs import CachedRun, are_alike
from lynxkv.store.transport import transport_for
from lynxkv.testing.faults import FaultyTransport
from lynxkv.testing.tiny_models import tiny_model
from tests.server.conftest import eventually, running
from tests.server.test_caches import some_ids
from tests.server.test_refusals import GOOD, refused, send

if TYPE_CHECKING:
    from tests.server.conftest import Gate

CACHED: dict[str, Any] = {**GOOD, "max_tokens": 60, "lynx": {"cache": "docs/report.lynx"}}


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


def test_a_request_that_never_fits_or_not_now(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory(100)
    monkeypatch.setattr("lynxkv.server.admission.free_bytes", lambda: 60)
    memory.hold(100)
    memory.check(60)  # it waits for what others hold
    with pytest.raises(Refusal) as short:
        memory.check(61)
    assert (short.value.status, short.value.code, short.value.retry_after_s) == (503, "overloaded", 1)
    with pytest.raises(Refusal) as never:
        memory.check(101)
    assert (never.value.status, never.value.code) == (400, "context_length_exceeded")


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize(
    ("stored", "suffixes"),
    [([40, 40, 40], [0, 3, 0]), ([300, 10], [2, 290]), ([5, 300], [700, 1])],
    ids=["alike", "crossed", "longer than a chunk"],
)
def test_what_a_batch_takes_is_within_its_estimate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, stored: list[int], suffixes: list[int]
) -> None:
    """The longest cache and the longest suffix need not be of the same row, and a chunk of each row has a mask."""
    monkeypatch.setattr("lynxkv.server.admission.WINDOW_BYTES", 0)
    model, new_tokens = tiny_model(family, max_position_embeddings=4096), 10
    endless = replace(model, eos_token_ids=frozenset())
    taken = {"cache": 0, "masks": 0}
    original = BatchCache.step_inputs

    def step_inputs(cache: BatchCache, present: torch.Tensor) -> Any:
        positions, masks = original(cache, present)
        each = list(masks.values()) if isinstance(masks, dict) else [masks]
        taken["cache"] = cache.nbytes
        # Of what they were made from there are at least two at a time.
        taken["masks"] = max(taken["masks"], sum(mask.nbytes for mask in each) + 2 * each[0].numel())
        return positions, masks

    monkeypatch.setattr(BatchCache, "step_inputs", step_inputs)
    with ExitStack() as stack:
        prompts = []
        for number, (tokens, suffix) in enumerate(zip(stored, suffixes, strict=True)):
            url = tmp_path / f"{number}.lynx"
            encode(prefill(model, some_ids(tokens)), str(url), codec="fixed", identity=model.identity)
            prompts.append((stack.enter_context(open_cache(url)), some_ids(suffix)))
        generate_batch(prompts, endless, max_new_tokens=new_tokens, speculate=new_tokens)
    sizes = Sizes(model)
    codes = sum(heads * dim for shape in model.layer_specs() for heads, dim in shape.tensors.values()) * sum(stored)
    logits = 3 * 4 * model.vocab_tokens * new_tokens * len(stored)
    estimate = sizes.run_bytes(stored, suffixes, new_tokens, caches=stored)
    assert sum(taken.values()) + codes + logits <= estimate < 3 * (sum(taken.values()) + codes + logits)


def test_what_open_readers_hold_is_counted(model: Model, store: Path) -> None:
    """What was asked for ahead, with its copy, of each; what is written down once for requests over one cache."""
    url = store / "docs" / "report.lynx"
    nothing: Any = None
    with running(model, str(store), hot_bytes=1 << 20) as server, open_cache(url) as reader:
        here = False
        first, second = (
            CachedRun(
                ask=nothing,
                model=server.service.model,
                told=nothing,
                prompt_tokens=reader.extent.stop + 3,
                new_tokens=10,
                name="docs/report.lynx",
                url=str(url),
                reader=reader,
                suffix_ids=[5, 6, 7],
                is_here=lambda: here,
                on_loaded=lambda: None,
                pace=lambda together: Pace(),
            )
            for _ in range(2)
        )
        stored = reader.bytes_anchor + reader.bytes_residual
        assert stored < 1 << 20
        sizes = [server.service._bytes_of(runs) for runs in ([first], [first, second])]
        here = True
        at_hand = [server.service._bytes_of(runs) for runs in ([first], [first, second])]
        assert [size - less for size, less in zip(sizes, at_hand, strict=True)] == [stored, stored]
        tokens = reader.extent.stop
        for count, size in enumerate(at_hand, start=1):
            plain = server.service._sizes.run_bytes([tokens] * count, [3] * count, 10, caches=[tokens])
            assert size - plain == count * (1 << 20)


def row(stored: int, suffix: int, new: int) -> Any:
    """What is asked of a run's lengths."""
    return SimpleNamespace(stored_tokens=stored, suffix_tokens=suffix, new_tokens=new, tokens=stored + suffix + new)


def test_which_lengths_go_together() -> None:
    assert are_alike([row(1000, 10, 100), row(900, 60, 20)])
    assert not are_alike([row(1000, 10, 100), row(20, 10, 100), row(20, 10, 100)])
    # The first two are of the same length, but each would have slots for both a long cache and a long suffix.
    assert are_alike([row(1900, 10, 64), row(10, 1900, 64)])
    assert not are_alike([row(1900, 10, 64), row(10, 1900, 64), row(20, 20, 64)])


def test_what_the_machine_has_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lynxkv.server.admission.MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr("lynxkv.server.admission.CGROUP", tmp_path)
    assert free_bytes() is None
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable: 800 kB\nHugePages_Total: 0\n")
    assert free_bytes() == 800 << 10
    for name, text in {"max": "max", "current": "600000", "stat": "anon 5\ninactive_file 1000\n"}.items():
        (tmp_path / f"memory.{name}").write_text(text)
    assert free_bytes() == 800 << 10
    (tmp_path / "memory.max").write_text("1000000\n")
    assert free_bytes() == 401_000


def test_a_machine_short_of_memory(model: Model, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(model, str(store)) as server:
        monkeypatch.setattr("lynxkv.server.admission.free_bytes", lambda: 1000)
        for body in (GOOD, CACHED):
            refused(server, body, 503, "overloaded")
        monkeypatch.setattr("lynxkv.server.admission.free_bytes", lambda: 1 << 40)
        assert send(server, GOOD)[0] == 200


def test_stopping_takes_nobody_more_and_answers_who_is_there(model: Model, store: Path, gate: Gate) -> None:
    with running(model, str(store), runs=1) as server, ThreadPoolExecutor(2) as pool:
        host, port = server.url.removeprefix("http://").split(":")
        runs_and_waits = [pool.submit(send, server, {**GOOD, "max_tokens": tokens}) for tokens in (3, 2)]
        eventually(lambda: server.service.places.taken == 2 and gate.reached.is_set())
        server.stop()

        def refuses() -> bool:
            try:
                socket.create_connection((host, int(port)), timeout=1).close()
            except OSError:
                return True
            return False

        eventually(refuses)
        gate.opened.set()
        assert [answer.result()[0] for answer in runs_and_waits] == [200, 200]


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

    monkeypatch.setattr("lynxkv.server.runs.generate", failing)
    gate.opened.set()
    with running(model, str(store)) as server:
        stream = server.client.chat.completions.create(
            model="org/tiny", messages=GOOD["messages"], stream=True, extra_body={"lynx": CACHED["lynx"]}
        )
        with pytest.raises(openai.APIError, match="the link is gone"):
            list(stream)
        eventually(lambda: server.service.places.taken == 0)
