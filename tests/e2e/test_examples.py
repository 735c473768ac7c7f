"""The examples, the demo and the README's code run as a newcomer runs them, and say what they should."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import lynxkv

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def output_of(script: str | Path, *arguments: str) -> str:
    """What a script prints, without a terminal; it must succeed."""
    command = [sys.executable, str(EXAMPLES / script), *arguments]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_example_is_tested_here() -> None:
    tested = {
        "01_encode_and_read.py",
        "02_generate_while_it_arrives.py",
        "03_transformers_cache.py",
        "demo.py",
        "faulty_store.py",  # in tests/remote/test_faulty_store.py
        "load_serve.py",  # in tests/server/test_load.py
        "second_model.py",
    }
    assert {path.name for path in EXAMPLES.glob("*.py")} == tested


def test_encode_and_read() -> None:
    out = output_of("01_encode_and_read.py")
    assert "1000 tokens" in out
    assert "alg1" in out


@pytest.mark.model
def test_generate_while_it_arrives() -> None:
    out = output_of("02_generate_while_it_arrives.py")
    phases = [line.split("-- ")[1] for line in out.splitlines() if "  -- " in line]
    assert phases[:2] == ["anchor", "draft"]
    assert "verify" in phases
    assert "with" in out.splitlines()[-3]


@pytest.mark.model
def test_transformers_cache() -> None:
    out = output_of("03_transformers_cache.py")
    assert "When is it useful?" in out
    assert "pass" in out


@pytest.mark.slow
def test_the_second_model_makes_caches(tmp_path: Path) -> None:
    assert "saved in" in output_of("second_model.py", str(tmp_path / "model"), "--minutes", "0.01")
    model = lynxkv.load_model(str(tmp_path / "model"))
    kv = lynxkv.prefill(model, model.tokenizer("def answer() -> int:\n    return 42\n" * 8)["input_ids"])
    lynxkv.encode(kv, tmp_path / "a.lynx", identity=model.identity)
    tensors = [x for layer in lynxkv.load(tmp_path / "a.lynx").layers for x in layer.tensors.values()]
    assert {(x.shape[0], x.shape[2]) for x in tensors} == {(2, 64)}


@pytest.mark.model
@pytest.mark.slow
def test_the_demo_without_a_terminal() -> None:
    out = output_of("demo.py")
    assert "IDENTICAL to decoding from the full cache" in out
    assert "\x1b[" not in out


@pytest.mark.model
def test_the_code_in_the_readme(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)
    (tmp_path / "readme.py").write_text(code, "utf-8")
    assert "1871" in output_of(tmp_path / "readme.py")
