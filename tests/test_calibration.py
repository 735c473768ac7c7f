"""A model's basis: found for every family, smaller caches as good as before, found again by whoever reads them."""

from __future__ import annotations

import os
import shutil
import stat
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import lynxkv
from lynxkv import (
    BindingError,
    CacheNotFoundError,
    ChecksumError,
    HeaderError,
    InputError,
    NonFiniteError,
    StoreError,
)
from lynxkv.bases import find_basis, known_basis, load_basis, save_basis
from lynxkv.calibration import calibrate
from lynxkv.codecs import get_codec
from lynxkv.continuing import continuation
from lynxkv.decoder import KVDestination, decode_into
from lynxkv.fidelity import nmse
from lynxkv.format.basis import Basis, parse_basis
from lynxkv.integrations.hf import Model
from lynxkv.kv import KV
from lynxkv.layout import Precision
from lynxkv.manage import list_caches, prune, remove
from lynxkv.testing.tiny_models import FAMILIES, tiny_model


@pytest.fixture(autouse=True)
def _own_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LYNXKV_HOME", str(tmp_path / "home"))


def words(count: int, seed: int) -> str:
    generator = torch.Generator().manual_seed(seed)
    return " ".join(f"w{number}" for number in torch.randint(3, 48, (count,), generator=generator).tolist())


def with_related_channels(model: Model) -> Model:
    """The same with weights under which the channels of keys and values depend on each other, as real ones do."""
    for name, module in model.hf.named_modules():
        if isinstance(module, torch.nn.Linear) and name.endswith(("k_proj", "v_proj", "qkv_proj")):
            rows = slice(-32, None) if name.endswith("qkv_proj") else slice(None)
            with torch.no_grad():
                left, _, right = torch.linalg.svd(module.weight[rows], full_matrices=False)
                module.weight[rows] = left * 3 * 0.6 ** torch.arange(len(right)) @ right
    return model


def basis_of(model: Model) -> Basis:
    return calibrate(model, [words(200, 1), words(200, 2)], tokens=200)


def cache_of(model: Model, seed: int = 9) -> KV:
    ids = torch.randint(3, 48, (300,), generator=torch.Generator().manual_seed(seed)).tolist()
    return lynxkv.prefill(model, ids)


def error(kv: KV, original: KV) -> float:
    """Of keys and values together, without the sinks, which are exact either way."""
    found = [
        nmse(layer.tensors[name][:, 4:].float(), own.tensors[name][:, 4:].float())
        for layer, own in zip(kv.layers, original.layers, strict=True)
        for name in ("k", "v")
    ]
    return sum(found) / len(found)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "mistral"])
def test_caches_of_every_family_are_smaller_and_as_good(family: str, tmp_path: Path) -> None:
    model = with_related_channels(tiny_model(family))
    basis, kv = basis_of(model), cache_of(model)
    plain, compact = str(tmp_path / "plain.lynx"), str(tmp_path / "compact.lynx")
    lynxkv.encode(kv, plain, identity=model.identity)
    # Of keys before their rope, whose spread is no larger: the same part of it is no larger a step.
    same = get_codec("compact", key_step=get_codec("default").params()["key_step"])
    lynxkv.encode(kv, compact, codec=same, basis=basis, identity=model.identity, exact=True)
    lynxkv.check(compact)
    precisions: tuple[Precision, ...] = ("anchor", "full")
    for precision in precisions:
        ours, theirs = (error(lynxkv.load(url, precision=precision), kv) for url in (compact, plain))
        assert ours < 1.15 * theirs
    sizes = {url: coded_bytes(url) for url in (plain, compact)}
    assert sizes[compact] < 0.9 * sizes[plain]
    exact = lynxkv.load(compact, precision="exact")
    for layer, own in zip(exact.layers, kv.layers, strict=True):
        for name, tensor in layer.tensors.items():
            assert torch.equal(tensor, own.tensors[name].bfloat16())


def test_biases_of_keys_cost_nothing_once_they_are_turned_back(tmp_path: Path) -> None:
    """Qwen2's keys have biases of hundreds, which RoPE turns into as much variance."""
    model = with_related_channels(tiny_model("qwen2"))
    sizes, errors = [], []
    for scale in (0.0, 20.0):
        generator = torch.Generator().manual_seed(4)
        for name, parameter in model.hf.named_parameters():
            if name.endswith("k_proj.bias"):
                with torch.no_grad():
                    parameter[::4] += scale * torch.randn(len(parameter[::4]), generator=generator)
        kv, url = cache_of(model), str(tmp_path / f"{scale}.lynx")
        lynxkv.encode(kv, url, codec="compact", basis=basis_of(model))
        decoded = lynxkv.load(url, precision="anchor")
        sizes.append(coded_bytes(url))
        keys = ((decoded.layers[0].tensors["k"], kv.layers[0].tensors["k"].bfloat16()),)
        errors += [float((x[:, 4:].float() - y[:, 4:].float()).square().mean()) for x, y in keys]
    # Large values are rounded to bf16 before, which is coded too, and once more after.
    assert sizes[1] < 1.05 * sizes[0]
    rounding = (float(kv.layers[0].tensors["k"].abs().max()) / 2**8) ** 2 / 12
    assert errors[1] < 1.1 * errors[0] + rounding


