"""The Triton kernels return the reference's bits: on a GPU where there is one, else in Triton's interpreter.

The interpreter has to be chosen before triton is imported: test_triton_interpreted.py runs this file with it.
"""

from __future__ import annotations

import os
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor

from lynxkv import ContentError
from lynxkv.codecs import Codec, get_codec
from lynxkv.codecs.base import Place
from lynxkv.encoder import encode_shards
from lynxkv.format.basis import RopeTables, TensorBasis
from lynxkv.kernels import (
    EntropyTables,
    Paged,
    Rope,
    Transform,
    dequantize,
    named_backend,
    quantize,
    reference,
)
from lynxkv.kernels.paged import span
from lynxkv.kernels.rounding import TORCH_DTYPES
from lynxkv.kv import KV, KVLayer
from lynxkv.layout import TensorSpec

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.skipif(
    DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1", reason="needs a GPU or TRITON_INTERPRET=1"
)

SETTINGS = [
    *(get_codec("default", radix=radix) for radix in (1, 2, 3, 5, 6, 8, 11, 16, 32)),
    *(get_codec("alg1", anchor_bits=a, residual_bits=8 - a) for a in (3, 4, 5, 6)),
    get_codec("alg1", alpha=100.0, chunk_dtype="f32"),
    get_codec("alg1-shift"),
    get_codec("fixed", anchor_bits=5, residual_bits=2, chunk_tokens=16, page_tokens=48),
    get_codec("int8"),
    get_codec("int4"),
]
IDS = [f"{codec.name}-{number}" for number, codec in enumerate(SETTINGS)]
# Head dims that are no power of two, one token, pages and chunks that are not full; every input dtype and destination.
CASES = [
    ((1, 270, 64), "bf16", "outliers"),
    ((1, 70, 80), "fp16", "normal"),
    ((3, 37, 5), "fp32", "outliers"),
    ((2, 1, 12), "bf16", "subnormal"),
    ((1, 40, 96), "bf16", "constant"),
    ((1, 20, 256), "fp32", "subnormal"),
]


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    return named_backend("triton")  # type: ignore[return-value]


def tensor(shape: tuple[int, int, int], kind: str, dtype: torch.dtype) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(5))
    if kind == "outliers":
        x[:, :, 0] *= 1000
        x[0, 0, -1] = 3e4
    elif kind == "subnormal":
        x *= 1e-40
    elif kind == "constant":
        x[:, :, ::2] = 2.5
    return x.to(dtype)


@pytest.mark.parametrize("codec", SETTINGS, ids=IDS)
def test_same_bits_as_the_reference(kernels: ModuleType, codec: Codec) -> None:
    for shape, dtype, kind in CASES:
        heads, tokens, dim = shape
        # Tokens first in memory, and a channel too many: strides are respected on both sides.
        x = torch.empty(tokens, heads, dim + 1, dtype=TORCH_DTYPES[dtype], device=DEVICE)[:, :, :dim].transpose(0, 1)
        x.copy_(tensor(shape, kind, TORCH_DTYPES[dtype]))
        coding = codec.coding("k", heads * dim)
        tables = codec.tables(x.cpu(), "k")
        spec = TensorSpec(heads=heads, head_dim=dim, coding=0)
        anchor, residual = reference.quantize(x, coding, tables)
        made, made_residual = kernels.quantize(x, coding, tables)
        assert np.array_equal(made, anchor)
        assert (made_residual is None) == (residual is None)
        assert residual is None or np.array_equal(made_residual, residual)
        for digits in (None, residual) if residual is not None else (None,):
            for destination in {TORCH_DTYPES[dtype], torch.float32}:
                want = torch.empty(shape, dtype=destination)
                buffer = torch.full((heads, tokens + 6, dim), float("nan"), dtype=destination, device=DEVICE)
                reference.dequantize(anchor, digits, coding, tables, spec, dtype, want)
                kernels.dequantize(anchor, digits, coding, tables, spec, dtype, buffer[:, 2:-4])
                assert torch.equal(_bits(buffer[:, 2:-4].cpu()), _bits(want))
                assert torch.isnan(buffer[:, :2]).all()
                assert torch.isnan(buffer[:, -4:]).all()


