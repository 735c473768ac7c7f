"""The vectors are what the generator writes, stock safetensors opens them, and lynxkv reads or refuses each."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load

import lynxkv
from format_spec import generate_vectors
from format_spec.generator.broken import Vector
from format_spec.generator.invalid import made_when_tested
from lynxkv.decoder import CacheDecoder, KVDestination
from lynxkv.errors import (
    BindingError,
    ChecksumError,
    ContentError,
    FormatError,
    HeaderError,
    TruncatedError,
    UnsupportedFormatError,
)
from lynxkv.kv import KV
from lynxkv.layout import Precision

VECTORS = generate_vectors.VECTORS
VALID = sorted(path.stem for path in VECTORS.glob("valid/*.json"))
INVALID = sorted(path.stem for path in VECTORS.glob("invalid/*.json"))
PRECISIONS: tuple[Precision, ...] = ("anchor", "full", "exact")
ERRORS: dict[str, type[FormatError]] = {
    "truncated": TruncatedError,
    "header": HeaderError,
    "checksum": ChecksumError,
    "unsupported": UnsupportedFormatError,
    "binding": BindingError,
    "content": ContentError,
}


def expected(name: str) -> dict[str, Any]:
    """What `NAME.json` says."""
    return dict(json.loads((VECTORS / f"{name}.json").read_text()))


def test_vectors_are_those_of_the_generator() -> None:
    files = generate_vectors.build()
    kept = [*VECTORS.glob("*/*.json"), *VECTORS.glob("*/*.lynx/*"), *VECTORS.glob("*/basis-*")]
    assert {path.relative_to(VECTORS).as_posix() for path in kept} == files.keys()
    changed = [name for name, data in files.items() if (VECTORS / name).read_bytes() != data]
    assert changed == []


def test_there_is_a_vector_for_every_kind_of_refusal() -> None:
    assert {name.split("-")[0] for name in INVALID} == ERRORS.keys()


def test_the_worked_sum_of_spec_11() -> None:
    folder = VECTORS / "valid/entropy-small.lynx"
    (residual,) = folder.glob("residual-*")
    for path, data_bytes in ((folder / "anchor.safetensors", 3776), (residual, 64 + 2 * 64 + 2 * 384)):
        stored = path.read_bytes()
        header_bytes = 8 + int.from_bytes(stored[:8], "little")
        assert len(stored) - header_bytes == data_bytes
    header = json.loads((folder / "anchor.safetensors").read_bytes()[8:].split(b"  ")[0])
    sizes = {
        name: entry["data_offsets"][1] - entry["data_offsets"][0]
        for name, entry in header.items()
        if name != "__metadata__"
    }
    assert sizes["index"] == 640
    assert sizes["steps"] + sizes["pad.0"] == 64
    for tensor in ("k", "v"):
        parts = {part: sizes[f"layer.0.{tensor}.{part}"] for part in ("sink", "mean", "order", "anchor")}
        assert parts == {"sink": 128, "mean": 32, "order": 32, "anchor": 1088}
    assert sizes["token_ids"] == 280
    index = load((folder / "anchor.safetensors").read_bytes())["index"].numpy().tobytes()
    assert int.from_bytes(index[4 * 64 + 12 : 4 * 64 + 16], "little") == 1056
    index = load(residual.read_bytes())["index"].numpy().tobytes()
    assert int.from_bytes(index[12:16], "little") == 336


@pytest.mark.parametrize("name", VALID)
def test_stock_safetensors_opens_each_shard(name: str) -> None:
    for path in sorted((VECTORS / f"valid/{name}.lynx").iterdir()):
        with safe_open(path, "pt") as shard:
            names = set(shard.keys())
            assert json.loads(shard.metadata()["lynxkv"])["version"].startswith("1.")
        arrays = load(path.read_bytes())
        assert arrays.keys() == names
        assert hashlib.sha256(arrays["index"].numpy().tobytes()).hexdigest() in path.read_text("utf-8", "replace")


def decoded(url: str, precision: Precision) -> KV:
    """What lynxkv makes of a cache; where not every tensor is exact, as far as each goes, and `load` must refuse."""
    with lynxkv.open(url) as reader:
        if precision != "exact" or reader.extent.has_exact:
            return lynxkv.load(url, precision=precision)
        with pytest.raises(lynxkv.InputError):
            lynxkv.load(url, precision="exact")
        destination = KVDestination(reader.extent)
        decoder = CacheDecoder(reader.extent, destination, bases=reader.bases())
        for payload in reader.stream_anchor():
            decoder.anchor(payload)
        for payload in reader.start_residual(exact=True) if reader.extent.has_residual else ():
            decoder.refine(payload)
        assert decoder.complete_exact
    return destination.kv


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", VALID)
def test_lynxkv_decodes_each_valid_vector(name: str, precision: Precision) -> None:
    kv = decoded(str(VECTORS / f"valid/{name}.lynx"), precision)
    found = {}
    for i, layer in enumerate(kv.layers):
        for tensor, values in layer.tensors.items():
            bits = values.contiguous()
            bits = bits if bits.dtype == torch.float32 else bits.view(torch.int16)
            data = bits.numpy().tobytes()
            summary = {"sha256": hashlib.sha256(data).hexdigest(), "first": data[:16].hex()}
            found[f"layer.{i}.{tensor}"] = list(values.shape), summary
    wanted = expected(f"valid/{name}")["tensors"]
    assert found == {key: (entry["shape"], entry[precision]) for key, entry in wanted.items()}


@pytest.mark.parametrize("name", VALID)
def test_lynxkv_check_passes_each_valid_vector(name: str) -> None:
    lynxkv.check(str(VECTORS / f"valid/{name}.lynx"))


@pytest.mark.parametrize("name", INVALID)
def test_lynxkv_refuses_each_invalid_vector(name: str) -> None:
    wanted = expected(f"invalid/{name}")
    url = str(VECTORS / f"invalid/{name}.lynx")
    if not wanted.get("decoded"):
        with pytest.raises(ERRORS[wanted["kind"]]) as caught:
            lynxkv.check(url)
        assert type(caught.value) is ERRORS[wanted["kind"]]
    if not wanted.get("unread"):
        with pytest.raises(ERRORS[wanted["kind"]]):
            lynxkv.load(url, precision=wanted["precision"])
    for precision in PRECISIONS[: PRECISIONS.index(wanted["precision"])]:
        lynxkv.load(url, precision=precision)


@pytest.mark.parametrize("vector", list(made_when_tested()), ids=lambda vector: vector.name)
def test_lynxkv_refuses_what_is_made_when_tested(vector: Vector, tmp_path: Path) -> None:
    folder = tmp_path / "large.lynx"
    folder.mkdir()
    for file, data in vector.files.items():
        (folder / file).write_bytes(data)
    with pytest.raises(ERRORS[vector.kind]):
        lynxkv.load(str(folder))


def test_a_missing_residual_leaves_the_anchor_readable(tmp_path: Path) -> None:
    url = tmp_path / "copy.lynx"
    shutil.copytree(VECTORS / "valid/entropy-small.lynx", url)
    next(url.glob("residual-*")).unlink()
    lynxkv.load(str(url), precision="anchor")
    with pytest.raises(lynxkv.CacheNotFoundError):
        lynxkv.load(str(url))


def test_lynxkv_reads_logits() -> None:
    with lynxkv.open(str(VECTORS / "valid/exact-entropy.lynx")) as reader:
        logits = reader.logits()
    assert logits is not None
    assert logits.tolist() == [(37 * i % 256 - 128) / 32 for i in range(11)]
    with lynxkv.open(str(VECTORS / "valid/entropy-small.lynx")) as reader:
        assert reader.logits() is None


@pytest.mark.parametrize("name", ["content-logits-nan", "content-logits-infinite", "checksum-logits"])
def test_lynxkv_refuses_logits_when_asked_for_them(name: str) -> None:
    with lynxkv.open(str(VECTORS / f"invalid/{name}.lynx")) as reader, pytest.raises(ERRORS[name.split("-")[0]]):
        reader.logits()