def coded_bytes(url: str) -> int:
    return sum(part.bytes for part in lynxkv.inspect(url).parts if (part.shard, part.name) == ("anchor", "codes"))


def test_ropes_are_found_where_they_are() -> None:
    assert {own["k"].rope for own in basis_of(tiny_model("llama")).layers} == {"main"}
    partial = basis_of(tiny_model("phi"))
    assert partial.ropes["main"].pairs < 4
    gemma = basis_of(tiny_model("gemma3", rope_parameters={
        "sliding_attention": {"rope_type": "default", "rope_theta": 10.0},
        "full_attention": {"rope_type": "default", "rope_theta": 100_000.0},
    }))  # fmt: skip
    assert [own["k"].rope for own in gemma.layers] == ["sliding-attention", "full-attention", "sliding-attention"]
    assert all(own["v"].rope is None for own in gemma.layers)


def test_text_over_a_compact_cache_is_that_of_its_full_values(tmp_path: Path) -> None:
    model = tiny_model("llama")
    url = str(tmp_path / "a.lynx")
    lynxkv.encode(cache_of(model), url, codec="compact", basis=basis_of(model), identity=model.identity)
    with lynxkv.open(url) as reader:
        drafted = lynxkv.generate(reader, model, [5, 6, 7], max_new_tokens=20, speculate=6)
    with lynxkv.open(url) as reader:
        plain = lynxkv.generate(reader, model, [5, 6, 7], max_new_tokens=20, speculate="off")
    assert drafted.token_ids == plain.token_ids
    assert drafted.drafted > 0


def test_a_basis_survives_its_file_and_is_found_by_model(tmp_path: Path) -> None:
    model = tiny_model("llama")
    basis = basis_of(model)
    assert model.identity.fingerprint is not None
    assert find_basis(model.identity.fingerprint) is None
    path = save_basis(basis)
    again = load_basis(path)
    assert again.sha256 == basis.sha256
    assert np.array_equal(again.layers[1]["k"].rows, basis.layers[1]["k"].rows)
    assert np.array_equal(again.ropes["main"].coarse, basis.ropes["main"].coarse)
    found = find_basis(model.identity.fingerprint)
    assert found is not None
    assert found.sha256 == basis.sha256
    assert find_basis("0" * 64) is None
    path.write_bytes(path.read_bytes()[:-1])
    assert find_basis(model.identity.fingerprint) is None
    assert known_basis(basis.ref) is None
    other = save_basis(basis, tmp_path / "mine.safetensors")
    assert load_basis(other).sha256 == basis.sha256
    with pytest.raises(InputError, match="cannot write"):
        save_basis(basis, "/proc/no/such.safetensors")
    with pytest.raises(InputError, match="cannot read"):
        load_basis(tmp_path / "missing")


def test_what_is_no_basis_is_passed_over(tmp_path: Path) -> None:
    basis = basis_of(tiny_model("llama"))
    own = save_basis(basis)
    folder, names = own.parent, [f"basis-{number:016x}.safetensors" for number in range(4)]
    (folder / names[0]).symlink_to(tmp_path / "nowhere")
    (folder / names[1]).mkdir()
    (folder / names[2]).write_bytes(basis.data)
    os.mkfifo(folder / names[3])
    found = find_basis(basis.fingerprint)
    assert found is not None
    assert found.sha256 == basis.sha256
    for name in (names[0], names[1], names[3]):
        with pytest.raises(InputError, match="cannot read"):
            load_basis(folder / name)
    with pytest.raises(InputError, match="not a plain file"):
        load_basis("/dev/zero")
    own.unlink()
    os.mkfifo(own)
    assert known_basis(basis.ref) is None
    assert stat.S_IMODE(save_basis(basis).stat().st_mode) == 0o666 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_readers_elsewhere_fetch_the_basis_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    basis, kv = basis_of(model), cache_of(model)
    url = str(tmp_path / "store" / "a.lynx")
    lynxkv.encode(kv, url, codec="compact", basis=basis, identity=model.identity)
    assert lynxkv.inspect(url).basis == basis.ref.name
    beside = tmp_path / "store" / basis.ref.name
    assert beside.read_bytes() == basis.data
    assert known_basis(basis.ref) is None
    first = lynxkv.load(url)
    assert known_basis(basis.ref) is not None
    # Anybody may have put it there: caches are encoded with this user's own ones only.
    assert find_basis(basis.fingerprint) is None
    beside.unlink()
    assert torch.equal(lynxkv.load(url).layers[2].tensors["k"], first.layers[2].tensors["k"])
    # This machine can read it, but a check is of what is stored.
    with pytest.raises(CacheNotFoundError, match="basis"):
        lynxkv.check(url)
    monkeypatch.setenv("LYNXKV_HOME", str(tmp_path / "another"))
    with pytest.raises(CacheNotFoundError, match="basis") as caught:
        lynxkv.load(url)
    assert basis.ref.name in str(caught.value.hint)
    for damaged in (basis.data[:-1] + b"\0", basis.data + b"\0", basis.data[:-64], b""):
        beside.write_bytes(damaged)
        with pytest.raises(ChecksumError, match="basis"):
            lynxkv.check(url)
    beside.write_bytes(basis.data)
    monkeypatch.setenv("LYNXKV_HOME", "/proc/nowhere")
    lynxkv.check(url)


