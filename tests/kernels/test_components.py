"""Components of a basis: every backend the reference's bits, products exact however they are summed, and back again."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from lynxkv import InputError
from lynxkv.codecs import get_codec
from lynxkv.codecs.base import Place
from lynxkv.format.basis import RopeTables, TensorBasis
from lynxkv.kernels import EntropyTables, Paged, Rope, Transform, dequantize, products, quantize, reference, tables_at
from lynxkv.kernels.products import exact_product
from lynxkv.kernels.rounding import TORCH_DTYPES
from lynxkv.kernels.transform import components, turned_back, values_of
from lynxkv.layout import EntropyCoding, TensorSpec

SHAPES = [(3, 300, 64, 1), (2, 70, 80, 2), (4, 37, 6, 1), (1, 129, 96, 1), (4, 33, 16, 2), (2, 1, 12, 1)]


def rope(pairs: int, first: int = 100) -> Rope:
    """The usual angles of `pairs` pairs."""
    frequency = 10000.0 ** -(np.arange(pairs) / max(pairs, 1))

    def turns(position: np.ndarray) -> np.ndarray:
        angle = position[:, None] * frequency
        return np.stack([np.cos(angle), np.sin(angle)], -1).astype(np.float32)

    return Rope(tables=RopeTables(coarse=turns(np.arange(0, 1024, 64)), fine=turns(np.arange(64))), first=first)


def transform(heads: int, dim: int, blocks: int, *, pairs: int | None = None) -> Transform:
    """Random directions, and a rope of half a head or `pairs`."""
    size = heads * dim // blocks
    generator = torch.Generator().manual_seed(5)
    directions = torch.linalg.qr(torch.randn(blocks, size, size, generator=generator, dtype=torch.float64))[0]
    rows = torch.round(directions * (127 / directions.abs().max())).to(torch.int8).numpy()
    pairs = dim // 2 if pairs is None else pairs
    return Transform(basis=TensorBasis(rows=rows), rope=rope(pairs) if pairs else None)


def normal(heads: int, tokens: int, dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
    x = torch.randn(heads, tokens, dim, generator=torch.Generator().manual_seed(7))
    return (x + torch.arange(dim) % 3 * 4).to(dtype)


def encoded(
    x: Tensor, own: Transform, *, radix: int = 8, tensor: str = "k"
) -> tuple[EntropyCoding, EntropyTables, np.ndarray, np.ndarray | None]:
    codec = get_codec("compact", radix=radix)
    coding = codec.coding("k", x.shape[0] * x.shape[2])
    assert isinstance(coding, EntropyCoding)
    tables = codec.tables(x, tensor, Place(transform=own))  # type: ignore[arg-type]
    assert isinstance(tables, EntropyTables)
    return coding, tables, *quantize(x, coding, tables)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("tensor", ["k", "v"])
def test_backends_give_the_same_bits(
    shape: tuple[int, int, int, int], dtype: str, tensor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads, tokens, dim, blocks = shape
    own = transform(heads, dim, blocks, pairs=0 if tensor == "v" else None)
    x = normal(heads, tokens, dim, TORCH_DTYPES[dtype])
    coding, tables, anchor, residual = encoded(x, own, tensor=tensor)
    spec = TensorSpec(heads=heads, head_dim=dim, coding=0)
    for codes in (None, residual):
        for destination in (TORCH_DTYPES[dtype], torch.float32):
            found = {}
            for name in ("reference", "cpu"):
                monkeypatch.setenv("LYNXKV_BACKEND", name)
                buffer = torch.full((heads, tokens + 3, dim), float("nan"), dtype=destination)
                dequantize(anchor, codes, coding, tables, spec, dtype, buffer[:, :tokens])
                assert buffer[:, tokens:].isnan().all()
                found[name] = buffer[:, :tokens]
            assert torch.equal(found["cpu"], found["reference"])
            assert torch.equal(found["cpu"].signbit(), found["reference"].signbit())


def test_pages_hold_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    own = transform(3, 64, 1)
    x = normal(3, 40, 64)
    coding, tables, anchor, residual = encoded(x, own)
    spec = TensorSpec(heads=3, head_dim=64, coding=0)
    plain = torch.empty(3, 40, 64, dtype=torch.bfloat16)
    dequantize(anchor, residual, coding, tables, spec, "bf16", plain)
    for name in ("reference", "cpu"):
        monkeypatch.setenv("LYNXKV_BACKEND", name)
        paged = Paged(
            pages=torch.zeros(4, 3, 16, 64, dtype=torch.bfloat16), table=np.array([2, 0, 3]), first=3, tokens=40
        )
        dequantize(anchor, residual, coding, tables, spec, "bf16", paged)
        assert torch.equal(paged.read(), plain)


@pytest.mark.parametrize("shape", SHAPES)
def test_values_come_back_within_the_step(shape: tuple[int, int, int, int]) -> None:
    heads, tokens, dim, blocks = shape
    own, x = transform(heads, dim, blocks), normal(heads, tokens, dim)
    coding, tables, anchor, residual = encoded(x, own, radix=5)
    spec = TensorSpec(heads=heads, head_dim=dim, coding=0)
    # An index is off by half at most, and a turn mixes two channels.
    bound = 2**0.5 * own.basis.weight * float(tables.step) / 2 * 1.001
    for codes, parts in ((None, 1), (residual, 5)):
        out = torch.empty_like(x)
        dequantize(anchor, codes, coding, tables, spec, "bf16", out)
        error = (out - x).abs()
        assert float((error - x.abs() / 256).max()) <= bound / parts
        if tokens > 1:
            usual = own.basis.norm * float(tables.step) / 12**0.5 / parts
            assert float((error.square().mean() - (x / 400).square().mean()).clamp_min(0).sqrt()) < 1.2 * usual


@pytest.mark.parametrize("pairs", [3, 6])
def test_a_turn_is_undone(pairs: int) -> None:
    own, x = transform(2, 12, 1, pairs=pairs), normal(2, 50, 12)
    back = turned_back(x, own.rope)
    assert torch.equal(back[..., 2 * pairs :], x[..., 2 * pairs :])
    mean = torch.zeros(24)
    sums = components(back, mean, own)
    tables = EntropyTables(
        mean=mean.numpy(), order=np.arange(24, dtype=np.uint16), step=np.float32(1), half_step=np.float32(1)
    )
    product = torch.bmm(sums, torch.from_numpy(own.rows.astype(np.float32)))
    spec = TensorSpec(heads=2, head_dim=12, coding=0)
    assert torch.allclose(values_of(product, tables, own, spec, 1.0), x, atol=1e-4)


@pytest.mark.parametrize("in_bytes", [True, False])
@pytest.mark.parametrize("most", [0, 100, 127, 128, 16_319, 16_320, 2**23])
@pytest.mark.parametrize(("heads", "dim", "blocks"), [(4, 64, 1), (3, 5, 1), (6, 16, 3)])
def test_products_are_exact_however_they_are_summed(
    heads: int, dim: int, blocks: int, most: int, in_bytes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "_bytes_are_faster", lambda size: in_bytes)
    basis = transform(heads, dim, blocks).basis
    generator = torch.Generator().manual_seed(1)
    size = heads * dim // blocks
    index = torch.randint(-most, most + 1, (blocks, 33, size), generator=generator).to(torch.float32)
    index[:, 0], index[:, 1] = most, -most
    want = torch.from_numpy(index.numpy().astype(np.int64) @ basis.rows.astype(np.int64)).to(torch.float32)
    for precision in ("highest", "medium"):
        monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda precision=precision: precision)
        assert torch.equal(exact_product(index, basis), want)


def test_bytes_that_clip_are_noticed() -> None:
    """Told to do without the instructions for bytes, oneDNN adds pairs in 16 bits and clips them."""
    program = """
