"""How fast the kernels are on this machine, beside a plain copy of the same bytes.

Rates count 16-bit tensor bytes: those written when decoding, those read when encoding. Every repeat runs all operations
once, one after the other, so that whatever else the machine does meets them alike; ratios are taken within a repeat.
Segments are shared out to as many threads as torch has, which is what the copy uses too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor

from lynxkv.codecs import Codec, get_codec
from lynxkv.errors import InputError
from lynxkv.format.compression import compress, decompress
from lynxkv.kernels import Backend, Tables, named_backend
from lynxkv.layout import Coding, TensorSpec

SHAPES = ((3, 64), (8, 128))
CODECS = ("default", "alg1", "int4")
BACKENDS = ("cpu", "reference")
# The reference decodes at about a fiftieth of a copy: a slice tells as much.
_REFERENCE_SHARE = 16
_SEGMENTS_A_TENSOR = 2


@dataclass(frozen=True, kw_only=True)
class KernelRow:
    """One operation. Rates are medians over the repeats, `low` and `high` their extremes; `ratio_to_copy` is the median
    of the ratios to the same repeat's copy. `data_bytes` is what the operation was measured on.
    """

    heads: int
    head_dim: int
    codec: str
    backend: str
    op: str
    gb_per_s: float
    low: float
    high: float
    copy_gb_per_s: float
    ratio_to_copy: float
    data_bytes: int


@dataclass(frozen=True, kw_only=True)
class _Segment:
    x: Tensor
    out: Tensor
    tables: Tables
    anchor: Any
    residual: Any


Operation = tuple[str, str, Callable[[], object], int]
"""Backend, name, the work, and the tensor bytes it moves."""


def bench_kernels(
    *,
    shapes: Sequence[tuple[int, int]] = SHAPES,
    codecs: Sequence[str] = CODECS,
    backends: Sequence[str] = BACKENDS,
    data_bytes: int = 256 << 20,
    repeats: int = 5,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[KernelRow]:
    """Measure every backend on every codec and shape (KV heads, head dim).

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


def _case(
    heads: int, dim: int, codec: Codec, modules: dict[str, Backend], data_bytes: int, repeats: int
) -> list[KernelRow]:
    coding = codec.coding("k", heads * dim)
    spec = TensorSpec(heads=heads, head_dim=dim, coding=0)
    xs, segments = _data(heads, dim, codec, coding, data_bytes)
    total = sum(x.nbytes for x in xs)
    # In one piece: the fastest that a copy gets.
    source, target = torch.zeros(total // 2, dtype=torch.bfloat16), torch.ones(total // 2, dtype=torch.bfloat16)
    operations: list[Operation] = [("torch", "copy", lambda: target.copy_(source), total)]
    pool = ThreadPoolExecutor(torch.get_num_threads())
    for name, module in modules.items():
        some = segments[: max(1, len(segments) // (_REFERENCE_SHARE if name == "reference" else 1))]
        operations += _operations(name, module, some, coding, spec, pool)
    if codec.compress and "cpu" in modules:
        operations += _with_zstd(modules["cpu"], segments, coding, spec, pool)
    image = save_safetensors({str(number): x for number, x in enumerate(xs)})
    operations.append(("safetensors", "load", lambda: load_safetensors(image), total))
    return [
        KernelRow(heads=heads, head_dim=dim, codec=codec.name, **row) for row in _measure(operations, repeats=repeats)
    ]


def _data(heads: int, dim: int, codec: Codec, coding: Coding, data_bytes: int) -> tuple[list[Tensor], list[_Segment]]:
    """Tensors [H, T, D] with channels of unlike means and spreads, and their segments, coded."""
    tokens = _SEGMENTS_A_TENSOR * coding.segment_tokens
    generator = torch.Generator().manual_seed(0)
    xs, segments = [], []
    for _ in range(max(1, round(data_bytes / (2 * heads * tokens * dim)))):
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
    name: str, module: Backend, segments: Sequence[_Segment], coding: Coding, spec: TensorSpec, pool: Executor
) -> list[Operation]:
    """Quantise, decode to anchor precision, decode to full precision. Quantising includes the statistics it needs."""
    moved = sum(segment.x.nbytes for segment in segments)

    def quantize(segment: _Segment) -> None:
        if coding.scheme == "entropy":
            module.channel_statistics(segment.x)
        module.quantize(segment.x, coding, segment.tables)

    def anchor(segment: _Segment) -> None:
        module.dequantize(segment.anchor, None, coding, segment.tables, spec, "bf16", segment.out)

    def refine(segment: _Segment) -> None:
        module.dequantize(segment.anchor, segment.residual, coding, segment.tables, spec, "bf16", segment.out)

    works = {"quantize": quantize, "dequantize anchor": anchor}
    if coding.has_residual:
        works["refine"] = refine
    return [(name, op, partial(_each, pool, work, segments), moved) for op, work in works.items()]


def _with_zstd(
    module: Backend, segments: Sequence[_Segment], coding: Coding, spec: TensorSpec, pool: Executor
) -> list[Operation]:
    """From frames to values, and zstd alone beside it."""
    frames = [compress(segment.anchor) for segment in segments]
    moved = sum(segment.x.nbytes for segment in segments)

    def unpack(number: int) -> Any:
        return decompress(frames[number], segments[number].anchor.nbytes, where="a segment")

    def decode(number: int) -> None:
        segment = segments[number]
        module.dequantize(unpack(number), None, coding, segment.tables, spec, "bf16", segment.out)

    numbers = range(len(frames))
    return [
        ("zstd", "decompress", partial(_each, pool, unpack, numbers), moved),
        ("cpu", "zstd + dequantize anchor", partial(_each, pool, decode, numbers), moved),
    ]


def _each(pool: Executor, work: Callable[[Any], object], items: Sequence[Any]) -> None:
    for _ in pool.map(work, items):
        pass


def _measure(operations: Sequence[Operation], *, repeats: int) -> list[dict[str, Any]]:
    """Run all operations once to warm up, then `repeats` times in turn; the first is the copy."""
    rates: list[list[float]] = [[] for _ in operations]
    for repeat in range(-1, repeats):
        for number, (_, _, work, moved) in enumerate(operations):
            start = time.perf_counter()
            work()
            if repeat >= 0:
                rates[number].append(moved / (time.perf_counter() - start) / 1e9)
    return [
        {
            "backend": backend,
            "op": op,
            "gb_per_s": median(own),
            "low": min(own),
            "high": max(own),
            "copy_gb_per_s": median(rates[0]),
            "ratio_to_copy": median(rate / copy for rate, copy in zip(own, rates[0], strict=True)),
            "data_bytes": moved,
        }
        for (backend, op, _, moved), own in zip(operations, rates, strict=True)
    ]
