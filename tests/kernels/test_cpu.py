"""What the numba backend promises beside the right bits: no fused arithmetic, small temporaries, a safe pool."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import lynxkv
from lynxkv.codecs import Codec, get_codec
from lynxkv.encoder import encode
from lynxkv.kernels import FixedTables, cpu, reference
from lynxkv.kernels.cpu import memory, threads
from lynxkv.kv import KV, KVLayer
from lynxkv.layout import TensorSpec


@pytest.mark.slow
def test_decoding_fuses_no_multiply_with_an_add(tmp_path: Path) -> None:
    """In the machine code of kernels compiled here and now: code from the cache cannot be looked at."""
    code = """
import torch
from lynxkv.kernels.cpu.entropy_dequantize import _decode_tiles
from lynxkv.kernels.cpu.fixed_dequantize import _decode_blocks
from lynxkv.quantization import dequantize, quantize
for name, kernel in (("default", _decode_tiles), ("alg1", _decode_blocks)):
    for dtype in (torch.bfloat16, torch.float32):
        dequantize(quantize(torch.randn(2, 70, 24).to(dtype), name))
    lines = [line for text in kernel.inspect_asm().values() for line in text.splitlines()]
    assert len(lines) > 1000
    assert not [line for line in lines if "fmadd" in line or "fmsub" in line or "fmla" in line]
"""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "LYNXKV_BACKEND": "cpu"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
    assert list(tmp_path.rglob("*.nbc")), "machine code was not kept where it was asked to be"


@pytest.mark.parametrize("name", ["default", "alg1", "int8"])
def test_no_temporary_above_a_twentieth_of_the_tensor(name: str) -> None:
    """64 MiB of bf16, segment by segment. What is returned is no temporary."""
    codec = get_codec(name)
    coding, spec = codec.coding("k", 1024), TensorSpec(heads=8, head_dim=128, coding=0)
    tokens = coding.segment_tokens
    x = torch.randn(8, tokens, 128).to(torch.bfloat16)
    whole = torch.empty(8, 2**15, 128, dtype=torch.bfloat16)
    tables = codec.tables(x, "k")
    anchor, residual = cpu.quantize(x, coding, tables)
    cpu.dequantize(anchor, residual, coding, tables, spec, "bf16", whole[:, :tokens])
    tracemalloc.start()
    for start in range(0, whole.shape[1], tokens):
        made = cpu.quantize(x, coding, tables)
        cpu.dequantize(anchor, residual, coding, tables, spec, "bf16", whole[:, start : start + tokens])
        returned = sum(part.nbytes for part in made if part is not None)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak - returned < whole.nbytes / 20


@pytest.mark.parametrize("name", ["default", "alg1", "int8"])
def test_encoding_keeps_little_beside_the_shards(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 MiB of bf16 on two threads. Shards are written once they are complete; beside them there is what may wait, two
    segments of 1 Mi elements a thread, each as symbols, digits, packed digits and frames: a byte an element at most.
    Of numpy's memory and of bytes; values are never copied.
    """
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)

    def cache(tokens: int) -> KV:
        k, v = (torch.randn(8, tokens, 128, dtype=torch.bfloat16) for _ in range(2))
        return KV(layers=[KVLayer(tensors={"k": k, "v": v}, start=0, stop=tokens)], start=0, stop=tokens)

    kv = cache(2**14)
    encode(cache(300), str(tmp_path / "first.lynx"), codec=name)
    tracemalloc.start()
    encode(kv, str(tmp_path / "all.lynx"), codec=name)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    shards = sum(file.stat().st_size for file in (tmp_path / "all.lynx").rglob("*") if file.is_file())
    assert shards > 2**24
    assert peak - shards < 2 * 2 * 4 * 2**20


@pytest.mark.slow
def test_machine_code_is_kept_for_unchanged_sources_only(tmp_path: Path) -> None:
    """Also where what changed is another file than the kernel's, by a byte, and keeps its date."""
    package = tmp_path / "lynxkv"
    shutil.copytree(Path(lynxkv.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    code = """
import numpy as np
from lynxkv.kernels.cpu import exact
exact.pack_exact(np.zeros(4, np.uint16), np.zeros(4, np.uint16), "bf16")
print(sum(exact._pack.stats.cache_hits.values()))
"""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "kept"), "PYTHONPATH": str(tmp_path)}

    def hits() -> int:
        command = [sys.executable, "-c", code]
        return int(subprocess.run(command, check=True, env=environment, cwd=tmp_path, stdout=subprocess.PIPE).stdout)

    assert (hits(), hits()) == (0, 1)
    neighbour = package / "kernels" / "cpu" / "finish.py"
    date = neighbour.stat().st_mtime_ns
    neighbour.write_text(neighbour.read_text("utf-8").replace("The last step", "The next step"), "utf-8")
    os.utime(neighbour, ns=(date, date))
    assert hits() == 0