import torch, lynxkv.kernels.products as products
x = torch.full((64, 192), 127, dtype=torch.int8)
clips = int(torch._int_mm(x, torch.full((192, 192), 127, dtype=torch.int8))[0, 0]) != 127 * 127 * 192
assert products._bytes_are_exact(192) is not clips
"""
    for allowed in ("AVX2", "DEFAULT"):
        run = subprocess.run(
            [sys.executable, "-c", program], env={**os.environ, "ONEDNN_MAX_CPU_ISA": allowed}, check=False
        )
        assert run.returncode == 0


def test_segments_start_where_they_are() -> None:
    own, x = transform(3, 64, 1), normal(3, 90, 64)
    coding, tables, anchor, _ = encoded(x, own)
    spec = TensorSpec(heads=3, head_dim=64, coding=0)
    whole = torch.empty(3, 90, 64, dtype=torch.bfloat16)
    dequantize(anchor, None, coding, tables, spec, "bf16", whole)
    later = tables_at(tables, 64)
    assert isinstance(later, EntropyTables)
    part, _ = quantize(x[:, 64:], coding, later)
    out = torch.empty(3, 26, 64, dtype=torch.bfloat16)
    dequantize(part, None, coding, later, spec, "bf16", out)
    assert torch.equal(out, whole[:, 64:])


@pytest.mark.parametrize("table", [1.0, 3e38])
def test_extreme_values_stay_finite_and_alike(table: float, monkeypatch: pytest.MonkeyPatch) -> None:
    own, x = transform(2, 16, 1), normal(2, 40, 16)
    coding, tables, anchor, residual = encoded(x, own)
    spec = TensorSpec(heads=2, head_dim=16, coding=0)
    wild = replace(tables, step=np.float32(1e38), half_step=np.float32(1e38), mean=np.full(32, -3e38, np.float32))
    assert own.rope is not None
    ropes = RopeTables(coarse=own.rope.tables.coarse * np.float32(table), fine=own.rope.tables.fine * np.float32(table))
    wild = replace(wild, transform=replace(own, rope=replace(own.rope, tables=ropes)))
    found = {}
    for name in ("reference", "cpu"):
        monkeypatch.setenv("LYNXKV_BACKEND", name)
        found[name] = torch.empty(2, 40, 16, dtype=torch.bfloat16)
        dequantize(anchor, residual, coding, wild, spec, "bf16", found[name])
        assert found[name].isfinite().all()
    assert torch.equal(found["cpu"], found["reference"])


@pytest.mark.parametrize(
    "rows", [np.ones((8, 8)), np.zeros((8, 8)), np.eye(8) + 127 * np.eye(8, k=1), np.diag([127] * 7 + [0])]
)
def test_a_basis_without_a_good_inverse_is_refused(rows: np.ndarray) -> None:
    own = Transform(basis=TensorBasis(rows=rows.astype(np.int8)[None]))
    with pytest.raises(InputError, match="inverse"):
        encoded(normal(1, 9, 8), own)


@pytest.mark.parametrize("table", [0.0, 1e-30, 3e38])
def test_a_turn_that_cannot_be_undone_is_refused(table: float) -> None:
    own = transform(1, 8, 1)
    assert own.rope is not None
    fine = np.full_like(own.rope.tables.fine, table)
    ropes = RopeTables(coarse=np.full_like(own.rope.tables.coarse, table), fine=fine)
    with pytest.raises(InputError, match="too large"):
        encoded(normal(1, 9, 8), replace(own, rope=replace(own.rope, tables=ropes)))


def test_segments_share_what_is_known_of_a_basis() -> None:
    own = transform(2, 8, 1)
    later = own.at(64)
    assert later.rope is not None
    assert later.rope.first == 164
    assert later.basis is own.basis
    assert later.inverse is not own.inverse
    assert own.at(128).inverse is own.inverse


def test_reference_and_codec_agree_on_what_a_component_is() -> None:
    """Indices times rows, a step and a mean, without any of the code under test."""
    own, x = transform(2, 8, 1, pairs=0), normal(2, 30, 8)
    _, tables, anchor, _ = encoded(x, own)
    index = anchor[: 16 * 30].astype(np.int64).reshape(16, 30) - 127
    component = np.empty_like(index)
    component[tables.order] = index
    sums = component.T @ own.rows[0].astype(np.int64)
    value = sums.astype(np.float32) * tables.step + tables.mean
    out = torch.empty(2, 30, 8)
    reference.place_components(
        torch.from_numpy(sums.astype(np.float32))[None],
        tables,
        own,
        TensorSpec(heads=2, head_dim=8, coding=0),
        float(tables.step),
        "fp32",
        out,
    )
    assert np.array_equal(out.transpose(0, 1).reshape(30, 16).numpy(), value)
    error = np.abs(value - x.transpose(0, 1).reshape(30, 16).numpy())
    assert error.max() <= own.basis.weight * float(tables.step) / 2 * 1.001
