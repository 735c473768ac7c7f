"""Encode, publish, fetch, decode: what goes in comes out, at both precisions, for every codec and shape."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
from torch import Tensor

import lynxkv
from lynxkv.codecs import CODECS, get_codec
from lynxkv.decoder import CacheDecoder, KVDestination, decode_into, decode_stages
from lynxkv.encoder import encode_shards
from lynxkv.kernels import Backend, Paged, cpu, reference
from lynxkv.kernels.rounding import TORCH_DTYPES, round_to
from lynxkv.kv import KV, KVLayer, kv_from_safetensors, kv_to_safetensors
from lynxkv.layout import Dtype, Identity, Precision, TensorName
from lynxkv.testing.kv import random_kv


def check_against(decoded: KV, original: KV, codec: str, dtype: Dtype, precision: Precision) -> None:
    """Sinks are exact; coded tokens lie within the codec's bound of the original."""
    method = get_codec(codec)
    ulp = 2.0**-8 if dtype == "bf16" else 2.0**-11
    factors = method.step_factors(original)
    for layer, source, factor in zip(decoded.layers, original.layers, factors, strict=True):
        assert (layer.kind, layer.window, layer.start, layer.stop) == (
            source.kind,
            source.window,
            source.start,
            source.stop,
        )
        for name, tensor in layer.tensors.items():
            assert tensor.dtype == TORCH_DTYPES[dtype]
            exact = round_to(source.tensors[name].float(), dtype)
            sinks = 0 if codec in ("raw", "int8", "int4") else min(max(4 - layer.start, 0), tensor.shape[1])
            assert torch.equal(tensor[:, :sinks], exact[:, :sinks])
            x = exact[:, sinks:].float()
            if x.shape[1]:
                bound = method.error_bound(x, name, precision) * max(1, factor)
                bound += (codec != "raw") * ulp * tensor[:, sinks:].float().abs()
                assert bool(((tensor[:, sinks:].float() - x).abs() <= bound).all())


@pytest.mark.parametrize("codec", [name for name, codec in CODECS.items() if not codec.needs_basis])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_every_codec_in_every_dtype(codec: str, dtype: Dtype, tmp_path: Path) -> None:
    kv = random_kv(tokens=600, outlier=100.0)
    url = str(tmp_path / "a.lynx")
    report = lynxkv.encode(kv, url, codec=codec, dtype=dtype)
    for precision in ("anchor", "full"):
        decoded = lynxkv.load(url, precision=precision)
        check_against(decoded, kv, codec, dtype, precision)
        assert decoded.token_ids == kv.token_ids
    assert lynxkv.check(url).bytes == report.bytes_anchor + report.bytes_residual
    assert sum(path.stat().st_size for path in (tmp_path / "a.lynx").iterdir()) == lynxkv.check(url).bytes


def test_raw_keeps_float32_bits(tmp_path: Path) -> None:
    kv = random_kv(tokens=33)
    lynxkv.encode(kv, str(tmp_path / "a.lynx"), codec="raw", dtype="fp32")
    decoded = lynxkv.load(str(tmp_path / "a.lynx"))
    for layer, source in zip(decoded.layers, kv.layers, strict=True):
        for name in layer.tensors:
            assert torch.equal(layer.tensors[name], source.tensors[name])


@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 64, 257])
@pytest.mark.parametrize("head_dim", [1, 5, 80, 96])
@pytest.mark.parametrize("codec", ["default", "alg1", "raw", "int4"])
def test_odd_shapes(tokens: int, head_dim: int, codec: str, tmp_path: Path) -> None:
    kv = random_kv(layers=1, heads=3, tokens=tokens, head_dim=head_dim)
    url = str(tmp_path / "a.lynx")
    lynxkv.encode(kv, url, codec=codec)
    lynxkv.check(url)
    check_against(lynxkv.load(url), kv, codec, "bf16", "full")


