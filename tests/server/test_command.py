"""The command: what it refuses before a model is loaded, and a process from its start to its end."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import jsonschema
import openai
import pytest

from lynxkv_cli import serve
from tests.server.test_answers import SCHEMA
from tests.server.test_caches import some_ids

if TYPE_CHECKING:
    from tests.conftest import Lynx


def test_what_is_refused_before_a_model_is_loaded(lynx: Lynx, tmp_path: Path) -> None:
    elsewhere = (tmp_path, "--model", "no-such-model", "--port", 0, "--residual-url")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for arguments, code, words in (
            ((tmp_path,), 2, "needs a model"),
            ((tmp_path, "--model", "smollm2", "--port", port), 1, "cannot listen"),
            (("gopher://host", "--model", "smollm2", "--port", 0), 1, "gopher"),
            ((*elsewhere, "gopher://host"), 1, "gopher"),
            ((*elsewhere, tmp_path / "a.lynx"), 1, "a.lynx names a cache"),
            ((tmp_path, "--model", "smollm2", "--deadline", 0), 1, "deadline_s"),
            ((tmp_path, "--model", "no-such-model", "--port", 0), 1, "no-such-model"),
        ):
            done = lynx("serve", *arguments)
            assert done.code == code, done
            assert words in done.err
            assert "hint: " in done.err
            assert done.out == ""


def test_what_serving_needs_is_named(lynx: Lynx, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "lynxkv.server.serving", raising=False)
    done = lynx("serve", tmp_path, "--model", "smollm2", "--port", 0)
    assert done.code == 1
    assert "serving needs uvicorn" in done.err
    assert "pip install 'lynxkv[serve]'" in done.err


@pytest.mark.slow
@pytest.mark.model
def test_a_process_says_where_it_is_and_finishes_what_runs(tmp_path: Path) -> None:
    """The example of the help, on a free port."""
    example = serve.HELP.splitlines()[0].removeprefix("Example: lynxkv ")
    process = subprocess.Popen(
        [sys.executable, "-m", "lynxkv_cli", *shlex.split(example), "--port", "0", "--json"],
        stdout=subprocess.PIPE,
        cwd=tmp_path,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    try:
        assert process.stdout is not None
        ready = json.loads("".join(iter(process.stdout.readline, "}\n")) + "}")
        jsonschema.validate(ready, SCHEMA, cls=jsonschema.Draft202012Validator)
        client = openai.OpenAI(base_url=f"{ready['url']}/v1", api_key="none", max_retries=0)
        stream = client.chat.completions.create(
            model=ready["model"], messages=[{"role": "user", "content": "Hello"}], max_tokens=12, stream=True
        )
        next(iter(stream))
        process.send_signal(signal.SIGTERM)
        assert list(stream)[-1].choices[0].finish_reason is not None
        assert process.wait(60) == 0
        assert process.stdout.read() == ""
    finally:
        process.kill()


HANGING = """
import os, sys, time
from lynxkv.server import publishing
from lynxkv.server.app import create_app
from lynxkv.server.catalog import Catalog
from lynxkv.server.options import ServeOptions
from lynxkv.server.service import Service
from lynxkv.server.serving import Server, listen, url_of
from lynxkv.testing.tiny_models import tiny_model

root, what = sys.argv[1:]

def say(line):  # threads print the ends of their lines by themselves
    os.write(1, f"{line}\\n".encode())

def hang(*arguments, **options):
    say("hangs")
    time.sleep(1000)

if what == "list":
    Catalog.refresh = hang
else:
    publishing.encode = hang
options = ServeOptions(port=0, publish=True, drain_s=1.0)
service, listener = Service(tiny_model("llama"), root, options), listen(options)
say(url_of(listener))
Server(create_app(service), options, lambda: say("ready")).run_until_stopped(listener)
"""


@pytest.mark.slow
@pytest.mark.parametrize("what", ["list", "publish"])
def test_a_store_that_hangs_does_not_keep_the_process(tmp_path: Path, what: str) -> None:
    process = subprocess.Popen([sys.executable, "-c", HANGING, str(tmp_path), what], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url, *said = (process.stdout.readline().rstrip() for _ in range(3 if what == "list" else 2))
        if what == "publish":
            client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
            (model,) = client.models.list().data
            client.completions.create(model=model.id, prompt=some_ids(280), max_tokens=1)
            said.append(process.stdout.readline().rstrip())
        assert sorted(said) == ["hangs", "ready"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
