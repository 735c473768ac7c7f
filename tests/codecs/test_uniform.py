"""What the entropy-coded profiles choose from the data: one step a tensor, the grid's place, more for louder layers."""

from __future__ import annotations

import fsspec
import numpy as np
import pytest
import torch
from torch import Tensor

from lynxkv.codecs import get_codec
from lynxkv.codecs.uniform import grid_through_short_vectors
from lynxkv.decoder import load
from lynxkv.encoder import encode, encode_shards
from lynxkv.errors import NonFiniteError
from lynxkv.fidelity import attention, nmse
from lynxkv.format.compression import compress, decompress
from lynxkv.kernels import EntropyTables
from lynxkv.kv import KV, KVLayer, kv_from_tensors
from lynxkv.layout import Precision
from lynxkv.quantization import dequantize, quantize

SINKS = slice(100, 112)


def values_with_sinks(heads: int = 2, dim: int = 16) -> Tensor:
    """Normal values [heads, 600, dim]; twelve of them are short and all but the same."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(heads, 600, dim, generator=generator)
    x[:, SINKS] = 0.1 * torch.randn(heads, 1, dim, generator=generator)
    x[:, SINKS] += 0.005 * torch.randn(heads, 12, dim, generator=generator)
    return x


@pytest.mark.parametrize("radix", [5, 8])
def test_attention_sinks_are_all_but_exact_and_the_rest_as_it_was(radix: int) -> None:
    x, codec = values_with_sinks(), get_codec("default", value_step=0.4, radix=radix)
    tables = codec.tables(x, "v")
    assert isinstance(tables, EntropyTables)
    step = float(tables.step)
    for precision, unit in (("anchor", step), ("full", step / radix)):
        error = dequantize(quantize(x, codec, tensor="v"), precision) - x  # type: ignore[arg-type]
        usual = unit / 12**0.5
        assert float(error[:, SINKS].square().mean().sqrt()) < 0.5 * unit
        assert float(error.square().mean().sqrt()) == pytest.approx(usual, rel=0.05)
    anchor_error = dequantize(quantize(x, codec, tensor="v"), "anchor") - x
    assert float(anchor_error[:, SINKS].square().mean().sqrt()) < 0.25 * step / 12**0.5


def test_the_grid_moves_by_half_a_step_at_most() -> None:
    x, step = values_with_sinks(), 0.37
    mean = np.zeros(32, np.float32)
    moved = grid_through_short_vectors(x, mean, step)
    assert np.abs(moved).max() <= step / 2 * (1 + 2**-8)
    sink = x[:, SINKS].mean(1).reshape(-1).numpy()
    off = (sink - moved) / step
    assert np.abs(off - np.rint(off)).max() < 0.02
    beside = grid_through_short_vectors(x, mean, step, step / 4)
    off = (sink - step / 4 - beside) / step
    assert np.abs(off - np.rint(off)).max() < 0.02


def test_keys_keep_their_means() -> None:
    x, codec = values_with_sinks(), get_codec("default")
    tables = codec.tables(x, "k")
    assert isinstance(tables, EntropyTables)
    assert tables.mean == pytest.approx(x.mean(1).reshape(-1).numpy(), abs=1e-3)


def layers_of(*scales: float) -> KV:
    generator = torch.Generator().manual_seed(4)
    pair = torch.randn(2, 2, 300, 8, generator=generator)
    return kv_from_tensors([(pair[0], pair[1] * scale) for scale in scales])


def test_layers_of_larger_values_get_smaller_relative_steps() -> None:
    codec = get_codec("default", key_step=0.2, value_step=0.3)
    kv = layers_of(1.0, 16.0, 4.0)
    assert codec.step_factors(kv) == pytest.approx([2.0, 0.5, 1.0], rel=1e-3)
    shards = encode_shards(kv, codec=codec)
    steps = np.frombuffer(bytes(shards.anchor.buffers[3]), "<f4").reshape(6, 2)[:, 0]
    assert steps[0::2] == pytest.approx([0.4, 0.1, 0.2], rel=0.05)  # keys, of one spread
    assert steps[1::2] == pytest.approx([0.6, 2.4, 1.2], rel=0.05)  # values
    assert get_codec("int8").step_factors(kv) == [1.0, 1.0, 1.0]


def test_one_layer_far_from_the_others_is_bounded() -> None:
    assert get_codec("default").step_factors(layers_of(1e-9, 1.0, 1.0, 1e9)) == pytest.approx([4, 1, 1, 0.25], rel=0.01)


def test_layers_whose_values_say_nothing_are_as_usual() -> None:
    codec = get_codec("default")
    assert codec.step_factors(layers_of(0.0, 0.0)) == [1.0, 1.0]
    assert codec.step_factors(layers_of(0.0, 3.0)) == pytest.approx([1.0, 1.0])
    latent = KV(layers=[KVLayer(tensors={"latent": torch.ones(1, 9, 4)}, start=0, stop=9)], stop=9)
    assert codec.step_factors(latent) == [1.0]
    few = kv_from_tensors([(torch.ones(1, 3, 4), torch.ones(1, 3, 4))])  # sinks only
    assert codec.step_factors(few) == [1.0]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_layer_that_is_not_finite_is_refused_by_name(value: float) -> None:
    kv = layers_of(1.0, 1.0)
    kv.layers[1].tensors["v"][0, 20, 0] = value
    with pytest.raises(NonFiniteError, match="layer 1 v"):
        encode_shards(kv)


def biased(x: Tensor, generator: torch.Generator) -> Tensor:
    """Biases of 100 to 900 on a tenth of the channels, as the keys of Qwen2.5 have."""
    bias = torch.where(torch.rand(x.shape[0], 1, x.shape[2], generator=generator) < 0.1, 1.0, 0.0)
    return x + bias * (100 + 800 * torch.rand(bias.shape, generator=generator))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "biased keys"])
def test_other_families_keep_their_attention(head_dim: int, bias: bool) -> None:
    generator = torch.Generator().manual_seed(head_dim)
    k, v = torch.randn(2, 2, 400, head_dim, generator=generator)
    k = (biased(k, generator) if bias else k).to(torch.bfloat16)
    v = v.to(torch.bfloat16)
    window = KVLayer(tensors={"k": k[:, 100:], "v": v[:, 100:]}, start=100, stop=400, kind="sliding", window=301)
    kv = KV(layers=[KVLayer(tensors={"k": k, "v": v}, start=0, stop=400), window], stop=400)
    query = 2 * torch.randn(4, 16, head_dim, generator=generator)
    limits: dict[Precision, float] = {"anchor": 2.5e-2, "full": 5e-4}
    try:
        encode(kv, "memory://family/cache.lynx")
        for precision, limit in limits.items():
            for layer, original in zip(
                load("memory://family/cache.lynx", precision=precision).layers, kv.layers, strict=True
            ):
                exact = attention(query, original.tensors["k"], original.tensors["v"])
                assert nmse(attention(query, layer.tensors["k"], layer.tensors["v"]), exact) < limit
    finally:
        fsspec.filesystem("memory").rm("/family", recursive=True)


def test_blocks_that_end_with_rows_are_smaller_and_read_the_same() -> None:
    generator = np.random.default_rng(5)
    spread = np.repeat(2.0 ** np.arange(6), 4)
    rows = np.rint(generator.normal(0, spread[:, None], (24, 8192)) + 127).clip(0, 254).astype(np.uint8)
    raw = rows.reshape(-1)
    plain, cut = compress(raw), compress(raw, 8192)
    assert len(cut) < len(plain)
    assert np.array_equal(decompress(cut, raw.size, where="here"), raw)
    assert compress(raw[:8192], 8192) == compress(raw[:8192])