def test_no_cache_loses_its_basis_to_pruning(tmp_path: Path) -> None:
    model = tiny_model("llama")
    basis, root = basis_of(model), tmp_path / "outer.lynx"  # a folder that is called as a cache is
    for seed in (1, 2):
        lynxkv.encode(cache_of(model, seed), str(root / f"{seed}.lynx"), codec="compact", basis=basis)
    assert not prune(str(root), grace_s=0, now_s=lambda: 1e11).removed
    assert {entry.orphan_bytes for entry in list_caches(str(root))} == {0}
    remove(str(root / "1.lynx"))
    assert lynxkv.check(str(root / "2.lynx")).tokens == 300


def test_a_damaged_basis_is_replaced_by_encoding_again(tmp_path: Path) -> None:
    model = tiny_model("llama")
    basis = basis_of(model)
    lynxkv.encode(cache_of(model), str(tmp_path / "a.lynx"), codec="compact", basis=basis)
    stored = tmp_path / basis.ref.name
    stored.write_bytes(basis.data[:-1] + bytes([basis.data[-1] ^ 1]))
    lynxkv.encode(cache_of(model, 2), str(tmp_path / "b.lynx"), codec="compact", basis=basis)
    assert stored.read_bytes() == basis.data
    written = stored.stat().st_mtime_ns
    lynxkv.encode(cache_of(model, 3), str(tmp_path / "c.lynx"), codec="compact", basis=basis)
    assert stored.stat().st_mtime_ns == written  # what is whole stays
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == [basis.ref.name]


@pytest.mark.parametrize("folder", ["store", "outer.lynx"])
def test_what_killed_writers_left_of_a_basis_goes(folder: str, tmp_path: Path) -> None:
    model, root = tiny_model("llama"), tmp_path / folder
    basis = basis_of(model)
    lynxkv.encode(cache_of(model), str(root / "a.lynx"), codec="compact", basis=basis)
    left, other = root / f".{basis.ref.name}.{'0' * 32}", root / ".basis-notes.txt"
    left.write_bytes(b"half")
    other.write_bytes(b"not ours")
    assert not prune(str(root)).removed  # its writer may be at work
    (removed,) = prune(str(root), now_s=lambda: 1e11).removed
    assert (removed.url, removed.objects, removed.bytes) == (str(root), (left.name,), 4)
    assert other.exists()
    assert not left.exists()
    assert lynxkv.check(str(root / "a.lynx")).tokens == 300


def test_readers_in_threads_load_the_same(tmp_path: Path) -> None:
    model = tiny_model("llama")
    url = str(tmp_path / "a.lynx")
    lynxkv.encode(cache_of(model), url, codec="compact", basis=basis_of(model))
    with ThreadPoolExecutor(6) as pool:
        loaded = list(pool.map(lambda _: lynxkv.load(url), range(6)))
    for layers in zip(*(kv.layers for kv in loaded), strict=True):
        for name in ("k", "v"):
            assert all(torch.equal(layer.tensors[name], layers[0].tensors[name]) for layer in layers)


@pytest.mark.parametrize("tokens", [1, 4, 5])
def test_very_short_caches(tokens: int, tmp_path: Path) -> None:
    model, url = tiny_model("llama"), str(tmp_path / "a.lynx")
    kv = cache_of(model).between(0, tokens)
    lynxkv.encode(kv, url, codec="compact", basis=basis_of(model))
    assert error(lynxkv.load(url), kv) < 1e-3 if tokens > 4 else lynxkv.check(url).tokens == tokens


