"""Publishing is atomic, errors are typed, and links are simulated."""

from __future__ import annotations

import errno
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import pytest

import lynxkv
from lynxkv.store import Link, Store
from lynxkv.testing.kv import random_kv


@pytest.mark.parametrize("url", ["cache", "cache.lynx2", ".lynx", "folder/.lynx", ""])
def test_a_cache_is_named_dot_lynx(url: str) -> None:
    with pytest.raises(lynxkv.InputError, match="does not name a cache"):
        Store(url)


def test_an_unknown_scheme_is_refused() -> None:
    with pytest.raises(lynxkv.InputError, match="nosuch"):
        Store("nosuch://bucket/a.lynx")


def test_what_is_there_is_not_overwritten_unasked(tmp_path: Path) -> None:
    url = str(tmp_path / "a.lynx")
    lynxkv.encode(random_kv(seed=1), url)
    before = lynxkv.check(url)
    with pytest.raises(lynxkv.CacheExistsError):
        lynxkv.encode(random_kv(seed=2), url)
    assert lynxkv.check(url) == before
    lynxkv.encode(random_kv(seed=2), url, overwrite=True)
    after = lynxkv.check(url)
    assert after.cache_id != before.cache_id
    assert len(after.orphans) == 1  # readers of the old cache may still need its Residual


@pytest.mark.parametrize("fail_at", range(3))
def test_a_full_disk_leaves_nothing_behind(fail_at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0
    stock = os.fsync

    def full(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls > fail_at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        stock(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    url = str(tmp_path / "a.lynx")
    if fail_at >= 2:  # each shard is flushed once
        lynxkv.encode(random_kv(), url)
        lynxkv.check(url)
        return
    with pytest.raises(lynxkv.StoreError) as caught:
        lynxkv.encode(random_kv(), url)
    assert "disk is full" in str(caught.value.hint)
    assert not (tmp_path / "a.lynx" / "anchor.safetensors").exists()
    assert not list(tmp_path.rglob(".*"))


def test_an_unwritable_target_is_refused_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(lynxkv.StoreError):
        lynxkv.encode(random_kv(), str(tmp_path / "file" / "a.lynx"))


def test_of_many_writers_one_wins(tmp_path: Path) -> None:
    url = str(tmp_path / "a.lynx")

    def write(seed: int) -> str | None:
        try:
            return lynxkv.encode(random_kv(layers=1, seed=seed), url).cache_id
        except lynxkv.CacheExistsError:
            return None

    with ThreadPoolExecutor(8) as pool:
        winners = [cache_id for cache_id in pool.map(write, range(8)) if cache_id]
    assert len(winners) == 1
    assert lynxkv.check(url).cache_id == winners[0]


def test_any_fsspec_url_will_do() -> None:
    fs = fsspec.filesystem("memory")
    try:
        report = lynxkv.encode(random_kv(), "memory://caches/a.lynx")
        assert lynxkv.check("memory://caches/a.lynx").cache_id == report.cache_id
        with pytest.raises(lynxkv.CacheExistsError):
            lynxkv.encode(random_kv(), "memory://caches/a.lynx")
    finally:
        fs.rm("/caches", recursive=True)


def test_a_missing_cache_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(lynxkv.CacheNotFoundError):
        lynxkv.open(str(tmp_path / "absent.lynx"))
    with pytest.raises(FileNotFoundError):
        lynxkv.open(str(tmp_path / "absent.lynx"))


def test_a_server_that_ignores_ranges_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = str(tmp_path / "a.lynx")
    lynxkv.encode(random_kv(), url)
    store = Store(url)
    whole = store.fs.cat_file(store.path_of("anchor.safetensors"))

    def ignores_range(path: str, **options: Any) -> bytes:
        return bytes(whole)

    monkeypatch.setattr(store.fs, "cat_file", ignores_range)
    with pytest.raises(lynxkv.FetchError, match="asked for 10 bytes"):
        store.read("anchor.safetensors", 0, 10)


@pytest.mark.parametrize(
    ("text", "bit_per_s", "rtt_s"),
    [("200mbit", 2e8, 0), ("1Gbit/20ms", 1e9, 0.02), ("56kbit", 56e3, 0), ("2.5gbit/0.5ms", 2.5e9, 0.0005)],
)
def test_links_are_read(text: str, bit_per_s: float, rtt_s: float) -> None:
    link = Link.parse(text)
    assert (link.bit_per_s, link.rtt_s) == (bit_per_s, rtt_s)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "200",
        "mbit",
        "200mb",
        "0mbit",
        "-1mbit",
        "1mbit/20",
        "1mbit/20s",
        "0.0000000001kbit",
        "1mbit/99999999999999ms",
    ],
)
def test_other_links_are_refused(text: str) -> None:
    with pytest.raises(lynxkv.InputError):
        Link.parse(text)


def test_a_link_is_shared_by_all_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 100.0
    waits: list[float] = []
    monkeypatch.setattr(time, "monotonic", lambda: clock)

    class Recorder(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waits.append(timeout or 0)
            return False

    link = Link(bit_per_s=8e6, rtt_s=0.5)
    for _ in range(3):
        link.transfer(1_000_000, Recorder())
    assert waits == pytest.approx([1.5, 2.5, 3.5])
