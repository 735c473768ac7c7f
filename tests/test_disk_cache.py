"""Copies of remote shards on disk: right bits always, no request that is not needed, and a bound that holds."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import fsspec
import pytest

import lynxkv
from lynxkv.fetch import CacheReader, FetchOptions
from lynxkv.fetch.disk_cache import DiskCache
from lynxkv.store.files import SharedFile
from lynxkv.testing.filesystem import SimulatedFileSystem, filesystem_of, simulated
from lynxkv.testing.kv import random_kv

if TYPE_CHECKING:
    from tests.conftest import Lynx

FIRST = (0, 128 << 10)


@pytest.fixture
def far() -> Iterator[str]:
    """A store on another machine, as far as lynxkv can tell."""
    with simulated("memory://far") as url:
        yield url
    fs = fsspec.filesystem("memory")
    if fs.exists("/far"):
        fs.rm("/far", recursive=True)


@pytest.fixture
def server(far: str) -> SimulatedFileSystem:
    return filesystem_of(far)


@pytest.fixture(autouse=True)
def small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lynxkv.fetch.options.RANGE_BYTES", 20_000)
    monkeypatch.setattr("lynxkv.fetch.options.LAST_RANGE_BYTES", 10_000)
    monkeypatch.setattr("lynxkv.fetch.options.FRONT_EDGES", (0, 128 << 10, 512 << 10))


@pytest.fixture
def url(far: str) -> str:
    lynxkv.encode(random_kv(layers=6, tokens=1200), f"{far}/a.lynx", exact=True)
    return f"{far}/a.lynx"


@pytest.fixture
def options(tmp_path: Path) -> FetchOptions:
    return FetchOptions(cache_dir=tmp_path / "copies")


def asked(server: SimulatedFileSystem, work: Callable[[], object]) -> list[tuple[str, int | None, int | None]]:
    """The reads that `work` makes: the kind of shard and the range."""
    before = len(server.reads)
    work()
    return [(path.rsplit("/", 1)[-1][:6], start, stop) for path, start, stop in server.reads[before:]]


def assert_equal(one: lynxkv.KV, other: lynxkv.KV) -> None:
    for mine, right in zip(one.layers, other.layers, strict=True):
        assert all(mine.tensors[name].equal(tensor) for name, tensor in right.tensors.items())
    assert one.token_ids == other.token_ids


def copies(options: FetchOptions) -> list[Path]:
    return sorted(Path(str(options.cache_dir)).glob("*.shard"))


def test_the_second_load_costs_one_request(url: str, options: FetchOptions, server: SimulatedFileSystem) -> None:
    right = lynxkv.load(url)
    assert_equal(lynxkv.load(url, options=options), right)
    assert len(copies(options)) == 2
    server.inner.rm_file(next(path for path in server.inner.find("/far") if "residual" in path))
    again: list[lynxkv.KV] = []
    assert asked(server, lambda: again.append(lynxkv.load(url, options=options))) == [("anchor", *FIRST)]
    assert_equal(again[0], right)


def test_what_was_fetched_of_a_load_that_failed_is_not_lost(
    far: str, options: FetchOptions, server: SimulatedFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"{far}/long.lynx"
    lynxkv.encode(random_kv(layers=6, tokens=3000), url, exact=True)
    stock = SimulatedFileSystem.cat_file

    def half(self: SimulatedFileSystem, path: str, start: int, end: int) -> bytes:
        if end > 700_000:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return stock(self, path, start, end)

    with monkeypatch.context() as patch:
        patch.setattr(SimulatedFileSystem, "cat_file", half)
        with pytest.raises(lynxkv.FetchError):
            lynxkv.load(url, precision="exact", options=options)
    rest = asked(server, lambda: lynxkv.load(url, precision="exact", options=options))
    assert rest[0] == ("anchor", *FIRST)
    assert len(rest) > 1
    assert not [item for item in rest if item[0] == "residu" and (item[1] or 0) < 600_000], rest
    assert asked(server, lambda: lynxkv.load(url, precision="exact", options=options)) == [("anchor", *FIRST)]


def test_each_precision_fetches_what_is_missing(url: str, options: FetchOptions, server: SimulatedFileSystem) -> None:
    lynxkv.load(url, precision="anchor", options=options)
    anchor = copies(options)
    full = asked(server, lambda: lynxkv.load(url, options=options))
    assert {name for name, _, _ in full} == {"anchor", "residu"}
    assert [item for item in full if item[0] == "anchor"] == [("anchor", *FIRST)]
    sizes = {path: path.stat().st_size for path in copies(options) if path not in anchor}
    exact = asked(server, lambda: lynxkv.load(url, precision="exact", options=options))
    assert {name for name, _, _ in exact} == {"anchor", "residu"}
    assert not set(full[1:]) & set(exact)
    assert all(path.stat().st_size > size for path, size in sizes.items())  # room for exact values only when wanted
    assert asked(server, lambda: lynxkv.load(url, precision="exact", options=options)) == [("anchor", *FIRST)]


def test_an_object_that_was_replaced_is_noticed(url: str, options: FetchOptions) -> None:
    lynxkv.load(url, options=options)
    before = copies(options)
    lynxkv.encode(random_kv(layers=6, tokens=1200, seed=7), url, overwrite=True)
    assert_equal(lynxkv.load(url, options=options), lynxkv.load(url))
    gone = [path for path in before if not path.exists()]
    assert len(gone) == 1  # the Anchor's; the Residual's, whose name is another now, is dropped when room is needed


def test_the_same_content_at_another_url_is_asked_for(url: str, far: str, options: FetchOptions) -> None:
    """Else whoever knows the header of a cache could have the copy that somebody else has fetched."""
    lynxkv.load(url, options=options)
    lynxkv.encode(random_kv(layers=6, tokens=1200), f"{far}/b.lynx", exact=True)
    lynxkv.load(f"{far}/b.lynx", options=options)
    assert len(copies(options)) == 4


def garbage(data: bytes) -> bytes:
    return bytes(len(data))


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def flipped(data: bytes) -> bytes:
    return data[:30_000] + bytes(byte ^ 255 for byte in data[30_000:])


def other_count(data: bytes) -> bytes:
    return data[:8] + (5).to_bytes(8, "little") + data[16:]


def all_here(data: bytes) -> bytes:
    count = int.from_bytes(data[8:16], "little")
    return data[:24] + b"\1" * count + bytes(len(data) - 24 - count)


@pytest.mark.parametrize("damage", [garbage, cut, flipped, other_count, all_here, lambda data: b""])
def test_a_damaged_copy_is_fetched_anew(
    damage: Callable[[bytes], bytes], url: str, options: FetchOptions, server: SimulatedFileSystem
) -> None:
    right = lynxkv.load(url)
    lynxkv.load(url, options=options)
    for path in copies(options):
        path.write_bytes(damage(path.read_bytes()))
    assert_equal(lynxkv.load(url, options=options), right)
    assert asked(server, lambda: lynxkv.load(url, options=options)) == [("anchor", *FIRST)]


def test_the_least_lately_used_is_dropped(far: str, tmp_path: Path, server: SimulatedFileSystem) -> None:
    urls = [f"{far}/{name}.lynx" for name in "abc"]
    for seed, url in enumerate(urls):
        lynxkv.encode(random_kv(layers=2, tokens=600, seed=seed), url)
    with lynxkv.open(urls[0]) as reader:
        size = reader.bytes_anchor + reader.bytes_residual
    options = FetchOptions(cache_dir=tmp_path / "copies", cache_max_bytes=int(2.5 * size))
    for at, url in enumerate((urls[0], urls[1], urls[0], urls[2])):
        lynxkv.load(url, options=options)
        for path in copies(options):  # clocks of file systems are coarse
            state = path.stat()
            os.utime(path, (state.st_atime, state.st_mtime + at - 100 if state.st_mtime > 1e9 else 0))
        assert sum(path.stat().st_size for path in copies(options)) <= 2.5 * size
    assert asked(server, lambda: lynxkv.load(urls[0], options=options)) == [("anchor", *FIRST)]
    assert len(asked(server, lambda: lynxkv.load(urls[1], options=options))) > 1


def test_what_is_larger_than_the_bound_is_not_kept(url: str, tmp_path: Path) -> None:
    options = FetchOptions(cache_dir=tmp_path / "copies", cache_max_bytes=10_000)
    assert lynxkv.load(url, options=options).tokens == 1200
    assert not copies(options)


def test_copies_may_go_while_they_are_read(url: str, options: FetchOptions, server: SimulatedFileSystem) -> None:
    right = lynxkv.load(url)
    lynxkv.load(url, options=options)
    with CacheReader(url, options=options) as reader:
        residual = reader.start_residual()
        for path in copies(options):
            path.unlink()
        before = len(server.reads)
        assert len(list(reader.stream_anchor())) + len(list(residual)) > 20
        assert len(server.reads) == before
    assert_equal(lynxkv.load(url, options=options), right)


def test_a_full_disk_costs_copies_and_nothing_else(
    url: str, options: FetchOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = lynxkv.load(url)
    calls = 0
    stock = SharedFile.write

    def full(self: SharedFile, start: int, data: bytes) -> None:
        nonlocal calls
        calls += 1
        if calls > 5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        stock(self, start, data)

    with monkeypatch.context() as patch:
        patch.setattr(SharedFile, "write", full)
        assert_equal(lynxkv.load(url, options=options), right)
    assert calls > 5
    assert_equal(lynxkv.load(url, options=options), right)


def test_a_folder_that_cannot_be_used_is_told(url: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(lynxkv.StoreError, match="cannot use the cache folder"):
        lynxkv.load(url, options=FetchOptions(cache_dir=tmp_path / "file"))
    with pytest.raises(lynxkv.InputError, match="cache_max_bytes"):
        FetchOptions(cache_max_bytes=0)


def test_files_of_this_machine_are_not_copied(tmp_path: Path, options: FetchOptions) -> None:
    lynxkv.encode(random_kv(), tmp_path / "a.lynx")
    lynxkv.load(tmp_path / "a.lynx", options=options)
    assert not copies(options)


def test_checking_reads_the_store_and_fills_copies(
    url: str, options: FetchOptions, server: SimulatedFileSystem
) -> None:
    lynxkv.load(url, options=options)
    first = asked(server, lambda: lynxkv.check(url, options=options))
    assert len(first) == len(asked(server, lambda: lynxkv.check(url, options=options)))
    assert {name for name, _, _ in first} == {"anchor", "residu"}
    assert asked(server, lambda: lynxkv.load(url, precision="exact", options=options)) == [("anchor", *FIRST)]


def test_a_stopped_process_that_holds_the_lock_costs_copies_only(
    url: str, options: FetchOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lynxkv.fetch.disk_cache.LOCK_S", 0.02)
    other = DiskCache(tmp_path / "copies", 1 << 30)
    with other._alone() as alone:
        assert alone
        assert lynxkv.load(url, options=options).tokens == 1200
    assert not copies(options)
    other.close()


def test_commands_take_a_folder(lynx: Lynx, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kv, folder = tmp_path / "kv.safetensors", tmp_path / "copies"
    assert lynx("export", url, "-o", kv, "--cache-dir", folder, "--cache-max-bytes", "10KB").code == 0
    assert not list(folder.glob("*.shard"))
    monkeypatch.setenv("LYNXKV_CACHE_DIR", str(folder))
    assert lynx("check", url).code == 0
    assert len(list(folder.glob("*.shard"))) == 2
    assert lynx("check", url, "--cache-max-bytes", "much").code == 2
    assert lynx("export", url, "-o", tmp_path / "x.safetensors", "--cache-dir", kv).code == 1


PROCESS = """
import random, sys
from lynxkv.fetch import CacheReader, FetchOptions
from lynxkv.fetch import options
from lynxkv.store.transport import BlockingTransport, LocalTransport

