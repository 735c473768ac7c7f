"""How fast the kernels are on this machine, beside a plain copy of the same bytes.

Rates count 16-bit tensor bytes: those written when decoding, those read when encoding. Every repeat runs all operations
once, one after the other, so that whatever else the machine does meets them alike; ratios are taken within a repeat.
Segments are shared out to as many threads as torch has, which is what the copy uses too. On a GPU, time is that of
kernels on the device, without what brings bytes there.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import fsspec
import torch
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor

from lynxkv.codecs import Codec, get_codec
from lynxkv.decoder import KVDestination, decode_into
from lynxkv.encoder import encode
from lynxkv.errors import InputError
from lynxkv.fetch import open_cache
from lynxkv.format.compression import compress, decompress
from lynxkv.format.write import payload
from lynxkv.kernels import Backend, Tables, named_backend
from lynxkv.kv import KV, KVLayer
from lynxkv.layout import Coding, Precision, TensorSpec
from lynxkv.parallel import map_ordered, threads, torch_alone

SHAPES = ((3, 64), (8, 128))
CODECS = ("default", "alg1", "int4")
BACKENDS = ("cpu", "reference")
# The reference decodes at about a fiftieth of a copy: a slice tells as much.
_REFERENCE_SHARE = 16
_SEGMENTS_A_TENSOR = 2


@dataclass(frozen=True, kw_only=True)
class KernelRow:
    """One operation. Rates are medians over the repeats, `low` and `high` their extremes; `ratio_to_copy` is the median
    of the ratios to the same repeat's copy on the same device. `gb_per_core_s` counts seconds of processor time of all
    threads, which others on the machine disturb less; None on a GPU. `data_bytes` is what it was measured on.
    """

    heads: int
    head_dim: int
    codec: str
    device: str
    backend: str
    op: str
    gb_per_s: float
    low: float
    high: float
    copy_gb_per_s: float
    ratio_to_copy: float
    gb_per_core_s: float | None
    data_bytes: int


@dataclass(frozen=True, kw_only=True)
class _Segment:
    x: Tensor
    out: Tensor
    tables: Tables
    anchor: Any
    residual: Any


@dataclass(frozen=True, kw_only=True)
class Operation:
    """Something to measure, which moves `moved` tensor bytes."""

    backend: str
    op: str
    work: Callable[[], object]
    moved: int
    device: str = "cpu"


def bench_kernels(
    *,
    shapes: Sequence[tuple[int, int]] = SHAPES,
    codecs: Sequence[str] = CODECS,
    backends: Sequence[str] = BACKENDS,
    data_bytes: int = 256 << 20,
    repeats: int = 5,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[KernelRow]:
    """Measure every backend on every codec and shape (KV heads, head dim), and Triton on a GPU where there is one.

    Args:
        data_bytes: bf16 bytes of the tensors, about.
        progress: called with (shapes and codecs done, in all).

    Raises:
        InputError: an unknown codec or backend, or nothing to measure.
    """
    if data_bytes < 1 or repeats < 1:
        raise InputError("there is nothing to measure", hint="take at least one repeat and one byte")
    modules = {name: named_backend(name) for name in backends}
    cases = [(shape, get_codec(name)) for shape in shapes for name in codecs]
    rows = []
    for done, ((heads, dim), codec) in enumerate(cases):
        progress(done, len(cases))
        rows += _case(heads, dim, codec, modules, data_bytes, repeats)
    progress(len(cases), len(cases))
    return rows


def larger_part(rows: Sequence[KernelRow]) -> float | None:
    """Of one shape and codec: the time of encoding over that of its larger part alone on one thread."""
    rates = {row.op: row.gb_per_s for row in rows}
    if ENCODE not in rates:
        return None
    return min(rates[part] for part in ENCODE_PARTS) / rates[ENCODE]


def _case(
    heads: int, dim: int, codec: Codec, modules: dict[str, Backend], data_bytes: int, repeats: int
) -> list[KernelRow]:
    coding = codec.coding("k", heads * dim)
    spec = TensorSpec(heads=heads, head_dim=dim, coding=0)
    xs, segments = _data(heads, dim, codec, coding, data_bytes)
    total = sum(x.nbytes for x in xs)
    operations = [_copy(total, "cpu")]
    for name, module in modules.items():
        some = segments[: max(1, len(segments) // (_REFERENCE_SHARE if name == "reference" else 1))]
        operations += _operations(name, module, some, coding, spec)
    if codec.compress and "cpu" in modules:
        operations += _with_zstd(modules["cpu"], segments, coding, spec)
    image = save_safetensors({str(number): x for number, x in enumerate(xs)})
    operations.append(Operation(backend="safetensors", op="load", work=lambda: load_safetensors(image), moved=total))
    if torch.cuda.is_available():
        operations += _on_gpu(segments, coding, spec)
    with _published(xs, codec) as cache:
        if "cpu" in modules:
            operations += _encoding(modules["cpu"], segments, coding, codec, cache)
            operations += _loading(coding, cache, total)
        measured = _measure(operations, repeats=repeats)
    return [KernelRow(heads=heads, head_dim=dim, codec=codec.name, **row) for row in measured]


def _copy(total: int, device: str) -> Operation:
    """In one piece: the fastest that a copy gets."""
    source = torch.zeros(total // 2, dtype=torch.bfloat16, device=device)
    target = torch.ones_like(source)
    return Operation(backend="torch", op="copy", work=lambda: target.copy_(source), moved=total, device=device)


def _data(heads: int, dim: int, codec: Codec, coding: Coding, data_bytes: int) -> tuple[list[Tensor], list[_Segment]]:
    """Keys and values [H, T, D] with channels of unlike means and spreads, and their segments, coded."""
    tokens = _SEGMENTS_A_TENSOR * coding.segment_tokens
    generator = torch.Generator().manual_seed(0)
    xs, segments = [], []
    for _ in range(2 * max(1, round(data_bytes / (4 * heads * tokens * dim)))):
        spread = 0.2 + 2 * torch.rand(heads, 1, dim, generator=generator)
        x = torch.randn(heads, tokens, dim, generator=generator) * spread
        x = (x + torch.randn(heads, 1, dim, generator=generator)).to(torch.bfloat16)
        out = torch.zeros_like(x)
        tables = codec.tables(x, "k")
        for start in range(0, tokens, coding.segment_tokens):
            part = x[:, start : start + coding.segment_tokens]
            anchor, residual = named_backend("cpu").quantize(part, coding, tables)
            place = out[:, start : start + coding.segment_tokens]
            segments.append(_Segment(x=part, out=place, tables=tables, anchor=anchor, residual=residual))
        xs.append(x)
    return xs, segments


def _operations(
    name: str, module: Backend, segments: Sequence[_Segment], coding: Coding, spec: TensorSpec, device: str = "cpu"
) -> list[Operation]:
    """Quantise, decode to anchor precision, refine, which is decoding to full precision in place."""
    moved = sum(segment.x.nbytes for segment in segments)

    def quantize(segment: _Segment) -> None:
        _quantize(module, segment, coding)

    def anchor(segment: _Segment) -> None:
        module.dequantize(segment.anchor, None, coding, segment.tables, spec, "bf16", segment.out)

    def refine(segment: _Segment) -> None:
        module.dequantize(segment.anchor, segment.residual, coding, segment.tables, spec, "bf16", segment.out)

    works = {"quantize": quantize, "dequantize anchor": anchor}
    if coding.has_residual:
        works["dequantize full, refine"] = refine
    return [
        Operation(backend=name, op=op, work=partial(_each, work, segments), moved=moved, device=device)
        for op, work in works.items()
    ]


def _quantize(module: Backend, segment: _Segment, coding: Coding) -> tuple[Any, Any]:
    """Codes of a segment; where the codec needs statistics, they are part of the work."""
    if coding.scheme == "entropy":
        module.channel_statistics(segment.x)
    return module.quantize(segment.x, coding, segment.tables)


def _row_bytes(segment: _Segment, coding: Coding) -> int | None:
    """As the encoder compresses anchors: a channel of entropy-coded symbols is a row."""
    return segment.x.shape[1] if coding.scheme == "entropy" else None


def _with_zstd(module: Backend, segments: Sequence[_Segment], coding: Coding, spec: TensorSpec) -> list[Operation]:
    """From frames to values, and zstd alone beside it."""
    frames = [compress(segment.anchor, _row_bytes(segment, coding)) for segment in segments]
    moved = sum(segment.x.nbytes for segment in segments)

    def unpack(number: int) -> Any:
        return decompress(frames[number], segments[number].anchor.nbytes, where="a segment")

    def decode(number: int) -> None:
        segment = segments[number]
        module.dequantize(unpack(number), None, coding, segment.tables, spec, "bf16", segment.out)

    numbers = range(len(frames))
    return [
        Operation(backend="zstd", op="decompress anchor", work=partial(_each, unpack, numbers), moved=moved),
        Operation(backend="cpu", op="zstd + dequantize anchor", work=partial(_each, decode, numbers), moved=moved),
    ]


ENCODE, ENCODE_PARTS = "encode", ("quantize, one thread", "compress and digest, one thread")


@dataclass(frozen=True, kw_only=True)
class _Published:
    kv: KV
    url: str


@contextmanager
def _published(xs: Sequence[Tensor], codec: Codec) -> Iterator[_Published]:
    """The tensors as a cache in memory."""
    layers = [
        KVLayer(tensors={"k": k, "v": v}, start=0, stop=k.shape[1]) for k, v in zip(xs[::2], xs[1::2], strict=True)
    ]
    folder = f"lynxkv-bench-{uuid.uuid4().hex}"
    cache = _Published(kv=KV(layers=layers, start=0, stop=layers[0].stop), url=f"memory://{folder}/cache.lynx")
    encode(cache.kv, cache.url, codec=codec)
    try:
        yield cache
    finally:
        fsspec.filesystem("memory").rm(f"/{folder}", recursive=True)


def _encoding(
    module: Backend, segments: Sequence[_Segment], coding: Coding, codec: Codec, cache: _Published
) -> list[Operation]:
    """A cache encoded and published in memory; and what is overlapped there, each part alone on one thread."""
    moved = sum(segment.x.nbytes for segment in segments)

    def seal(segment: _Segment) -> None:
        payload(segment.anchor, may_compress=codec.compress, row_bytes=_row_bytes(segment, coding))
        if segment.residual is not None:
            payload(segment.residual, may_compress=codec.compress)

    def one_thread(work: Callable[[_Segment], object]) -> None:
        with _threads(1):
            _each(work, segments)

    works: tuple[Callable[[_Segment], object], ...] = (lambda segment: _quantize(module, segment, coding), seal)
    return [
        *(
            Operation(backend="cpu", op=op, work=partial(one_thread, work), moved=moved)
            for op, work in zip(ENCODE_PARTS, works, strict=True)
        ),
        Operation(
            backend="cpu",
            op=ENCODE,
            work=lambda: encode(cache.kv, cache.url, codec=codec, overwrite=True),
            moved=moved,
        ),
    ]


def _loading(coding: Coding, cache: _Published, total: int) -> list[Operation]:
    """The cache fetched from memory, checked, decompressed and decoded into tensors that are there already."""
    with open_cache(cache.url) as reader:
        destination = KVDestination(reader.extent)

    def load(precision: Precision) -> None:
        with open_cache(cache.url) as reader:
            decode_into(reader, destination, precision)

    precisions: tuple[Precision, ...] = ("anchor", "full") if coding.has_residual else ("full",)
    return [
        Operation(backend="cpu", op=f"fetch and decode, {precision}", work=partial(load, precision), moved=total)
        for precision in precisions
    ]


def _on_gpu(segments: Sequence[_Segment], coding: Coding, spec: TensorSpec) -> list[Operation]:
    """The same segments with their tensors on the GPU."""
    there = [replace(segment, x=segment.x.cuda(), out=segment.out.cuda()) for segment in segments]
    moved = sum(segment.x.nbytes for segment in there)
    return [_copy(moved, "cuda"), *_operations("triton", named_backend("triton"), there, coding, spec, "cuda")]


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _each(work: Callable[[Any], object], items: Sequence[Any]) -> None:
    with torch_alone():
        for _ in map_ordered(work, items, threads=threads()):
            pass


def _wall_seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _kernel_seconds(work: Callable[[], object]) -> float:
    """Time that kernels and copies within the device take; bytes on their way to it or from it do not count."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        work()
        torch.cuda.synchronize()
    return device_seconds(trace.key_averages())


