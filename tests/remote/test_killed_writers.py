"""Writers killed at random moments on S3, of objects in one request and in several parts.

Each moment takes seconds, as processes start; LYNXKV_MOMENTS=100 asks for more of them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[1] / "killed_writers.py"


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize(("moments", "tokens"), [(12, 300), (8, 9000)])
def test_on_s3(moments: int, tokens: int, s3: str) -> None:
    moments = int(os.environ.get("LYNXKV_MOMENTS", moments))
    arguments = [sys.executable, "-W", "ignore", PROGRAM, f"{s3}/{uuid.uuid4().hex}.lynx", moments, tokens]
    subprocess.run([str(argument) for argument in arguments], check=True, timeout=900)
