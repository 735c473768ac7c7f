"""Publishing is atomic, errors are typed, and links are simulated."""

from __future__ import annotations

import errno
import os
import stat
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.registry import _registry

import lynxkv
from lynxkv.store import Link, Store
from lynxkv.store.writers import LocalWriter, _claimed
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


# A shard's file is flushed before it gets its name, then its folder and the folder above.
FLUSHES = ("residual", "folder", "above", "anchor", "folder", "above")


@pytest.mark.parametrize("fail_at", range(len(FLUSHES)))
def test_a_full_disk_leaves_a_whole_cache_or_nothing(
    fail_at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0
    stock = os.fsync

    def full(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls > fail_at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        stock(descriptor)

    url = tmp_path / "a.lynx"
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(lynxkv.StoreError) as caught:
            lynxkv.encode(random_kv(), url)
    assert "disk is full" in str(caught.value.hint)
    if "anchor" in FLUSHES[:fail_at]:
        assert not lynxkv.check(url).orphans
    else:
        assert not url.exists()


def test_folders_that_cannot_be_flushed_do_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = os.fsync

    def files_only(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        stock(descriptor)

    monkeypatch.setattr(os, "fsync", files_only)
    lynxkv.encode(random_kv(), tmp_path / "a.lynx")
    lynxkv.check(tmp_path / "a.lynx")


def test_a_failed_replacement_leaves_the_old_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = tmp_path / "a.lynx"
    lynxkv.encode(random_kv(seed=1), url)
    before = sorted(path.name for path in url.iterdir())
    stock = LocalWriter.put

    def no_anchor(self: LocalWriter, name: str, buffers: Any, *, overwrite: bool) -> None:
        if name.startswith("anchor"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        stock(self, name, buffers, overwrite=overwrite)

    monkeypatch.setattr(LocalWriter, "put", no_anchor)
    for seed in (1, 2):  # of the same bytes, whose Residual the old cache needs, and of others
        with pytest.raises(lynxkv.StoreError):
            lynxkv.encode(random_kv(seed=seed), url, overwrite=True)
        assert sorted(path.name for path in url.iterdir()) == before
    lynxkv.check(url)


def test_a_residual_that_a_failing_twin_removed_is_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = tmp_path / "a.lynx"
    stock = LocalWriter.put

    def twin_fails(self: LocalWriter, name: str, buffers: Any, *, overwrite: bool) -> None:
        stock(self, name, buffers, overwrite=overwrite)
        if name.startswith("anchor"):
            next(url.glob("residual-*")).unlink()

    monkeypatch.setattr(LocalWriter, "put", twin_fails)
    lynxkv.encode(random_kv(), url)
    lynxkv.check(url)


@pytest.fixture
def no_hard_links(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refuse)


@pytest.mark.usefixtures("no_hard_links")
def test_without_hard_links_nothing_is_replaced_either(tmp_path: Path) -> None:
    url = tmp_path / "a.lynx"
    lynxkv.encode(random_kv(seed=1), url)
    writer = LocalWriter(url)
    before = (url / "anchor.safetensors").read_bytes()
    with pytest.raises(FileExistsError):
        writer.put("anchor.safetensors", [b"other"], overwrite=False)
    assert (url / "anchor.safetensors").read_bytes() == before
    assert not list(url.glob(".*"))


@pytest.mark.usefixtures("no_hard_links")
def test_a_claim_keeps_others_out_while_it_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lynxkv.store.writers.CLAIM_S", 0.02)
    final = tmp_path / "anchor.safetensors"
    writer = LocalWriter(tmp_path)
    with _claimed(final), pytest.raises(TimeoutError, match="another writer"):
        writer.put(final.name, [b"new"], overwrite=False)
    assert not list(tmp_path.iterdir())
    (tmp_path / ".anchor.safetensors.claim").touch()  # a killed writer's
    writer.put(final.name, [b"new"], overwrite=False)
    assert [path.name for path in tmp_path.iterdir()] == ["anchor.safetensors"]


@pytest.mark.usefixtures("no_hard_links")
def test_claims_are_held_one_at_a_time(tmp_path: Path) -> None:
    """Though each removes its claim's file when it is done, while others wait for it with the file open."""
    inside: list[int] = []
    most = 0

    def claim(number: int) -> None:
        nonlocal most
        with _claimed(tmp_path / "anchor.safetensors"):
            inside.append(number)
            most = max(most, len(inside))
            time.sleep(0)
            inside.remove(number)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(claim, range(200)))
    assert most == 1
    assert not list(tmp_path.iterdir())


def test_a_read_that_returns_less_than_there_is_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = tmp_path / "a.lynx"
    lynxkv.encode(random_kv(), url)
    stock, calls = os.pread, 0

    def some(descriptor: int, size: int, offset: int) -> bytes:
        nonlocal calls
        calls += 1
        return stock(descriptor, min(size, 100), offset)

    right = lynxkv.load(url)
    monkeypatch.setattr(os, "pread", some)
    loaded = lynxkv.load(url)
    assert calls > 20
    for mine, other in zip(loaded.layers, right.layers, strict=True):
        assert all(mine.tensors[name].equal(tensor) for name, tensor in other.tensors.items())


@pytest.mark.parametrize("inside", ["a.lynx", "more/a.lynx", "."])
def test_a_file_in_the_way_is_named_before_any_work(inside: str, tmp_path: Path) -> None:
    file = tmp_path / "file.lynx"
    file.write_text("in the way")
    url = file / inside if inside != "." else file
    with pytest.raises(lynxkv.StoreError, match=r"file\.lynx is a file") as caught:
        lynxkv.encode(random_kv(), url)
    assert "move file.lynx away" in str(caught.value.hint)
    with pytest.raises(lynxkv.CacheNotFoundError):
        lynxkv.open(url)
    assert file.read_text() == "in the way"


@pytest.mark.parametrize("links", [True, False])
def test_of_many_writers_one_wins(links: bool, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    if not links:
        request.getfixturevalue("no_hard_links")
    url = tmp_path / "a.lynx"

    def write(seed: int) -> str | None:
        try:
            return lynxkv.encode(random_kv(layers=1, seed=seed), url).cache_id
        except lynxkv.CacheExistsError:
            return None

    with ThreadPoolExecutor(8) as pool:
        winners = [cache_id for cache_id in pool.map(write, range(8)) if cache_id]
    assert len(winners) == 1
    report = lynxkv.check(url)
    assert report.cache_id == winners[0]
    assert not report.orphans
    assert len(list(url.iterdir())) == 2


def test_any_fsspec_url_will_do() -> None:
    fs = fsspec.filesystem("memory")
    try:
        report = lynxkv.encode(random_kv(), "memory://caches/a.lynx")
        assert lynxkv.check("memory://caches/a.lynx").cache_id == report.cache_id
        with pytest.raises(lynxkv.CacheExistsError):
            lynxkv.encode(random_kv(), "memory://caches/a.lynx")
    finally:
        fs.rm("/caches", recursive=True)


def test_where_files_can_be_seen_growing_they_are_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    fs = fsspec.filesystem("memory")
    stock, opened, moved = fs.open, [], []

    def open_(path: str, mode: str = "rb", **options: Any) -> Any:
        opened.append(path.rsplit("/", 1)[-1])
        return stock(path, mode, **options)

    def full(source: str, target: str) -> None:
        moved.append((source, target))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(fs, "open", open_)
    monkeypatch.setattr(fs, "mv", full)
    try:
        with pytest.raises(lynxkv.StoreError, match="No space"):
            lynxkv.encode(random_kv(), "memory://growing/a.lynx")
        assert moved
        assert all(name.startswith(".") for name in opened)
        assert not fs.find("/growing")
    finally:
        fs.rm("/growing", recursive=True)


def test_a_store_that_can_only_be_read_is_refused_before_any_work() -> None:
    pytest.importorskip("aiohttp")
    with pytest.raises(lynxkv.StoreError) as caught:
        Store("http://127.0.0.1:9/a.lynx").check_target(overwrite=False)
    assert "can only be read" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("url", "hint"),
    [
        ("nosuch://bucket/a.lynx", "s3://"),
        ("s4://bucket/a.lynx", "did you mean s3://"),
        ("htp://host/a.lynx", "http://"),
    ],
)
def test_known_schemes_are_named(url: str, hint: str) -> None:
    with pytest.raises(lynxkv.InputError) as caught:
        Store(url)
    assert hint in str(caught.value.hint)


@pytest.mark.parametrize(
    ("url", "package", "extra"),
    [("s3://bucket/a.lynx", "s3fs", "lynxkv[s3]"), ("https://host/a.lynx", "aiohttp", "lynxkv[http]")],
)
def test_a_missing_package_is_named(url: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scheme = url.partition("://")[0]
    monkeypatch.delitem(_registry, scheme, raising=False)
    for module in [name for name in sys.modules if name.partition(".")[0] == package or name.endswith("ions.http")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(lynxkv.InputError) as caught:
        Store(url)
    assert f"pip install '{extra}'" in str(caught.value.hint)


def test_a_missing_cache_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(lynxkv.CacheNotFoundError):
        lynxkv.open(str(tmp_path / "absent.lynx"))
    with pytest.raises(FileNotFoundError):
        lynxkv.open(str(tmp_path / "absent.lynx"))


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
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    link = Link(bit_per_s=8e6, rtt_s=0.5)
    assert [link.delay_s(1_000_000) for _ in range(3)] == pytest.approx([1.5, 2.5, 3.5])


def test_residuals_elsewhere_do_not_go_where_a_cache_could_be(tmp_path: Path) -> None:
    with pytest.raises(lynxkv.InputError, match="names a cache"):
        Store.of_residuals(tmp_path / "cold.lynx")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes here")
def test_a_pipe_in_the_place_of_a_shard_is_refused_at_once(tmp_path: Path) -> None:
    url = tmp_path / "cache.lynx"
    lynxkv.encode(random_kv(), url)
    anchor, residual = url / "anchor.safetensors", next(url.glob("residual-*"))
    for shard in (residual, anchor):
        shard.unlink()
        os.mkfifo(shard)
        with pytest.raises(lynxkv.FetchError, match="not a plain file"):
            lynxkv.check(url)


def test_names_and_links_that_cannot_be_are_errors_of_ours(tmp_path: Path) -> None:
    long = tmp_path / f"{'a' * 300}.lynx"
    with pytest.raises(lynxkv.StoreError, match="too long") as caught:
        lynxkv.encode(random_kv(), long)
    assert caught.value.hint == "check the path and what is there"
    with pytest.raises(lynxkv.CacheNotFoundError):
        lynxkv.load("memory://missing.lynx")
    for settings in ({"bit_per_s": 0}, {"bit_per_s": float("nan")}, {"bit_per_s": 1e6, "rtt_s": -1}):
        with pytest.raises(lynxkv.InputError, match="cannot be simulated"):
            Link(**settings)
