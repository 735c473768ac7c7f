"""Writers killed at random moments: no reader takes a part for the whole, and the next run completes it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import os, random, signal, sys, time
import torch
torch.set_num_threads(1)
import lynxkv
from lynxkv.testing.kv import random_kv

url, kills = sys.argv[1], 12
kv = random_kv(layers=4, heads=3, tokens=500, head_dim=64)
lynxkv.encode(kv, "memory://warm.lynx")
lynxkv.check("memory://warm.lynx")

def start(work):
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = work()
        finally:
            os._exit(code)
    return child

def end(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def write():
    lynxkv.encode(kv, url, overwrite=True)
    return 0

def look():
    try:
        lynxkv.check(url)
    except lynxkv.CacheNotFoundError as error:
        return 10 if "anchor" in str(error) else 1
    return 11

began = time.monotonic()
assert end(start(write)) == 0
takes = time.monotonic() - began
assert end(start(look)) == 11
assert end(start(lambda: 0 if lynxkv.remove(url) else 1)) == 0
moments = random.Random(0)
killed = 0
for _ in range(kills):
    child = start(write)
    time.sleep(moments.uniform(0, takes))
    os.kill(child, signal.SIGKILL)
    killed += end(child) == -signal.SIGKILL
    assert end(start(look)) in (10, 11)
assert killed, "none was killed"
assert end(start(write)) == 0
assert end(start(look)) == 11
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_on_disk(tmp_path: Path) -> None:
    arguments = [sys.executable, "-W", "ignore", "-c", CODE, str(tmp_path / "a.lynx")]
    subprocess.run(arguments, check=True, timeout=300)
