"""A server on a free port, with a tiny model, as clients see it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("starlette")
pytest.importorskip("openai")

from openai import OpenAI

from lynxkv.codecs.uniform import Uniform
from lynxkv.encoder import encode
from lynxkv.integrations.hf import Model, open_turn
from lynxkv.models import prefill
from lynxkv.server.app import create_app
from lynxkv.server.keys import Keys
from lynxkv.server.options import ServeOptions
from lynxkv.server.service import Service
from lynxkv.server.serving import Server, listen, url_of
from lynxkv.testing.tiny_models import tiny_model, tiny_tokenizer

TEMPLATE = (
    "{% for message in messages %}<s> w3 {{ message['content'] }} </s> {% endfor %}"
    "{% if add_generation_prompt %}w4 {% endif %}"
)
DOCUMENT = " ".join(f"w{5 + number * 7 % 43}" for number in range(40))
QUESTION = "w7 w8 w9"


def eventually(condition: Callable[[], bool]) -> None:
    """Wait for another thread to get there."""
    limit = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.005)


@dataclass(frozen=True, kw_only=True)
class Running:
    """A server that answers at `url`."""

    url: str
    service: Service
    stop: Callable[[], None]

    @property
    def client(self) -> OpenAI:
        """OpenAI's client of it, which asks once."""
        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)


@contextmanager
def running(model: Model, root: str, *, keys: Keys | None = None, **options: Any) -> Iterator[Running]:
    """A server in a thread, which has listed its store."""
    settings = ServeOptions(port=0, **options)
    ready, listener = threading.Event(), listen(settings)
    service = Service(model, root, settings, keys)
    server = Server(create_app(service), settings, ready.set)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    assert ready.wait(30)
    eventually(lambda: service.listed)
    try:
        yield Running(url=url_of(listener), service=service, stop=partial(setattr, server, "should_exit", True))
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


@pytest.fixture(scope="session")
def model() -> Model:
    """A tiny model with a chat template, whose tokens 3 and above are words."""
    tokenizer: Any = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return Model.wrap(tiny_model("llama").hf, tokenizer, model_id="org/tiny")


@pytest.fixture(scope="session")
def store(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two caches: of a document, its Anchor coarse enough to mislead the model, and of another model."""
    root = tmp_path_factory.mktemp("store")
    kv = prefill(model, open_turn(model.tokenizer, DOCUMENT))
    codec = Uniform(key_step=0.7, value_step=0.9, radix=32)
    encode(kv, str(root / "docs" / "report.lynx"), codec=codec, identity=model.identity)
    other = tiny_model("llama", seed=1)
    encode(prefill(other, [5, 6, 7]), str(root / "foreign.lynx"), identity=other.identity)
    return root


@pytest.fixture(scope="session")
def server(model: Model, store: Path) -> Iterator[Running]:
    """A server over the store, with its usual options."""
    with running(model, str(store), max_new_tokens=64, max_body_bytes=100_000) as it:
        yield it


class Gate:
    """Model steps that wait until they may go on."""

    def __init__(self) -> None:
        self.reached, self.opened, self.steps = threading.Event(), threading.Event(), 0

    def step(self, original: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """A step, when the gate is open."""
        self.steps += 1
        self.reached.set()
        assert self.opened.wait(30)
        return original(*arguments, **options)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """A closed gate before all model steps."""
    it, original = Gate(), Model.step
    monkeypatch.setattr(Model, "step", lambda *arguments, **options: it.step(original, *arguments, **options))
    yield it
    it.opened.set()


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Tiny models lose more than they gain by a second thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