def test_layers_of_differing_shape(tmp_path: Path) -> None:
    kv = random_kv(layers=4, tokens=100, windows=(None, 32))
    wide = random_kv(layers=1, heads=1, tokens=100, head_dim=40).layers[0]
    latent = KVLayer(tensors={"latent": torch.randn(1, 100, 72)}, start=0, stop=100)
    kv = replace(kv, layers=[*kv.layers, wide, latent])
    url = str(tmp_path / "a.lynx")
    for codec in ("default", "alg1"):
        lynxkv.encode(kv, url, codec=codec, overwrite=True)
        lynxkv.check(url)
        check_against(lynxkv.load(url, precision="anchor"), kv, codec, "bf16", "anchor")
        check_against(lynxkv.load(url), kv, codec, "bf16", "full")


def test_several_segments_a_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lynxkv.codecs.base.SEGMENT_ELEMENTS", 32 * 256)
    kv = random_kv(layers=2, tokens=1000)
    for codec in ("default", "alg1", "raw", "int8"):
        url = str(tmp_path / f"{codec}.lynx")
        cache = encode_shards(kv, codec=codec)
        assert max(sum(1 for _ in ref.segments()) for ref in cache.header.tensors) == 4
        lynxkv.encode(kv, url, codec=codec)
        lynxkv.check(url)
        check_against(lynxkv.load(url), kv, codec, "bf16", "full")


def test_refining_in_place_equals_loading_full(tmp_path: Path) -> None:
    kv = random_kv(tokens=300)
    for codec in ("default", "alg1", "alg1-shift"):
        url = str(tmp_path / f"{codec}.lynx")
        lynxkv.encode(kv, url, codec=codec)
        anchor, full = lynxkv.load(url, precision="anchor"), lynxkv.load(url)
        with lynxkv.open(url) as reader:
            destination = KVDestination(reader.extent)
            decoder = CacheDecoder(reader.extent, destination)
            for payload in reader.stream_anchor():
                decoder.anchor(payload)
            assert decoder.complete_anchor
            assert not decoder.complete_full
            assert decoder.resident_bytes > 0
            assert _equal(destination.kv, anchor)
            for payload in reader.start_residual():
                decoder.refine(payload)
            assert decoder.complete_full
            assert decoder.resident_bytes == 0
            assert _equal(destination.kv, full)


@pytest.mark.parametrize(
    ("codec", "exact", "wanted", "seen"),
    [
        ("default", False, ["anchor"], ["anchor"]),
        ("default", True, ["anchor", "full"], ["anchor", "full"]),
        ("default", True, ["full", "exact"], ["full", "exact"]),
        ("alg1", True, ["anchor", "exact"], ["anchor", "exact"]),
        ("int8", True, ["anchor", "full", "exact"], ["full", "exact"]),
        ("int8", True, ["exact"], ["exact"]),
        ("int8", False, ["anchor"], ["full"]),
        ("raw", False, ["anchor", "full"], ["full"]),
    ],
)
def test_stages_follow_one_another(
    codec: str, exact: bool, wanted: list[Precision], seen: list[Precision], tmp_path: Path
) -> None:
    url = str(tmp_path / "a.lynx")
    lynxkv.encode(random_kv(tokens=150), url, codec=codec, exact=exact)
    with lynxkv.open(url) as reader:
        destination = KVDestination(reader.extent)
        found: list[Precision] = []
        for stage in decode_stages(reader, destination, wanted):
            assert _equal(destination.kv, lynxkv.load(url, precision=stage))
            found.append(stage)
    assert found == seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("precision", get_args(Precision))
