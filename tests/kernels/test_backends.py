"""Backends agree: decoding to the bit, encoding to the code, on every setting, shape and dtype."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import Tensor

from lynxkv import ContentError, InputError
from lynxkv.codecs import Codec, get_codec
from lynxkv.kernels import Backend, Paged, backend, cpu, dequantize, reference
from lynxkv.kernels.paged import span
from lynxkv.kernels.rounding import TORCH_DTYPES
from lynxkv.layout import TensorSpec
from lynxkv.quantization import quantize as quantize_tensor

SETTINGS = [
    *(get_codec("default", radix=radix) for radix in (1, 2, 3, 5, 6, 8, 10, 16, 32)),
    *(get_codec("alg1", anchor_bits=a, residual_bits=8 - a) for a in (3, 4, 5, 6)),
    get_codec("alg1", alpha=100.0, chunk_dtype="f32"),
    get_codec("alg1-shift"),
    get_codec("fixed"),
    get_codec("fixed", anchor_bits=5, residual_bits=2, chunk_tokens=16, page_tokens=48),
    get_codec("fixed", anchor_bits=7, residual_bits=0),
    get_codec("int8"),
    get_codec("int4"),
]
IDS = [f"{codec.name}-{number}" for number, codec in enumerate(SETTINGS)]
SHAPES = [(2, 300, 64), (1, 70, 80), (3, 37, 5), (2, 1, 12), (1, 129, 96), (1, 40, 256), (2, 65, 128)]


def tensor(shape: tuple[int, int, int], kind: str, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(shape, generator=generator)
    match kind:
        case "outliers":
            x[:, :, 0] *= 1000
            x[0, 0, -1] = 3e4
        case "subnormals":
            x *= 1e-40 if dtype != torch.float16 else 1e-7
        case "constant channels":
            x[:] = 2.5
        case "zeros of both signs":
            x = torch.zeros(shape).copysign(x)
        case "biases":
            x += 300 * torch.randn(shape[0], 1, shape[2], generator=generator)
    return x.to(dtype)


@pytest.mark.parametrize("codec", SETTINGS, ids=IDS)
@pytest.mark.parametrize(
    "kind", ["normal", "outliers", "subnormals", "constant channels", "zeros of both signs", "biases"]
)
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_cpu_is_the_reference(codec: Codec, kind: str, dtype: str) -> None:
    for shape in SHAPES:
        x = tensor(shape, kind, TORCH_DTYPES[dtype])
        coding = codec.coding("k", shape[0] * shape[2])
        tables = codec.tables(x.float(), "k")
        spec = TensorSpec(heads=shape[0], head_dim=shape[2], coding=0)
        anchor, residual = reference.quantize(x.float(), coding, tables)
        fast_anchor, fast_residual = cpu.quantize(x, coding, tables)
        assert np.array_equal(anchor, fast_anchor)
        if residual is None or fast_residual is None:
            assert residual is fast_residual
        else:
            assert np.array_equal(residual, fast_residual)
        for digits in (None, residual) if residual is not None else (None,):
            for destination in {TORCH_DTYPES[dtype], torch.float32}:
                want = torch.empty(shape, dtype=destination)
                # A view into a larger buffer, as a live cache is, poisoned around and below.
                buffer = torch.full((shape[0], shape[1] + 6, shape[2]), float("nan"), dtype=destination)
                reference.dequantize(anchor, digits, coding, tables, spec, dtype, want)
                cpu.dequantize(anchor, digits, coding, tables, spec, dtype, buffer[:, 2:-4])
                assert torch.equal(_bits(buffer[:, 2:-4]), _bits(want))
                assert torch.isnan(buffer[:, :2]).all()
                assert torch.isnan(buffer[:, -4:]).all()


@pytest.mark.parametrize("kind", ["normal", "outliers", "subnormals", "constant channels", "biases"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_channel_statistics_agree(kind: str, dtype: str) -> None:
    """Sums of 64-bit floats in another order: the last bits may differ, a rounded mean by one step at most."""
    for shape in SHAPES:
        x = tensor(shape, kind, TORCH_DTYPES[dtype])
        want, found = reference.channel_statistics(x), cpu.channel_statistics(x)
        np.testing.assert_allclose(found.mean, want.mean, rtol=2**-7)
        assert (found.mean != want.mean).mean() < 0.02
        np.testing.assert_allclose(found.variance, want.variance, rtol=1e-4, atol=1e-300)
        assert found.peak == pytest.approx(want.peak, rel=2**-7)


@pytest.mark.parametrize("module", [reference, cpu])
def test_a_constant_channel_has_no_variance(module: Backend) -> None:
    """None at all, in however many blocks it is summed: a step is chosen from the layers that have some."""
    x = torch.tensor([0.1, -900.0, 3e38, 1e-40]).to(torch.bfloat16).expand(2, 333, 4)
    found = module.channel_statistics(x)
    assert (found.variance == 0).all()
    assert np.array_equal(found.mean, np.tile(x[0, 0].float().numpy(), 2))
    assert found.peak == 0


def test_a_table_is_the_pages_own() -> None:
    """What an engine does with its block table later is no matter of a destination that was checked before."""
    table = np.array([2, 0], np.int64)
    pages = Paged(pages=torch.zeros(3, 1, 4, 8), table=table, tokens=8)
    table[:] = -1
    pages.span(4, 8).write(torch.ones(1, 4, 8))
    assert pages.pages[0].min() == 1
    with pytest.raises(ValueError, match="read-only"):
        pages.table[0] = 1


def paged(
    shape: tuple[int, int, int], dtype: torch.dtype, *, slots: int, first: int, layout: str, device: str = "cpu"
) -> tuple[Tensor, Paged]:
    """A cache of pages in an engine's layout, filled with NaN, and some tokens of a sequence in it."""
    heads, tokens, dim = shape
    count = -(-(first + tokens) // slots)
    table = np.random.default_rng(slots).permutation(count + 3)[:count].astype(np.int64)
    sizes = {"slots first": (count + 3, slots, heads, dim), "heads first": (count + 3, heads, slots, dim)}
    # Keys and values side by side, as engines keep them: pages are apart from each other.
    whole = torch.full((count + 3, 2, *sizes[layout][1:]), float("nan"), dtype=dtype, device=device)
    pages = whole[:, 1] if layout == "heads first" else whole[:, 1].transpose(1, 2)
    return whole, Paged(pages=pages, table=table, tokens=tokens, first=first)


@pytest.mark.parametrize("codec", SETTINGS, ids=IDS)
@pytest.mark.parametrize("module", [reference, cpu])
def test_pages_get_the_same_bits(module: Backend, codec: Codec) -> None:
    """Through a block table, with pages that segments start and end within; nothing else is written."""
    for shape, dtype, destination, slots, layout in (
        ((2, 300, 64), "bf16", torch.bfloat16, 16, "slots first"),
        ((3, 37, 5), "fp16", torch.float32, 7, "heads first"),
        ((1, 70, 80), "fp32", torch.float32, 32, "heads first"),
        ((2, 1, 12), "bf16", torch.float16, 16, "slots first"),
    ):
        x = tensor(shape, "outliers", TORCH_DTYPES[dtype])
        coding, tables = codec.coding("k", shape[0] * shape[2]), codec.tables(x.float(), "k")
        spec = TensorSpec(heads=shape[0], head_dim=shape[2], coding=0)
        anchor, residual = reference.quantize(x.float(), coding, tables)
        for digits in (None, residual) if residual is not None else (None,):
            whole, out = paged(shape, destination, slots=slots, first=5, layout=layout)
            want = torch.empty(shape, dtype=destination)
            reference.dequantize(anchor, digits, coding, tables, spec, dtype, want)
            module.dequantize(anchor, digits, coding, tables, spec, dtype, out)
            assert torch.equal(_bits(out.read()), _bits(want))
            page, slot = out.places()
            for token in range(shape[1]):
                assert torch.equal(_bits(out.pages[page[token], :, slot[token]]), _bits(want[:, token]))
            assert int((~torch.isnan(whole)).sum()) == want.numel()


def test_block_tables_are_checked() -> None:
    pages = torch.zeros(4, 2, 16, 8)

    def refused(table: list[int], tokens: int = 40, first: int = 0) -> bool:
        with pytest.raises(InputError):
            Paged(pages=pages, table=np.array(table, np.int64), tokens=tokens, first=first)
        return True

    assert refused([0, 1])
    assert refused([0, 1, 4])
    assert refused([0, 1, -1])
    assert refused([0, 1, 1])
    assert refused([0, 1, 2], first=9)
    assert refused([0, 1, 2], first=-1)
    assert refused([0, 1, 2], tokens=0)
    with pytest.raises(InputError):
        Paged(pages=pages, table=np.zeros(1, np.int32), tokens=1)
    with pytest.raises(InputError):
        Paged(pages=pages[0], table=np.zeros(1, np.int64), tokens=1)


def test_some_of_the_tokens_are_in_pages_that_have_been_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A segment at a time of a long table: only where its pages are is looked up."""
    pages = torch.zeros(9, 2, 16, 8)
    whole = Paged(pages=pages, table=np.array([7, 0, 3, 8, 1], np.int64), tokens=60, first=20)
    monkeypatch.setattr(Paged, "__post_init__", lambda self: pytest.fail("the table is checked again"))
    values = torch.arange(2 * 60 * 8, dtype=torch.float32).view(2, 60, 8)
    for start, stop in ((0, 12), (12, 40), (40, 60)):
        part = span(whole, start, stop)
        assert isinstance(part, Paged)
        assert part.shape == (2, stop - start, 8)
        part.write(values[:, start:stop])
    assert torch.equal(whole.read(), values)
    part = span(span(whole, 10, 50), 5, 30)
    assert isinstance(part, Paged)
    assert (part.first, part.tokens) == (35, 25)
    assert torch.equal(part.read(), values[:, 15:40])
    for start, stop in ((-1, 5), (5, 5), (50, 61)):
        with pytest.raises(InputError, match="has 60 tokens"):
            span(whole, start, stop)


def test_of_a_table_the_pages_in_use_are_told() -> None:
    pages = torch.zeros(9, 2, 16, 8)
    whole = Paged(pages=pages, table=np.array([7, 0, 3, 8, 1, 5], np.int64), tokens=60, first=20)
    assert whole.used.tolist() == [0, 3, 8, 1]
    for start, stop, used in ((0, 12, [0]), (12, 13, [3]), (11, 29, [0, 3, 8]), (59, 60, [1])):
        part = span(whole, start, stop)
        assert isinstance(part, Paged)
        assert part.used.tolist() == used
        page, slot = part.places()
        assert page.tolist() == [part.used[(part.first % 16 + token) // 16] for token in range(stop - start)]
        assert slot.tolist() == [(part.first + token) % 16 for token in range(stop - start)]


@pytest.mark.parametrize("name", ["default", "alg1", "int8"])
def test_tokens_first_layout(name: str) -> None:
    """A model may keep [T, H, D] in memory: strides are respected on both sides."""
    codec = get_codec(name)
    x = tensor((2, 70, 16), "normal", torch.bfloat16)
    turned = x.transpose(0, 1).contiguous().transpose(0, 1)
    coding, tables = codec.coding("k", 32), codec.tables(x.float(), "k")
    anchor, residual = cpu.quantize(turned, coding, tables)
    assert np.array_equal(anchor, cpu.quantize(x, coding, tables)[0])
    out = torch.empty(70, 2, 16, dtype=torch.bfloat16).transpose(0, 1)
    want = torch.empty(2, 70, 16, dtype=torch.bfloat16)
    spec = TensorSpec(heads=2, head_dim=16, coding=0)
    cpu.dequantize(anchor, residual, coding, tables, spec, "bf16", out)
    reference.dequantize(anchor, residual, coding, tables, spec, "bf16", want)
    assert torch.equal(out, want)


def test_concurrent_calls_are_safe() -> None:
    codec = get_codec("default")
    x = tensor((3, 500, 64), "normal", torch.float32)
    made = quantize_tensor(x, codec)
    spec = TensorSpec(heads=3, head_dim=64, coding=0)

    def decode(_: int) -> Tensor:
        out = torch.empty(3, 500, 64, dtype=torch.bfloat16)
        dequantize(made.anchor, made.residual, made.coding, made.tables, spec, "bf16", out)
        return out

    with ThreadPoolExecutor(8) as pool:
        first, *rest = pool.map(decode, range(40))
    assert all(torch.equal(first, other) for other in rest)


@pytest.mark.parametrize("module", [reference, cpu])
@pytest.mark.parametrize("spoil", ["escape position", "escape value", "escape missing", "digit", "page", "padding"])
def test_forbidden_content_is_refused(module: object, spoil: str) -> None:
    name = {"page": "alg1", "padding": "int4"}.get(spoil, "default")
    codec = get_codec(name, radix=5, key_step=0.001) if name == "default" else get_codec(name)
    x = tensor((1, 40, 5), "normal", torch.float32)
    x[0, 7, 2] = 1e5
    coding, tables = codec.coding("k", 5), codec.tables(x, "k")
    anchor, residual = (None if part is None else part.copy() for part in reference.quantize(x, coding, tables))
    assert anchor is not None
    count = 5 * 40
    if spoil == "escape position":
        anchor[count] ^= 1
    elif spoil == "escape value":
        anchor[count + 4 : count + 8] = np.frombuffer(np.int32(1 << 18).tobytes(), np.uint8)
    elif spoil == "escape missing":
        anchor = np.where(np.arange(anchor.size) < count, np.minimum(anchor, 254), anchor).astype(np.uint8)
    elif spoil == "digit":
        assert residual is not None
        residual[:] = 0xFF
    elif spoil == "page":
        anchor[:4] = np.frombuffer(np.float32(np.inf).tobytes(), np.uint8)
    else:
        anchor[-1] |= 0xF0
    out = torch.empty(1, 40, 5)
    with pytest.raises(ContentError):
        module.dequantize(  # type: ignore[attr-defined]
            anchor, residual, coding, tables, TensorSpec(heads=1, head_dim=5, coding=0), "fp32", out
        )


def test_the_backend_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert backend("cpu") is cpu
    monkeypatch.setenv("LYNXKV_BACKEND", "reference")
    assert backend("cpu") is reference
    monkeypatch.setenv("LYNXKV_BACKEND", "abacus")
    with pytest.raises(InputError, match="abacus"):
        backend("cpu")


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int32 if x.dtype == torch.float32 else torch.int16)
