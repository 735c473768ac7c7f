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
import json, sys, threading
from pathlib import Path
import lynxkv
from lynxkv.store.transport import LocalTransport

url, small, precision, copies = sys.argv[1:]
options = None
if copies:
    LocalTransport.is_remote = True
    options = lynxkv.FetchOptions(cache_dir=copies)
# What comes with the first load alone: modules, compiled kernels, threads and their arenas.
lynxkv.load(small, precision=precision)

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
@pytest.mark.parametrize(("precision", "disk"), [("anchor", False), ("full", False), ("full", True), ("exact", False)])
def test_the_peak_is_bounded(precision: str, disk: bool, caches: tuple[Path, Path], tmp_path: Path) -> None:
    large, small = caches
    anchor = (large / "anchor.safetensors").stat().st_size
    copies = str(tmp_path / "copies") if disk else ""
    command = [sys.executable, "-c", MEASURE, str(large), str(small), precision, copies]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    measured = json.loads(done.stdout)
    assert measured["destination"] > 100e6
    over = measured["peak"] - measured["destination"] - anchor
    assert over <= 64 << 20, f"{over / 2**20:.0f} MiB more than the destination and the packed anchor"
