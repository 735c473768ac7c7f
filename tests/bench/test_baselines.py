"""Baselines against their formulas: what comes back, and what it is said to take."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lynxkv.bench.baselines import BASELINES
from lynxkv.bench.baselines.base import BaselineMethod, affine
from lynxkv.bench.baselines.cachegen import CacheGen, entropy_bits
from lynxkv.bench.baselines.kivi import Kivi
from lynxkv.bench.baselines.kvquant import KVQuant, codebook
from lynxkv.bench.baselines.plain import BytePlanes, LinearSplit
from lynxkv.bench.baselines.turboquant import TurboQuant, random_rotation, sphere_codebook
from lynxkv.bench.methods import BASELINE_METHODS, parse_methods
from lynxkv.codecs import get_codec
from lynxkv.codecs.alg1 import Alg1, split_level, top_level
from lynxkv.decoder import KVDestination
from lynxkv.encoder import encode_shards
from lynxkv.errors import InputError
from lynxkv.layout import Extent
from lynxkv.quantization import dequantize, quantize
from lynxkv.testing.kv import random_kv


def normal(heads: int = 2, tokens: int = 200, dim: int = 64) -> Tensor:
    x = torch.randn(heads, tokens, dim, generator=torch.Generator().manual_seed(1))
    return x.to(torch.bfloat16).float()


def mse(coded: Tensor, x: Tensor) -> float:
    return float((coded - x).square().mean())


@pytest.mark.parametrize("label", [label for label in BASELINE_METHODS if not label.startswith("sparq")])
def test_every_baseline_stores_a_cache_and_gives_it_back(label: str) -> None:
    kv = random_kv(tokens=200)
    (method,) = parse_methods([label])
    assert method.label == label
    header = encode_shards(kv).header
    elements = sum(x.numel() for layer in kv.layers for x in layer.tensors.values())
    with method.store(kv) as stored:
        found = []
        for precision in stored.decode(destination := KVDestination(Extent.of(header))):
            errors = [
                mse(destination.target(number, name).float(), x) / float(x.square().mean())
                for number, layer in enumerate(kv.layers)
                for name, x in layer.tensors.items()
            ]
            found.append((precision, max(errors)))
        sizes = stored.sizes
    assert found[-1][0] == "full"
    assert found[-1][1] < 0.2
    assert found == sorted(found, key=lambda item: -item[1])
    assert 1.5 * elements < 8 * sizes.anchor_bytes <= 8 * sizes.full_bytes <= 8 * sizes.total_bytes < 16 * elements


def test_affine_levels_run_between_the_extremes() -> None:
    x = torch.tensor([[[0.0, 1.0, 2.0, 3.25], [5.0, 5.0, 5.0, 5.0]]])
    decoded, pairs = affine(x, 2, (2,))
    assert pairs == 2
    assert torch.equal(decoded[0, 1], x[0, 1])
    step = 1.0859375  # 3.25 / 3 in bf16
    assert decoded[0, 0].tolist() == [0.0, step, 2 * step, 3 * step]


def test_kivi_groups_keys_by_channel_and_values_by_token() -> None:
    x = normal(1, 192, 64)
    x[0, 5, 7] = 100.0  # spoils its group and no other
    for tensor, spoilt in (("k", (slice(0, 32), 7)), ("v", (5, slice(0, 32)))):
        coded = Kivi(bits=4, group=32, window=128).code(x, tensor, 0.0)  # type: ignore[arg-type]
        error = (coded.full - x).abs()[0]
        far = torch.zeros_like(error, dtype=torch.bool)
        far[spoilt] = True
        assert error[far].max() > 0.5
        assert error[~far].max() < 0.5
        assert torch.equal(coded.full[:, 64:], x[:, 64:])
        assert coded.bits == 64 * 64 * 4 + 128 * 32 + 128 * 64 * 16


def test_kivi_keeps_what_lies_in_its_window() -> None:
    x = normal(2, 100, 8)
    coded = Kivi().code(x, "k", 0.0)
    assert torch.equal(coded.full, x)
    assert coded.bits == x.numel() * 16


def test_a_codebook_is_where_the_values_are() -> None:
    values = torch.tensor([-1.0, 0.0, 0.5, 3.0]).repeat_interleave(250)
    assert codebook(values, 2).tolist() == [-1.0, 0.0, 0.5, 3.0]
    gaussian = torch.randn(60_000, generator=torch.Generator().manual_seed(2))
    table = codebook(gaussian, 2)
    assert table.tolist() == pytest.approx([-1.510, -0.4528, 0.4528, 1.510], abs=0.03)  # Lloyd-Max of a Gaussian


def test_kvquant_keeps_outliers_and_the_first_token() -> None:
    x = normal(1, 201, 8)
    x[0, 50, 3] = 500.0
    coded = KVQuant(bits=4, outliers=0.01).code(x, "k", 0.0)
    assert float(coded.full[0, 50, 3]) == 500.0
    assert torch.equal(coded.full[:, :1], x[:, :1])
    assert mse(coded.full, x) < 0.02
    assert coded.bits == 1600 * 4 + 8 * 2 * 32 + 8 * 32 + 8 * 16 + 16 * 32


def test_turboquant_reaches_the_distortion_of_its_theorem() -> None:
    rotation = random_rotation(64, 0)
    assert torch.allclose(rotation @ rotation.T, torch.eye(64), atol=1e-5)
    x = normal(2, 400, 64)
    x[:, :, 0] *= 30  # a channel that rotation spreads
    power = float(x.square().mean())
    for bits, distortion in ((1, 0.36), (2, 0.117), (3, 0.03), (4, 0.009)):  # the paper's, for unit vectors
        coded = TurboQuant(bits=bits).code(x, "k", 0.0)
        assert mse(coded.full, x) / power == pytest.approx(distortion, rel=0.25)
        assert coded.bits == x.numel() * bits + 800 * 16
    assert sphere_codebook(64, 1).tolist() == pytest.approx([-0.0997, 0.0997], rel=0.01)  # sqrt(2 / (pi 64))


def test_entropy_of_rows() -> None:
    rows = torch.tensor([[0, 0, 1, 1], [5, 5, 5, 5], [1, 2, 3, 4]])
    assert entropy_bits(rows) == pytest.approx(4 * 1 + 0 + 4 * 2)


def test_cachegen_is_coarser_in_later_layers() -> None:
    x = normal(1, 200, 16)
    errors, bits = [], []
    for depth in (0.0, 0.4, 0.9):
        coded = CacheGen(group=10, bin=0.5).code(x, "v", depth)
        errors.append(mse(coded.full, x))
        bits.append(coded.bits / x.numel())
    spread = math.sqrt(2)  # of differences of two normal values
    assert errors == pytest.approx([(factor * 0.5 * spread) ** 2 / 12 * 0.9 for factor in (1, 2, 3)], rel=0.15)
    assert bits == sorted(bits, reverse=True)


def test_the_linear_split_is_int8_at_full_and_its_upper_half_before() -> None:
    x = normal(2, 30, 16)
    coded = LinearSplit().code(x, "k", 0.0)
    assert torch.allclose(coded.full, dequantize(quantize(x, "int8")), atol=1e-5)
    assert coded.anchor is not None
    unit = (x.amax((0, 2)) - x.amin((0, 2)))[:, None] / 255
    assert float(((coded.anchor - coded.full).abs() / unit).max()) == pytest.approx(7.5, abs=1e-3)
    assert (coded.anchor_bits, coded.bits) == (960 * 4 + 30 * 64, 960 * 8 + 30 * 64)


def test_byte_planes_lose_nothing() -> None:
    x = normal()
    coded = BytePlanes().code(x, "k", 0.0)
    assert torch.equal(coded.full, x)
    assert 8 * x.numel() < coded.bits < 13 * x.numel()


@pytest.mark.parametrize("bits", [3, 4])
def test_algorithm_1_whole_has_all_its_levels_in_one_code(bits: int) -> None:
    codec = Alg1(anchor_bits=bits, residual_bits=0, alpha=100.0, chunk_dtype="f32", chunk_tokens=32, page_tokens=32)
    top = 2 ** (bits - 1) - 1
    assert top_level(bits, 0) == top
    assert split_level(torch.arange(top + 1).numpy(), 0)[0].max() == top
    x = torch.linspace(-1, 1, 32)[None, :, None].repeat(1, 1, 2)
    decoded = dequantize(quantize(x, codec))
    y = torch.log1p(100 * x.abs()) / math.log1p(100)
    expected = torch.expm1((y * top).round() / top * math.log1p(100)) / 100 * x.sign()
    assert torch.allclose(decoded, expected, atol=1e-4)
    assert not get_codec("alg1", residual_bits=0).coding("k", 64).exact
    assert codec.fixed_tables.full is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kivi:bits=9", "bits"),
        ("kivi:bits=2.5", "bits"),
        ("kivi:colour=1", "colour"),
        ("kivi:exact=true", "exact"),
        ("kvquant:outliers=2", "outliers"),
        ("turboquant:bits=0", "bits"),
        ("cachegen:bin=0", "bin"),
        ("byte-planes:level=90", "level"),
        ("sparq:components=0", "components"),
        ("sparq:top_tokens=0", "top_tokens"),
    ],
)
def test_settings_that_are_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_methods([text])


@pytest.mark.parametrize("name", ["quanto", "hqq"])
def test_packages_that_are_missing_are_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lynxkv.bench.baselines.packages.is_installed", lambda package: False)
    with pytest.raises(InputError, match=name) as caught:
        BASELINES[name]()
    assert "lynxkv[baselines]" in (caught.value.hint or "")


@pytest.mark.parametrize(("name", "package"), [("quanto", "optimum.quanto"), ("hqq", "hqq.core.quantize")])
@pytest.mark.parametrize("bits", [2, 4])
def test_packages_as_transformers_uses_them(name: str, package: str, bits: int) -> None:
    pytest.importorskip(package.split(".")[0])
    pytest.importorskip(package)
    x = normal(2, 128, 64)
    coded = BASELINES[name](bits=bits).code(x, "k", 0.0)  # type: ignore[call-arg, attr-defined]
    assert coded.full.shape == x.shape
    assert mse(coded.full, x) < {2: 0.3, 4: 0.02}[bits]
    assert coded.bits == x.numel() * bits + x.numel() / 64 * 32


def test_a_baseline_is_known_by_all_its_parameters() -> None:
    method = BaselineMethod(label="kivi", baseline=Kivi())
    assert method.settings == {"baseline": "kivi", "bits": 2, "group": 32, "window": 128}
    with pytest.raises(InputError, match="twice"):
        parse_methods(["kivi", "kivi:bits=2"])
