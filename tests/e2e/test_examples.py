"""The examples, the demo and the README's code run as a newcomer runs them, and say what they should."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def output_of(script: str | Path) -> str:
    """What a script prints, without a terminal; it must succeed."""
    done = subprocess.run([sys.executable, EXAMPLES / script], stdin=subprocess.DEVNULL, capture_output=True, text=True)
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