@pytest.mark.parametrize("name", ["default", "fixed", "alg1", "int8", "raw"])
def test_a_cache_is_encoded_where_its_tensors_are(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same shards as from tensors in host memory, exact section and attention sinks included."""
    shards = []
    for backend, device in (("reference", "cpu"), ("triton", DEVICE)):
        monkeypatch.setenv("LYNXKV_BACKEND", backend)
        layers = [
            KVLayer(
                tensors={key: tensor((2, 70, 8), "outliers", torch.bfloat16).to(device) for key in ("k", "v")},
                start=0,
                stop=70,
            )
            for _ in range(2)
        ]
        cache = encode_shards(KV(layers=layers, start=0, stop=70), codec=name, exact=name != "raw")
        shards.append([b"".join(shard.buffers) for shard in (cache.anchor, cache.residual) if shard is not None])
    assert shards[0] == shards[1]


@pytest.mark.parametrize(
    "codec",
    [get_codec("default", radix=1), get_codec("default", radix=11), get_codec("alg1"), get_codec("int4")],
    ids=["entropy", "entropy in full", "pages and chunks", "tokens"],
)
def test_pages_get_the_same_bits(kernels: ModuleType, codec: Codec) -> None:
    """Through a block table, escapes included; nothing but the slots of these tokens is written."""
    heads, tokens, dim, slots, first = 2, 70, 20, 16, 5
    x = tensor((heads, tokens, dim), "outliers", torch.bfloat16)
    coding, tables = codec.coding("k", heads * dim), codec.tables(x, "k")
    spec = TensorSpec(heads=heads, head_dim=dim, coding=0)
    anchor, residual = reference.quantize(x, coding, tables)
    for digits in (None, residual) if residual is not None else (None,):
        want = torch.empty(heads, tokens, dim, dtype=torch.bfloat16)
        reference.dequantize(anchor, digits, coding, tables, spec, "bf16", want)
        whole = torch.full((8, slots, 2, heads, dim), float("nan"), dtype=torch.bfloat16, device=DEVICE)
        table = np.array([6, 0, 3, 7, 1], np.int64)
        out = Paged(pages=whole[:, :, 1].transpose(1, 2), table=table, tokens=tokens, first=first)
        kernels.dequantize(anchor, digits, coding, tables, spec, "bf16", out)
        assert torch.equal(_bits(out.read().cpu()), _bits(want))
        assert int((~torch.isnan(whole)).sum()) == want.numel()


def test_of_a_block_table_the_pages_of_a_segment_are_on_the_device() -> None:
    from lynxkv.kernels.triton.launch import place_of

    pages = torch.zeros(9, 2, 16, 8, device=DEVICE)
    whole = Paged(pages=pages, table=np.array([7, 0, 3, 8, 1], np.int64), tokens=60, first=20)
    place = place_of(span(whole, 15, 40))
    assert place["table"].tolist() == [3, 8]
    assert (place["first"], place["SLOTS"]) == (3, 16)


@pytest.mark.parametrize(("shape", "blocks", "pairs"), [((2, 70, 12), 1, 6), ((4, 33, 8), 2, 3), ((1, 1, 20), 1, 0)])
@pytest.mark.parametrize("radix", [1, 8])
def test_components_of_a_basis_lead_to_the_same_bits(
    shape: tuple[int, int, int], blocks: int, pairs: int, radix: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`compact`: indices from the kernels, then the product, the turn and the rounding, into tensors and pages."""
    heads, tokens, dim = shape
    size, generator = heads * dim // blocks, torch.Generator().manual_seed(3)
    rows = torch.linalg.qr(torch.randn(blocks, size, size, generator=generator))[0]
    angle = torch.rand(64, pairs, generator=generator) * 6
    turns = torch.stack([angle.cos(), angle.sin()], -1).numpy()
    transform = Transform(
        basis=TensorBasis(rows=(rows * (127 / rows.abs().max())).round().to(torch.int8).numpy()),
        rope=Rope(tables=RopeTables(coarse=turns[:4], fine=turns), first=60) if pairs else None,
    )
    codec, spec = get_codec("compact", radix=radix, key_step=0.05), TensorSpec(heads=heads, head_dim=dim, coding=0)
    x = tensor(shape, "outliers", torch.float32)
    coding, tables = codec.coding("k", heads * dim), codec.tables(x, "k", Place(transform=transform))
    monkeypatch.setenv("LYNXKV_BACKEND", "reference")
    anchor, residual = quantize(x, coding, tables)
    for digits in (None, residual) if residual is not None else (None,):
        want = torch.empty(shape, dtype=torch.bfloat16)
        out = torch.full((heads, tokens + 3, dim), float("nan"), dtype=torch.bfloat16, device=DEVICE)
        pages = torch.zeros(6, heads, 16, dim, dtype=torch.bfloat16, device=DEVICE)
        paged = Paged(pages=pages, table=np.array([5, 0, 3, 1, 2]), first=3, tokens=tokens)
        monkeypatch.setenv("LYNXKV_BACKEND", "reference")
        dequantize(anchor, digits, coding, tables, spec, "bf16", want)
        monkeypatch.setenv("LYNXKV_BACKEND", "triton")
        dequantize(anchor, digits, coding, tables, spec, "bf16", out[:, :tokens])
        dequantize(anchor, digits, coding, tables, spec, "bf16", paged)
        assert torch.equal(_bits(out[:, :tokens].cpu()), _bits(want))
        assert torch.equal(_bits(paged.read().cpu()), _bits(want))
        assert out[:, tokens:].isnan().all()


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_rounding_saturates_and_keeps_subnormals(kernels: ModuleType, dtype: str) -> None:
    """Steps that reach from below the smallest subnormal to beyond the largest finite value."""
    coding = get_codec("default", radix=1).coding("k", 1)
    spec = TensorSpec(heads=1, head_dim=1, coding=0)
    for exponent in (-149, -140, -127, -26, -25, -24, -15, -1, 8, 12, 120, 126, 127):
        step = np.float32(2.0**exponent)
        tables = EntropyTables(mean=np.zeros(1, np.float32), order=np.zeros(1, np.uint16), step=step, half_step=step)
        anchor = (np.arange(64) * 3 + 20).astype(np.uint8)
        want, out = torch.empty(1, 64, 1, dtype=TORCH_DTYPES[dtype]), torch.empty(1, 64, 1, dtype=TORCH_DTYPES[dtype])
        out = out.to(DEVICE)
        reference.dequantize(anchor, None, coding, tables, spec, dtype, want)
        kernels.dequantize(anchor, None, coding, tables, spec, dtype, out)
        assert torch.equal(_bits(out.cpu()), _bits(want))


@pytest.mark.parametrize("spoil", ["position", "missing", "digit", "padding"])
def test_forbidden_content_is_refused(kernels: ModuleType, spoil: str) -> None:
    codec = get_codec("int4") if spoil == "padding" else get_codec("default", radix=5, key_step=0.001)
    x = tensor((1, 40, 5), "outliers", torch.float32)
    coding, tables = codec.coding("k", 5), codec.tables(x, "k")
    anchor, residual = (None if part is None else part.copy() for part in reference.quantize(x, coding, tables))
    assert anchor is not None
    if spoil == "position":
        anchor[200] ^= 1
    elif spoil == "missing":
        anchor = np.concatenate([anchor[:200], anchor[208:]])
    elif spoil == "padding":
        anchor[-1] |= 0xF0
    else:
        assert residual is not None
        residual[:] = 0xFF
    out = torch.empty(1, 40, 5, device=DEVICE)
    with pytest.raises(ContentError):
        kernels.dequantize(anchor, residual, coding, tables, TensorSpec(heads=1, head_dim=5, coding=0), "fp32", out)


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int32 if x.dtype == torch.float32 else torch.int16)
