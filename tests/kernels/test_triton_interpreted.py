"""The Triton suite without a GPU, in a process of its own: the interpreter is chosen when triton is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lynxkv import InputError
from lynxkv.kernels import named_backend

pytest.importorskip("triton")


@pytest.mark.slow
def test_triton_suite_under_the_interpreter() -> None:
    suite = Path(__file__).with_name("test_triton.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(suite)],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert "skipped" not in done.stdout.splitlines()[-1]


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter is chosen")
def test_triton_says_what_it_lacks() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(InputError, match="no GPU"):
        named_backend("triton")