def test_a_process_without_a_folder_to_write_to_still_works(tmp_path: Path) -> None:
    code = """
import numba.core.caching as caching
caching.CacheImpl._locator_classes = []
import torch
from lynxkv.quantization import dequantize, quantize
x = torch.randn(1, 9, 8)
assert (dequantize(quantize(x, "int8")) - x).abs().max() < 0.1
"""
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "LYNXKV_BACKEND": "cpu"}, cwd=tmp_path)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_has_a_pool_of_its_own() -> None:
    code = """
import os, torch
from lynxkv.kernels.cpu import threads
from lynxkv.encoder import encode
from lynxkv.kv import KV, KVLayer
torch.set_num_threads(2)
def run():
    parts = []
    threads.run_split(lambda start, stop: parts.append((start, stop)), 10, unit=3, elements=1 << 20)
    return sorted(parts)
assert run() == [(0, 6), (6, 10)], run()
child = os.fork()
if child == 0:
    os._exit(0 if run() == [(0, 6), (6, 10)] else 1)
assert os.waitpid(child, 0)[1] == 0
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=120)


def test_all_parts_have_ended_when_one_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    gate, ended = threading.Event(), []

    def work(start: int, stop: int) -> None:
        if start == 0:
            threading.Timer(0.02, gate.set).start()
            raise ValueError("injected")
        gate.wait(10)
        ended.append(start)

    with pytest.raises(ValueError, match="injected"):
        threads.run_split(work, 10, unit=5, elements=1 << 20)
    assert ended == [5]


@pytest.mark.parametrize(
    "codec",
    [get_codec("alg1"), get_codec("alg1", anchor_bits=3, residual_bits=5), get_codec("alg1-shift"), get_codec("int8")],
    ids=["alg1", "alg1, 3 + 5", "alg1-shift", "int8"],
)
def test_one_look_up_finds_the_bucket(codec: Codec) -> None:
    """For floats of all sizes, for both zeros, and around every edge."""
    tables = codec.tables(torch.zeros(1, 1, 1), "k")
    assert isinstance(tables, FixedTables)
    edges, buckets = tables.quantiser()
    cells = tables.bucket_cells
    assert cells.size == 1 << 16
    near = (edges.view(np.uint32)[:, None] + np.arange(-2, 3)).astype(np.uint32).reshape(-1)
    anywhere = np.random.default_rng(0).integers(0, 2**32, 200_000, dtype=np.uint32)
    bits = np.concatenate([anywhere, near, near ^ 0x8000_0000, np.array([0, 1 << 31], np.uint32)])
    bits = bits[np.isfinite(bits.view(np.float32))]
    entry = cells[bits >> 16]
    found = np.where((bits & 0xFFFF) >= (entry & 0xFFFF), entry >> 24, entry >> 16 & 0xFF)
    assert np.array_equal(found, buckets[np.searchsorted(edges, bits.view(np.float32), side="right")])


def test_edges_closer_than_a_look_up_tells_apart() -> None:
    codec, x = get_codec("int8"), torch.randn(2, 40, 8)
    coding, tables = codec.coding("k", 16), codec.tables(x, "k")
    assert isinstance(tables, FixedTables)
    assert tables.edges is not None
    close = replace(tables, edges=np.linspace(60, 70, tables.edges.size, dtype=np.float32))
    assert close.edge_cells.most > 1
    assert np.array_equal(cpu.quantize(x, coding, close)[0], reference.quantize(x, coding, close)[0])


def test_destinations_that_kernels_cannot_write_are_served(tmp_path: Path) -> None:
    """float64, a bf16 cache in fp16, channels apart from each other."""
    codec, x = get_codec("default"), torch.randn(2, 40, 8)
    coding, tables = codec.coding("k", 16), codec.tables(x, "k")
    anchor, residual = cpu.quantize(x, coding, tables)
    spec = TensorSpec(heads=2, head_dim=8, coding=0)
    plain = torch.empty(2, 40, 8, dtype=torch.bfloat16)
    cpu.dequantize(anchor, residual, coding, tables, spec, "bf16", plain)
    for out in (
        torch.empty(2, 40, 8, dtype=torch.float64),
        torch.empty(2, 40, 8, dtype=torch.float16),
        torch.empty(2, 8, 40, dtype=torch.bfloat16).transpose(1, 2),
        torch.empty(2, 40, 16)[:, :, ::2],
    ):
        cpu.dequantize(anchor, residual, coding, tables, spec, "bf16", out)
        assert np.array_equal(out.to(torch.float64).numpy(), plain.to(out.dtype).to(torch.float64).numpy())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_of_a_tensor(dtype: torch.dtype) -> None:
    whole = torch.arange(4 * 10 * 6).view(4, 10, 6).to(dtype)
    part = whole.transpose(0, 1)[3:7, 1:, :5]
    place = memory.source(part)
    rows = [
        place.flat[head * place.head_stride + token * place.token_stride :][:5]
        for head in range(part.shape[0])
        for token in range(part.shape[1])
    ]
    expected = part.contiguous().view(-1, 5)
    bits = expected.numpy() if dtype == torch.float32 else expected.view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(np.stack(rows), bits)


def test_memory_outlives_the_name_of_its_tensor() -> None:
    place = memory.source(torch.full((2, 3, 4), 7.0))
    others = [torch.zeros(2, 3, 4) for _ in range(100)]
    assert (place.flat == 7).all()
    assert len(others) == 100


@pytest.mark.parametrize("empty", [torch.zeros(4, 100, 64)[:, :0], torch.zeros(1, 5, 8).transpose(0, 1)[:0]])
def test_memory_of_no_elements(empty: torch.Tensor) -> None:
    assert memory.source(empty).flat.size == 0


def test_rows_of_an_expanded_destination_stay_in_its_memory() -> None:
    place = memory.destination(torch.zeros(2, 1, 64).expand(2, 300, 64), "fp32")
    assert place is not None
    assert place.starts.max() + place.head_stride + 64 <= place.flat.size