LocalTransport.is_remote = True
options.RANGE_BYTES = 20_000
root, folder, limit, seed, rounds = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
chance = random.Random(seed)
print("ready", flush=True)
for _ in range(rounds):
    url = f"{root}/{chance.choice('abc')}.lynx"
    with CacheReader(url, options=FetchOptions(cache_dir=folder, cache_max_bytes=limit)) as reader:
        anchor = list(reader.stream_anchor())
        residual = list(reader.start_residual(exact=True))
        assert all(item.raw.nbytes == item.segment.raw_bytes for item in anchor + residual)
print("done", flush=True)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
def test_processes_share_a_folder_and_may_be_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four at once with room for half of what they read, so that all drop what others are using; two are killed."""
    root, folder = tmp_path / "caches", tmp_path / "copies"
    for seed, name in enumerate("abc"):
        lynxkv.encode(random_kv(layers=3, tokens=800, seed=seed), root / f"{name}.lynx", exact=True)
    limit = sum(path.stat().st_size for path in root.rglob("*.safetensors")) // 2

    def start(seed: int, rounds: int) -> subprocess.Popen[str]:
        arguments = [root, folder, limit, seed, rounds]
        return subprocess.Popen(
            [sys.executable, "-c", PROCESS, *map(str, arguments)], stdout=subprocess.PIPE, text=True
        )

    processes = [start(seed, 30 if seed < 2 else 10_000) for seed in range(4)]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes[:2]:
        assert process.wait(120) == 0
    for process in processes[2:]:
        assert process.poll() is None
        process.kill()
        process.wait()
    assert 0 < sum(path.stat().st_size for path in folder.glob("*.shard")) <= limit
    monkeypatch.setattr("lynxkv.store.transport.LocalTransport.is_remote", True)
    for name in "abc":
        options = FetchOptions(cache_dir=folder, cache_max_bytes=limit)
        right = lynxkv.load(root / f"{name}.lynx", precision="exact")
        assert_equal(lynxkv.load(root / f"{name}.lynx", precision="exact", options=options), right)
