"""What loading takes at its peak, beside what it makes: measured in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import lynxkv
from lynxkv.testing.kv import random_kv

MEASURE = """
import json, sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
import lynxkv
from lynxkv.store.transport import LocalTransport

class Far(LocalTransport):
    is_remote = True

    @asynccontextmanager
    async def get(self, name, start, stop):
        async with super().get(name, start, stop) as answer:
            yield replace(answer, size=await self.size(name))

url, small, precision, where, copies = sys.argv[1:]
workers = ThreadPoolExecutor(8)
options = None
if where != "here":
    options = lynxkv.FetchOptions(
        transport=lambda store: Far(store, workers), cache_dir=copies if where == "copied" else None
    )
# What comes with the first load alone: modules, compiled kernels, threads and their arenas.
lynxkv.load(small, precision=precision, options=options)

def status(name):
    text = Path("/proc/self/status").read_text()
    return int(text.partition(name + ":")[2].split()[0]) * 1024

Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
before = status("VmRSS")
kv = lynxkv.load(url, precision=precision, options=options)
peak = status("VmHWM") - before
destination = sum(tensor.nbytes for layer in kv.layers for tensor in layer.tensors.values())
print(json.dumps({"peak": peak, "destination": destination}))
"""


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """One of 100 MB uncompressed, and one of the same shape with fewer tokens."""
    folder = tmp_path_factory.mktemp("memory")
    for name, tokens in (("large", 3200), ("small", 300)):
        kv = random_kv(layers=8, heads=8, tokens=tokens, head_dim=128)
        lynxkv.encode(kv, folder / f"{name}.lynx", exact=True)
    return folder / "large.lynx", folder / "small.lynx"


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
@pytest.mark.parametrize("where", ["here", "far", "copied"])
@pytest.mark.parametrize("precision", ["anchor", "full", "exact"])
def test_the_peak_is_bounded(precision: str, where: str, caches: tuple[Path, Path], tmp_path: Path) -> None:
    large, small = caches
    anchor = (large / "anchor.safetensors").stat().st_size
    command = [sys.executable, "-c", MEASURE, str(large), str(small), precision, where, str(tmp_path / "copies")]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    measured = json.loads(done.stdout)
    assert measured["destination"] > 100e6
    over = measured["peak"] - measured["destination"] - anchor
    assert over <= 64 << 20, f"{over / 2**20:.0f} MiB more than the destination and the packed anchor"
