"""Many clients over a store that fails now and then: every answer is right, whatever is refused meanwhile."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lynxkv.integrations.hf import Model
from lynxkv.store.transport import transport_for
from lynxkv.testing.faults import Fault, FaultyTransport
from tests.server.conftest import running

SCRIPT = Path(__file__).parents[2] / "examples" / "load_serve.py"


def test_the_load_test_of_the_docs(model: Model, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds, made = itertools.count(), list[FaultyTransport]()

    def faulty(*arguments: Any) -> FaultyTransport:
        # Those that need no time to be noticed.
        faults: tuple[Fault, ...] = ("refused", "cut", "corrupt", "overloaded")
        made.append(FaultyTransport(transport_for(*arguments), share=0.2, seed=next(seeds), faults=faults))
        return made[-1]

    monkeypatch.setattr("lynxkv.server.hot.transport_for", faulty)
    questions = [word for number in range(10, 18) for word in ("--question", f"w{number} w8")]
    with running(model, str(store), queue=2) as server:
        arguments = [server.url, "--cache", "docs/report.lynx", "--clients", "16", "--seconds", "1", "--tokens", "8"]
        done = subprocess.run(
            [sys.executable, str(SCRIPT), *arguments, *questions], capture_output=True, text=True, timeout=60
        )
        assert server.service.places.taken == 0
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"'right': [1-9]", done.stdout)
    assert "'overloaded'" in done.stdout
    assert any(transport.injected for transport in made)
