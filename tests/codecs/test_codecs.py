"""Every codec holds its stated error bound; Algorithm 1's arithmetic is the published one."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lynxkv import InputError, NonFiniteError
from lynxkv.codecs import CODECS, Codec, get_codec
from lynxkv.codecs.alg1 import Alg1, split_level, top_level
from lynxkv.codecs.alg1_shift import Alg1Shift
from lynxkv.codecs.fixed import FixedCodec
from lynxkv.kernels import EntropyTables
from lynxkv.layout import FixedCoding, Precision, TensorName
from lynxkv.packing import unpack_rows
from lynxkv.quantization import dequantize, quantize

SETTINGS = [
    get_codec("default"),
    get_codec("default", radix=1),
    get_codec("default", radix=3),
    get_codec("default", radix=5),
    get_codec("default", key_step=0.05, radix=32),
    *(get_codec("alg1", anchor_bits=a, residual_bits=8 - a) for a in (3, 4, 5, 6)),
    get_codec("alg1", alpha=100.0, chunk_dtype="f32"),
    get_codec("alg1", alpha=2000.0, chunk_tokens=16, page_tokens=128),
    get_codec("alg1-shift"),
    get_codec("quality"),
    get_codec("fast"),
    get_codec("fixed"),
    get_codec("fixed", anchor_bits=1, residual_bits=0),
    get_codec("fixed", anchor_bits=3, residual_bits=2, chunk_tokens=8, page_tokens=8),
    get_codec("raw"),
    get_codec("int8"),
    get_codec("int4"),
]


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    normal = torch.randn(2, 300, 24, generator=generator)
    outliers = normal.clone()
    outliers[:, :, 3] *= 1000
    biased = normal + 500 * torch.rand(2, 1, 24, generator=generator)
    return {
        "normal": normal,
        "a channel 1,000 times the others": outliers,
        "channel biases of up to 500": biased,
        "one token": normal[:, :1],
        "head dim 5": normal[:, :37, :5].contiguous(),
        "constant channels": torch.full((2, 40, 8), 3.25),
        "zeros": torch.zeros(1, 40, 8),
        "subnormals": normal[:, :40] * 1e-40,
        "huge": normal[:, :40] * 1e36,
        "one outlier": torch.cat([normal, torch.full((2, 1, 24), 1e6)], 1),
    }


@pytest.mark.parametrize("codec", SETTINGS, ids=[f"{codec.name}-{i}" for i, codec in enumerate(SETTINGS)])
@pytest.mark.parametrize("kind", list(tensors()))
@pytest.mark.parametrize("precision", ["anchor", "full"])
def test_error_stays_within_the_stated_bound(codec: Codec, kind: str, precision: Precision) -> None:
    x = tensors()[kind]
    decoded = dequantize(quantize(x, codec), precision)
    assert torch.isfinite(decoded).all()
    excess = (decoded - x).abs() - codec.error_bound(x, "k", precision)
    assert float(excess.max()) <= 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_tensors_come_back_in_their_dtype(dtype: torch.dtype) -> None:
    x = tensors()["normal"].to(dtype)
    decoded = dequantize(quantize(x, "default"))
    assert decoded.dtype == dtype
    assert decoded.shape == x.shape
    ulp = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-11
    bound = get_codec("default").error_bound(x.float(), "k", "full") + ulp * decoded.float().abs()
    assert bool(((decoded.float() - x.float()).abs() <= bound).all())


def test_non_contiguous_input_is_taken_as_it_is() -> None:
    x = tensors()["normal"].transpose(0, 1)
    for name in CODECS:
        assert torch.equal(dequantize(quantize(x, name)), dequantize(quantize(x.contiguous(), name)))


def test_raw_returns_the_same_bits() -> None:
    x = tensors()["subnormals"].to(torch.bfloat16)
    assert torch.equal(dequantize(quantize(x, "raw")).view(torch.int16), x.view(torch.int16))


def test_published_worked_example() -> None:
    """x_final 0.673, alpha 255, 127 levels: I 118, V_mag 7, V_res -6. The formula decodes that to 0.674."""
    y = math.log1p(255 * 0.673) / math.log1p(255)
    level = round(y * 127)
    v_mag, v_res = split_level(np.array([level]), 4)
    assert (level, v_mag[0], v_res[0]) == (118, 7, -6)
    assert (v_mag[0] << 4) - v_res[0] == 118
    decoded = (256 ** (118 / 127) - 1) / 255
    assert decoded == pytest.approx(0.674, abs=5e-4)
    assert abs(decoded - 0.673) <= (256 ** (118.5 / 127) - 256 ** (117.5 / 127)) / 255 / 2 * 1.05


@pytest.mark.parametrize(("a", "top"), [(3, 112), (4, 120), (5, 124), (6, 126)])
def test_repaired_top_level_fits_both_streams(a: int, top: int) -> None:
    r = 8 - a
    assert top_level(a, r) == top
    v_mag, v_res = split_level(np.arange(top + 1), r)
    assert v_mag.max() == 2 ** (a - 1) - 1
    assert v_res.min() >= -(2 ** (r - 1))
    assert v_res.max() <= 2 ** (r - 1) - 1
    assert split_level(np.array([127]), r)[0][0] == 2 ** (a - 1)  # what the printed algorithm runs into


def test_alg1_rounds_in_the_companded_domain() -> None:
    codec = Alg1(alpha=255.0, chunk_dtype="f32")
    x = torch.linspace(-1, 1, 4001, dtype=torch.float64)
    level = torch.round(torch.log1p(255 * x.abs()) / math.log1p(255) * 120)
    edges, buckets = codec.fixed_tables.quantiser()
    code = buckets[np.searchsorted(edges, x.float().numpy(), side="right")].astype(int)
    v_mag, v_res = (code >> 4) & 7, (code & 15) - 8
    off = np.abs((v_mag << 4) - v_res - level.numpy())
    assert off.max() <= 1
    assert (off > 0).mean() < 0.002  # only where f32 falls on the other side of an edge
    negative = code >> 7 == 1
    assert not (negative & (x.numpy() > 0)).any()


def test_alg1_shift_splits_a_signed_level() -> None:
    tables = Alg1Shift().fixed_tables
    _, buckets = tables.quantiser()
    for code, level in zip(buckets.astype(int), range(-127, 128), strict=True):
        assert (code >> 4) - 8 == level >> 4
        assert code & 15 == level & 15


def test_int8_codes_run_from_the_smallest_value_to_the_largest() -> None:
    x = torch.tensor([[[3.0, -1.0, 1.0, 2.0]]])
    quantized = quantize(x, "int8")
    codes = unpack_rows(quantized.anchor[8:], 1, 4, 8)[0]
    assert codes.tolist() == [255, 0, 128, 191]


def test_one_step_a_tensor_follows_its_spread() -> None:
    x = tensors()["normal"]
    codec = get_codec("default", key_step=0.4)
    steps = [
        tables.step for tables in (codec.tables(x, "k"), codec.tables(10 * x, "k")) if isinstance(tables, EntropyTables)
    ]
    assert steps[1] == pytest.approx(10 * steps[0], rel=1e-4)


@pytest.mark.parametrize("codec", ["default", "int8", "raw"])
def test_channels_are_counted_up_to_the_limit_of_the_format(codec: str) -> None:
    x = torch.randn(65536 // 16, 3, 16, generator=torch.Generator().manual_seed(0))
    assert (dequantize(quantize(x, codec)) - x).abs().max() < 0.1
    with pytest.raises(InputError, match="over 65536 channels"):
        quantize(torch.cat([x, x[:1]]), codec)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_input_is_refused(value: float) -> None:
    x = tensors()["normal"]
    x[1, 2, 3] = value
    with pytest.raises(NonFiniteError):
        quantize(x)


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("zip", {}),
        ("default", {"radix": 33}),
        ("default", {"radix": 0}),
        ("default", {"radix": 10**12}),
        ("default", {"radix": 5.0}),
        ("default", {"radix": True}),
        ("default", {"radix": "many"}),
        ("default", {"key_step": 0}),
        ("default", {"key_step": 1e-9}),
        ("default", {"key_step": float("nan")}),
        ("default", {"value_step": 1e9}),
        ("default", {"value_step": "fine"}),
        ("default", {"compress": 1}),
        ("default", {"colour": 1}),
        ("alg1", {"anchor_bits": 5, "residual_bits": 4}),
        ("alg1", {"alpha": 0}),
        ("alg1", {"alpha": float("inf")}),
        ("alg1", {"chunk_dtype": "u9"}),
        ("alg1", {"chunk_tokens": 48}),
        ("alg1", {"page_tokens": 2**40, "chunk_tokens": 2**40}),
        ("alg1-shift", {"page_tokens": 40}),
        ("fixed", {"anchor_bits": 0}),
        ("fixed", {"chunk_tokens": 0}),
        ("fixed", {"anchor_bits": 4.0}),
        ("raw", {"compress": "no"}),
        *(
            (name, {"sink_tokens": count})
            for name in ("default", "alg1", "alg1-shift", "fixed")
            for count in (-1, 1025)
        ),
    ],
)
def test_impossible_settings_are_refused(name: str, params: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        get_codec(name, **params)


def test_a_fixed_codec_without_tables_is_none() -> None:
    class Half(FixedCodec):
        def coding(self, tensor: TensorName, channels: int) -> FixedCoding:
            raise NotImplementedError

    with pytest.raises(TypeError, match="fixed_tables"):
        Half()  # type: ignore[abstract]


@pytest.mark.parametrize("x", [torch.zeros(3), torch.zeros(2, 0, 4), torch.zeros(2, 3, 4, dtype=torch.int32)])
def test_what_is_not_a_kv_tensor_is_refused(x: Tensor) -> None:
    with pytest.raises(InputError):
        quantize(x)
