"""The store of the load test that fails now and then: what is loaded through it is right, whatever has failed."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import lynxkv
from lynxkv import ChecksumError
from lynxkv.choices import TransportName
from lynxkv.fetch import FetchOptions
from lynxkv.testing.kv import random_kv
from lynxkv.testing.servers import Server

s3fs = pytest.importorskip("s3fs")

SCRIPT = Path(__file__).parents[2] / "examples" / "faulty_store.py"


@pytest.fixture
def faulty(s3_running: Server) -> Iterator[subprocess.Popen[str]]:
    """A process before the S3 server; a third of the requests through it goes wrong."""
    endpoint = s3_running.environment["AWS_ENDPOINT_URL"]
    arguments = [endpoint.removeprefix("http://"), "--share", "0.2", "--seed", "3"]
    process = subprocess.Popen([sys.executable, SCRIPT, *arguments], stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["fsspec", "obstore"])
def test_what_comes_through_it_is_right(
    faulty: subprocess.Popen[str], s3: str, transport: TransportName, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lynxkv.fetch.ranges.FIRST_PAUSE_S", 0.001)
    kv, url = random_kv(layers=2, tokens=500), f"{s3}/faulty-{transport}.lynx"
    lynxkv.encode(kv, "memory://right.lynx", overwrite=True)
    lynxkv.encode(kv, url)
    assert faulty.stdout is not None
    monkeypatch.setenv("AWS_ENDPOINT_URL", faulty.stdout.readline().strip())
    s3fs.S3FileSystem.clear_instance_cache()
    expected = lynxkv.load("memory://right.lynx")
    right_ones, damaged = 0, 0
    while right_ones < 5:
        try:
            loaded = lynxkv.load(url, options=FetchOptions(transport=transport, stall_s=0.2, attempts=12))
        except ChecksumError:
            # What is damaged twice in a row is told, not loaded; which request that is depends on their order.
            damaged += 1
            assert damaged < 10
            continue
        right_ones += 1
        for mine, right in zip(loaded.layers, expected.layers, strict=True):
            assert all(mine.tensors[name].equal(tensor) for name, tensor in right.tensors.items())
    faulty.terminate()
    assert faulty.wait(30) == 0
    counts = ast.literal_eval(faulty.stdout.read())
    assert counts["well"] >= 20
    assert sum(counts.values()) >= counts["well"] + 3
