"""What all tests share: no network, one copy of the small model, and the command line as a function."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import BytesIO, StringIO, TextIOWrapper
from typing import TYPE_CHECKING, Any

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# torch's threads spin while they wait for one another, which on a machine that does anything else beside makes decoding
# ten times slower. Read when torch is first imported, here and in the processes that tests start.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

if TYPE_CHECKING:
    from lynxkv.integrations.hf import Model


@dataclass(frozen=True, kw_only=True)
class Finished:
    """What a command line left behind."""

    code: int
    out: str
    err: str


Lynx = Callable[..., Finished]


@pytest.fixture
def lynx(monkeypatch: pytest.MonkeyPatch) -> Lynx:
    """Run a command line in this process: `lynx("check", url)`; `stdin` is what it can read there."""
    from lynxkv_cli.main import run

    def call(*arguments: object, stdin: bytes = b"") -> Finished:
        monkeypatch.setattr(sys, "stdin", TextIOWrapper(BytesIO(stdin)))
        with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
            code = run([str(argument) for argument in arguments])
        return Finished(code=code, out=out.getvalue(), err=err.getvalue())

    return call


@pytest.fixture(scope="session")
def smollm2() -> Model:
    """The real small model in float32, loaded once."""
    from lynxkv import load_model

    return load_model("smollm2")


@pytest.fixture
def one_copy_of_smollm2(smollm2: Model, monkeypatch: pytest.MonkeyPatch) -> Model:
    """Let commands that load smollm2 share the one in memory; loading it is tested end to end."""
    from lynxkv import checkpoints

    load = checkpoints.load_model

    def cached(ref: str, **options: Any) -> Model:
        return smollm2 if ref == "smollm2" else load(ref, **options)

    monkeypatch.setattr(checkpoints, "load_model", cached)
    return smollm2