def test_a_wider_destination_gets_the_same_values(dtype: torch.dtype, precision: Precision, tmp_path: Path) -> None:
    """A float32 model decodes on bf16 values, widened exactly."""
    kv = random_kv(tokens=50)
    url = str(tmp_path / "a.lynx")
    lynxkv.encode(kv, url, exact=True)

    class Wide(KVDestination):
        def target(self, layer: int, tensor: TensorName) -> Tensor:
            return wide[layer][tensor]

    with lynxkv.open(url) as reader:
        wide = [{name: torch.empty_like(x, dtype=dtype) for name, x in layer.tensors.items()} for layer in kv.layers]
        decode_into(reader, Wide(reader.extent), precision)
    narrow = lynxkv.load(url, precision=precision)
    for layer, source in zip(wide, narrow.layers, strict=True):
        assert all(torch.equal(layer[name], source.tensors[name].to(dtype)) for name in layer)


@pytest.mark.parametrize("codec", ["default", "alg1", "int8", "raw"])
def test_a_cache_of_pages_is_decoded_in_place(codec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sinks, segments that begin and end within a page, and exact corrections, through a block table."""
    monkeypatch.setattr("lynxkv.codecs.base.SEGMENT_ELEMENTS", 32 * 256)
    kv = random_kv(tokens=300, outlier=300.0)
    url = str(tmp_path / "a.lynx")
    lynxkv.encode(kv, url, codec=codec, exact=codec != "raw")
    heads, tokens, dim = kv.layers[0].tensors["k"].shape
    pages = torch.zeros(len(kv.layers), 2, 30, 16, heads, dim, dtype=torch.bfloat16)
    table = np.random.default_rng(0).permutation(30)[: -(-tokens // 16)].astype(np.int64)

    class Engine:
        def target(self, layer: int, tensor: TensorName) -> Paged:
            return Paged(pages=pages[layer, "kv".index(tensor)].transpose(1, 2), table=table, tokens=tokens)

    wanted: tuple[Precision, ...] = ("full",) if codec == "raw" else ("anchor", "full", "exact")
    with lynxkv.open(url) as reader:
        for stage in decode_stages(reader, Engine(), wanted):
            for number, layer in enumerate(lynxkv.load(url, precision=stage).layers):
                for name, tensor in layer.tensors.items():
                    assert torch.equal(Engine().target(number, name).read(), tensor)


def test_the_documented_engine_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The code in docs/kernels.md."""
    monkeypatch.chdir(tmp_path)
    kv = random_kv(tokens=100)
    lynxkv.encode(kv, "report.lynx")
    heads, tokens, dim = kv.layers[0].tensors["k"].shape
    table = np.random.default_rng(0).permutation(9)[:7].astype(np.int64)
    cache = torch.zeros(len(kv.layers), 9, 2, 16, heads, dim, dtype=torch.bfloat16)
    names: dict[str, Any] = {"cache": cache, "block_table": table}
    text = (Path(__file__).parents[1] / "docs" / "kernels.md").read_text("utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(code, names)
    engine = names["Engine"](cache, table, tokens)
    for number, layer in enumerate(lynxkv.load("report.lynx").layers):
        for name, tensor in layer.tensors.items():
            assert torch.equal(engine.target(number, name).read(), tensor)


@pytest.mark.parametrize("codec", ["default", "alg1", "alg1-shift", "int8", "int4", "raw"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_exact_brings_back_every_bit(codec: str, dtype: Dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lynxkv.codecs.base.SEGMENT_ELEMENTS", 32 * 256)
    kv = random_kv(tokens=400, outlier=300.0)
    keys = kv.layers[0].tensors["k"]
    keys[0, 50, :6] = torch.tensor([0.0, -0.0, 1e-41, -1e-41, 60000.0, -60000.0])
    keys[1, 60:300, 2] = 0
    url = str(tmp_path / "a.lynx")
    report = lynxkv.encode(kv, url, codec=codec, dtype=dtype, exact=True)
    assert (report.bytes_exact > 0) == (codec != "raw")
    assert lynxkv.check(url).bytes == report.bytes_anchor + report.bytes_residual + report.bytes_exact
    decoded = lynxkv.load(url, precision="exact")
    for layer, source in zip(decoded.layers, kv.layers, strict=True):
        for name, tensor in layer.tensors.items():
            original = round_to(source.tensors[name], dtype)
            assert torch.equal(tensor.view(torch.int16), original.view(torch.int16))
    check_against(lynxkv.load(url), kv, codec, dtype, "full")


@pytest.mark.parametrize("module", [reference, cpu])
def test_exact_corrections_keep_every_16_bit_pattern_apart(module: Backend) -> None:
    patterns = np.arange(65536, dtype=np.uint16)
    for dtype, mask in (("bf16", 0x7F80), ("fp16", 0x7C00)):
        finite = patterns[(patterns & mask) != mask]
        full = np.random.default_rng(1).permutation(finite)
        raw = module.pack_exact(finite, full, dtype)
        assert np.array_equal(raw, reference.pack_exact(finite, full, dtype))
        assert np.array_equal(module.unpack_exact(raw, full, dtype), finite)


@pytest.mark.parametrize("module", [reference, cpu])
def test_an_exact_correction_must_be_finite(module: Backend) -> None:
    full = np.array([0x7F7F], np.uint16)
    raw = module.pack_exact(np.array([0x7F80], np.uint16), full, "bf16")
    with pytest.raises(ValueError, match="not finite"):
        module.unpack_exact(raw, full, "bf16")


def test_exact_is_refused_where_it_is_not(tmp_path: Path) -> None:
    url = str(tmp_path / "a.lynx")
    lynxkv.encode(random_kv(), url)
    with pytest.raises(lynxkv.InputError, match="no exact section"):
        lynxkv.load(url, precision="exact")


def test_exact_needs_a_destination_that_holds_it(tmp_path: Path) -> None:
    kv = random_kv()
    url = str(tmp_path / "a.lynx")
    lynxkv.encode(kv, url, exact=True)
    with lynxkv.open(url) as reader:
        destination = KVDestination(reader.extent)
        for layer in destination.kv.layers:
            layer.tensors = {name: tensor.to(torch.float16) for name, tensor in layer.tensors.items()}
        with pytest.raises(lynxkv.InputError, match="cannot hold"):
            decode_into(reader, destination, "exact")
        decoder = CacheDecoder(reader.extent, destination)
        for payload in reader.stream_anchor():
            decoder.anchor(payload)
        *_, last = reader.start_residual(exact=True)
        assert last.segment.plan.part == "exact"
        with pytest.raises(lynxkv.InputError, match="cannot hold"):
            decoder.refine(last)


def test_full_precision_does_not_fetch_the_exact_arrays(tmp_path: Path) -> None:
    url = str(tmp_path / "a.lynx")
    report = lynxkv.encode(random_kv(), url, exact=True)
    with lynxkv.open(url) as reader:
        assert (reader.bytes_residual, reader.bytes_exact) == (report.bytes_residual, report.bytes_exact)
        assert {payload.segment.plan.part for payload in reader.start_residual()} == {"residual"}
        assert {payload.segment.plan.part for payload in reader.start_residual(exact=True)} == {"residual", "exact"}


def test_logits_come_back(tmp_path: Path) -> None:
    url = str(tmp_path / "a.lynx")
    logits = torch.randn(1000)
    lynxkv.encode(random_kv(), url, logits=logits)
    lynxkv.check(url)
    with lynxkv.open(url) as reader:
        stored = reader.logits()
    assert stored is not None
    assert torch.equal(torch.from_numpy(stored.copy()), logits)
    with pytest.raises(lynxkv.InputError, match="logits"):
        lynxkv.encode(random_kv(), url, logits=logits / 0, overwrite=True)


def test_encoding_twice_gives_the_same_bytes() -> None:
    kv = random_kv()
    first, second = encode_shards(kv), encode_shards(kv)
    assert b"".join(first.anchor.buffers) == b"".join(second.anchor.buffers)


def test_the_stock_library_reads_both_shards(tmp_path: Path) -> None:
    kv = random_kv(tokens=300)
    report = lynxkv.encode(kv, str(tmp_path / "a.lynx"))
    shards = sorted((tmp_path / "a.lynx").iterdir())
    assert len(shards) == 2
    with safetensors.safe_open(shards[0], "pt") as file:
        assert file.get_tensor("token_ids").tolist() == kv.token_ids
        sink = file.get_tensor("layer.0.k.sink")
    assert torch.equal(sink, round_to(kv.layers[0].tensors["k"][:, :4], "bf16").transpose(0, 1))
    assert report.bytes_anchor == shards[0].stat().st_size


def test_token_ids_can_be_left_out(tmp_path: Path) -> None:
    kv = random_kv(tokens=300)
    url = str(tmp_path / "a.lynx")
    lynxkv.encode(kv, url, store_token_ids=False)
    with lynxkv.open(url) as reader:
        assert reader.token_ids() is None
        assert reader.header.tokens.sha256 is not None
        assert reader.header.prefix_blocks == 1
    lynxkv.encode(replace(kv, token_ids=None), url, overwrite=True)
    with lynxkv.open(url) as reader:
        assert reader.header.tokens.sha256 is None
        assert reader.header.prefix_blocks == 0
    lynxkv.check(url)


def test_prefix_digests_depend_on_the_tenant() -> None:
    kv = random_kv(tokens=512)
    plain, salted = (
        encode_shards(kv, identity=Identity(fingerprint="a" * 64, salt_sha256=salt)) for salt in (None, "b" * 64)
    )
    assert plain.header.prefix_blocks == salted.header.prefix_blocks == 2
    assert plain.header.cache_id != salted.header.cache_id


def test_kv_files_come_back(tmp_path: Path) -> None:
    kv = random_kv(tokens=20)
    kv_to_safetensors(kv, tmp_path / "kv.safetensors")
    back = kv_from_safetensors(tmp_path / "kv.safetensors")
    assert _equal(back, kv)
    assert back.token_ids == kv.token_ids


@pytest.mark.parametrize(
    "tensors",
    [
        {},
        {"layer.0.k": torch.zeros(1, 2, 4)},
        {"layer.0.k": torch.zeros(1, 2, 4), "layer.0.v": torch.zeros(1, 3, 4)},
        {"layer.0.k": torch.zeros(1, 2, 4), "layer.0.v": torch.zeros(1, 2, 4), "extra": torch.zeros(1)},
        {"layer.0.k": torch.zeros(2, 2, 2, 4), "layer.0.v": torch.zeros(2, 2, 2, 4)},
        {"layer.0.k": torch.zeros(1, 2, 4), "layer.0.v": torch.zeros(1, 2, 4), "token_ids": torch.zeros(3).long()},
        {"layer.0.k": torch.zeros(1, 2, 4).int(), "layer.0.v": torch.zeros(1, 2, 4)},
    ],
)
def test_other_kv_files_are_refused(tensors: dict[str, Tensor], tmp_path: Path) -> None:
    safetensors.torch.save_file(tensors, tmp_path / "kv.safetensors")
    with pytest.raises(lynxkv.InputError):
        kv_from_safetensors(tmp_path / "kv.safetensors")


def test_a_file_that_is_not_safetensors_is_refused(tmp_path: Path) -> None:
    (tmp_path / "kv.safetensors").write_bytes(b"hello")
    with pytest.raises(lynxkv.InputError):
        kv_from_safetensors(tmp_path / "kv.safetensors")
    with pytest.raises(lynxkv.InputError):
        kv_from_safetensors(tmp_path / "absent.safetensors")


def test_a_layer_with_nan_is_named(tmp_path: Path) -> None:
    kv = random_kv()
    kv.layers[1].tensors["v"][0, 5, 3] = float("nan")
    with pytest.raises(lynxkv.NonFiniteError, match="layer 1 v") as caught:
        lynxkv.encode(kv, str(tmp_path / "a.lynx"))
    assert "before encoding" in (caught.value.hint or "")
    assert not (tmp_path / "a.lynx").exists()


def test_values_beyond_fp16_are_refused(tmp_path: Path) -> None:
    kv = random_kv(outlier=1e6)
    with pytest.raises(lynxkv.NonFiniteError, match="fp16"):
        lynxkv.encode(kv, str(tmp_path / "a.lynx"), dtype="fp16")


@pytest.mark.parametrize(("value", "dtype", "codec"), [(3.4e38, "bf16", "default"), (1e300, "fp32", "raw")])
def test_values_beyond_the_dtype_are_refused(value: float, dtype: Dtype, codec: str, tmp_path: Path) -> None:
    kv = random_kv()
    wide = kv.layers[0].tensors["k"].double()
    wide[0, 7, 3] = value
    kv.layers[0].tensors["k"] = wide
    with pytest.raises(lynxkv.NonFiniteError, match=dtype):
        lynxkv.encode(kv, str(tmp_path / "a.lynx"), codec=codec, dtype=dtype)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("ids", [[-1], [2**32], [True], [0.5]])
def test_what_is_no_token_id_is_refused(ids: list[int], tmp_path: Path) -> None:
    kv = replace(random_kv(), token_ids=ids * 70)
    with pytest.raises(lynxkv.InputError, match="token id"):
        lynxkv.encode(kv, str(tmp_path / "a.lynx"))


def test_what_no_reader_would_open_is_not_published(tmp_path: Path) -> None:
    kv = random_kv()
    del kv.layers[1].tensors["v"]
    with pytest.raises(lynxkv.InputError, match="could not be read"):
        lynxkv.encode(kv, str(tmp_path / "a.lynx"))
    with pytest.raises(lynxkv.InputError, match="could not be read"):
        lynxkv.encode(random_kv(), str(tmp_path / "a.lynx"), identity=Identity(model_id="x" * 5000))
    assert not list(tmp_path.iterdir())


def test_precisions_are_checked(tmp_path: Path) -> None:
    url = str(tmp_path / "a.lynx")
    lynxkv.encode(random_kv(), url)
    with pytest.raises(lynxkv.InputError, match="exactly"):
        lynxkv.load(url, precision="exactly")  # type: ignore[arg-type]
    with pytest.raises(lynxkv.InputError, match="exactly"):
        lynxkv.compare(url, random_kv(), precision="exactly")  # type: ignore[arg-type]
    with pytest.raises(lynxkv.InputError, match="exact"):
        lynxkv.dequantize(lynxkv.quantize(torch.randn(1, 2, 3)), "exact")


@pytest.mark.parametrize("change", ["no layers", "ids", "positions", "dtype", "two dims", "no heads", "integers"])
def test_impossible_caches_are_refused(change: str, tmp_path: Path) -> None:
    kv = random_kv()
    dtype: Dtype = "bf16"
    if change == "no layers":
        kv = replace(kv, layers=[])
    elif change == "ids":
        kv = replace(kv, token_ids=[1, 2])
    elif change == "positions":
        kv.layers[0] = replace(kv.layers[0], stop=71)
    elif change == "dtype":
        dtype = "fp32"
    else:
        keys = kv.layers[0].tensors["k"]
        kv.layers[0].tensors["k"] = {"two dims": keys[0], "no heads": keys[:0], "integers": keys.int()}[change]
    with pytest.raises(lynxkv.InputError):
        lynxkv.encode(kv, str(tmp_path / "a.lynx"), dtype=dtype)
    assert not list(tmp_path.iterdir())


def _equal(a: KV, b: KV) -> bool:
    return all(
        torch.equal(x.tensors[name], y.tensors[name])
        for x, y in zip(a.layers, b.layers, strict=True)
        for name in x.tensors
    )
