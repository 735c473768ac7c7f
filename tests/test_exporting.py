"""An exported cache is a plain safetensors file with the values that loading gives."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch

import lynxkv
from lynxkv.choices import Precision
from lynxkv.kv import kv_from_safetensors, kv_to_safetensors
from lynxkv.testing.kv import random_kv


@pytest.fixture
def url(tmp_path: Path) -> str:
    kv = random_kv()
    kv.token_ids = list(range(kv.tokens))
    lynxkv.encode(kv, tmp_path / "a.lynx", exact=True)
    return str(tmp_path / "a.lynx")


@pytest.mark.parametrize("precision", ["anchor", "full", "exact"])
def test_values_are_those_of_loading(precision: Precision, url: str, tmp_path: Path) -> None:
    report = lynxkv.export(url, tmp_path / "kv.safetensors", precision=precision)
    exported, loaded = kv_from_safetensors(tmp_path / "kv.safetensors"), lynxkv.load(url, precision=precision)
    assert exported.token_ids == loaded.token_ids == list(range(70))
    for mine, right in zip(exported.layers, loaded.layers, strict=True):
        assert all(mine.tensors[name].equal(tensor) for name, tensor in right.tensors.items())
    assert report.bytes == (tmp_path / "kv.safetensors").stat().st_size


def test_a_file_is_not_replaced_unasked(url: str, tmp_path: Path) -> None:
    target = tmp_path / "kv.safetensors"
    target.write_text("mine")
    with pytest.raises(lynxkv.StoreError, match="exists already"):
        lynxkv.export(url, target)
    assert target.read_text() == "mine"
    lynxkv.export(url, target, overwrite=True)
    assert kv_from_safetensors(target).tokens == 70


def test_what_the_system_says_is_told_with_a_hint(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kv = lynxkv.load(url)
    for path, words, hint in (
        (tmp_path / "absent" / "kv.safetensors", "No such file", "check"),
        (tmp_path, "directory", "check the path"),
    ):
        with pytest.raises(lynxkv.StoreError, match=words) as caught:
            kv_to_safetensors(kv, path)
        assert hint in str(caught.value.hint), caught.value.hint
    for path in (tmp_path, tmp_path / f"{'a' * 300}.safetensors"):
        with pytest.raises(lynxkv.StoreError, match="cannot write"):
            lynxkv.export(url, path, overwrite=True)

    def full(tensors: Any, path: str) -> None:
        raise safetensors.SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    with monkeypatch.context() as patch:
        patch.setattr(safetensors.torch, "save_file", full)
        with pytest.raises(lynxkv.StoreError, match="No space") as caught:
            kv_to_safetensors(kv, tmp_path / "kv.safetensors")
    assert "disk is full" in str(caught.value.hint)

    def refuse(self: Path, target: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "replace", refuse)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(lynxkv.StoreError, match="Permission denied"):
        lynxkv.export(url, tmp_path / "kv.safetensors")
    assert sorted(tmp_path.iterdir()) == before


def test_failures_leave_no_file(url: str, tmp_path: Path) -> None:
    with pytest.raises(lynxkv.StoreError, match="no such folder"):
        lynxkv.export(url, tmp_path / "absent" / "kv.safetensors")
    windowed = tmp_path / "w.lynx"
    lynxkv.encode(random_kv(windows=(None, 30)), windowed)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(lynxkv.InputError, match="positions"):
        lynxkv.export(windowed, tmp_path / "kv.safetensors")
    assert sorted(tmp_path.iterdir()) == before