def device_seconds(events: Any) -> float:
    """Sum over the events of a profile, transfers from and to the host apart."""
    return float(sum(event.self_device_time_total for event in events if not event.key.startswith(_TRANSFERS))) / 1e6


_TRANSFERS = ("Memcpy HtoD", "Memcpy DtoH", "Memset")
_CLOCKS = {"cpu": _wall_seconds, "cuda": _kernel_seconds}


def _measure(operations: Sequence[Operation], *, repeats: int) -> list[dict[str, Any]]:
    """Run all operations once to warm up, then `repeats` times in turn; ratios are to the copy on the same device."""
    rates: list[list[float]] = [[] for _ in operations]
    core_rates: list[list[float]] = [[] for _ in operations]
    for repeat in range(-1, repeats):
        for number, operation in enumerate(operations):
            used = time.process_time()
            seconds = _CLOCKS[operation.device](operation.work)
            used = max(time.process_time() - used, 1e-9)
            if repeat >= 0:
                rates[number].append(operation.moved / seconds / 1e9)
                core_rates[number].append(operation.moved / used / 1e9)
    copies = {item.device: own for item, own in zip(operations, rates, strict=True) if item.op == "copy"}
    return [
        {
            "device": operation.device,
            "backend": operation.backend,
            "op": operation.op,
            "gb_per_s": median(own),
            "low": min(own),
            "high": max(own),
            "copy_gb_per_s": median(copies[operation.device]),
            "ratio_to_copy": median(rate / copy for rate, copy in zip(own, copies[operation.device], strict=True)),
            "gb_per_core_s": median(core) if operation.device == "cpu" else None,
            "data_bytes": operation.moved,
        }
        for operation, own, core in zip(operations, rates, core_rates, strict=True)
    ]
