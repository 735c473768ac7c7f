"""Writers killed at random moments on disk: no reader takes a part for the whole, and the next run completes it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("killed_writers.py")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("moments", [6, pytest.param(100, marks=pytest.mark.slow)])
def test_on_disk(moments: int, tmp_path: Path) -> None:
    arguments = [sys.executable, "-W", "ignore", PROGRAM, tmp_path / "a.lynx", moments, 500]
    subprocess.run([str(argument) for argument in arguments], check=True, timeout=600)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_spans_on_disk(tmp_path: Path) -> None:
    """What a killed writer of spans has left is a chain that loads, and the next run goes on from it."""
    program = PROGRAM.with_name("killed_span_writers.py")
    arguments = [sys.executable, "-W", "ignore", program, tmp_path, 100]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(PROGRAM.parents[1]), *sys.path])}
    subprocess.run([str(argument) for argument in arguments], check=True, timeout=600, env=environment)