def test_caches_elsewhere_share_one_basis(tmp_path: Path) -> None:
    model = tiny_model("llama")
    basis = basis_of(model)
    for seed in (1, 2):
        lynxkv.encode(cache_of(model, seed), str(tmp_path / f"{seed}.lynx"), codec="compact", basis=basis)
    assert [path.name for path in tmp_path.glob("basis-*")] == [basis.ref.name]
    shutil.copytree(tmp_path / "1.lynx", tmp_path / "copy.lynx")
    lynxkv.check(str(tmp_path / "copy.lynx"))


def test_a_chain_may_have_several_bases_in_some_of_its_caches(tmp_path: Path) -> None:
    model = tiny_model("llama")
    kv, urls = cache_of(model), [str(tmp_path / f"{name}.lynx") for name in "abc"]
    lynxkv.encode(kv.between(0, 130), urls[0], codec="compact", basis=basis_of(model), identity=model.identity)
    for before, url, start, stop, codec in ((0, urls[1], 130, 200, "default"), (1, urls[2], 200, 300, "compact")):
        with lynxkv.open(urls[before]) as reader:
            parent = continuation(reader, "full")
        other = calibrate(model, [words(150, 5), words(150, 6)], tokens=150)
        basis = other if codec == "compact" else None
        part = kv.between(start, stop)
        lynxkv.encode(part, url, codec=codec, basis=basis, identity=model.identity, parent=parent)
    assert len(list(tmp_path.glob("basis-*"))) == 2
    lynxkv.check(urls[2])
    whole = lynxkv.load(urls[2])
    assert whole.tokens == 300
    parts = [lynxkv.load(url) for url in urls]
    assert torch.equal(whole.layers[0].tensors["k"][:, :130], parts[0].layers[0].tensors["k"])
    assert error(whole, kv) < 1e-3
    # A prefix is cut inside a segment, and so is its rope.
    with lynxkv.open(urls[2], tokens=250) as reader:
        destination = KVDestination(reader.extent)
        decode_into(reader, destination, "full")
    assert torch.equal(destination.kv.layers[1].tensors["k"], whole.layers[1].tensors["k"][:, :250])


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    model = tiny_model("llama")
    basis, kv = basis_of(model), cache_of(model)
    url = str(tmp_path / "a.lynx")
    with pytest.raises(InputError, match="needs a basis"):
        lynxkv.encode(kv, url, codec="compact")
    with pytest.raises(InputError, match="takes no basis"):
        lynxkv.encode(kv, url, codec="int8", basis=basis)
    with pytest.raises(BindingError, match="another model"):
        lynxkv.encode(kv, url, codec="compact", basis=basis, identity=tiny_model("llama", seed=1).identity)
    with pytest.raises(BindingError, match="another model"):  # before anything is prefilled
        lynxkv.encode_prompt(tiny_model("llama", seed=1), [5] * 20, url, codec="compact", basis=basis, progress=_never)
    with pytest.raises(BindingError, match="does not fit"):
        lynxkv.encode(cache_of(tiny_model("phi")), url, codec="compact", basis=basis)
    short = replace(basis.ropes["main"], coarse=basis.ropes["main"].coarse[:4])
    with pytest.raises(BindingError, match="256"):
        lynxkv.encode(kv, url, codec="compact", basis=replace(basis, ropes={"main": short}))
    assert not list(tmp_path.glob("*.lynx"))
    with pytest.raises(HeaderError):
        parse_basis((Path(__file__).parents[1] / "format_spec/vectors/valid/single-token.lynx/anchor.safetensors")
                    .read_bytes(), what="an Anchor")  # fmt: skip


def _never(stage: str, done: int, total: int) -> None:
    raise AssertionError(stage)


def test_a_model_that_overflows_is_refused() -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        model.hf.get_parameter("model.layers.1.self_attn.v_proj.weight").fill_(float("inf"))
    with pytest.raises(NonFiniteError, match="layer 1 v"):
        basis_of(model)


def test_texts_that_are_too_short_are_refused() -> None:
    model = tiny_model("llama")
    with pytest.raises(InputError, match="are needed"):
        calibrate(model, [words(20, 1)], tokens=200)
    with pytest.raises(InputError, match="too few"):
        calibrate(model, [words(20, 1)], tokens=12)
    with pytest.raises(InputError, match="no texts"):
        calibrate(model, [])


def test_a_store_that_takes_no_basis_gets_no_cache(tmp_path: Path) -> None:
    model = tiny_model("llama")
    basis = basis_of(model)
    (tmp_path / basis.ref.name).mkdir()
    with pytest.raises(StoreError):
        lynxkv.encode(cache_of(model), str(tmp_path / "a.lynx"), codec="compact", basis=basis)
    assert not (tmp_path / "a.lynx" / "anchor.safetensors").exists()
