"""Caches on a real S3 server: the same bits through each transport, one winner, and errors that say what is wrong."""

from __future__ import annotations

import time
import uuid
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import fsspec
import pytest

import lynxkv
from lynxkv.choices import TransportName
from lynxkv.fetch import FetchOptions
from lynxkv.fetch.reader import CacheReader
from lynxkv.store import Store
from lynxkv.store.marks import ANCHOR_TOS, RESIDUAL_TOS, marked_sockets
from lynxkv.store.transport import S3Transport, transport_for
from lynxkv.store.uploads import Upload, unfinished
from lynxkv.testing.kv import random_kv

TRANSPORTS: tuple[TransportName, ...] = ("fsspec", "obstore")


@pytest.fixture
def url(s3: str) -> str:
    return f"{s3}/{uuid.uuid4().hex}.lynx"


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_each_transport_brings_the_same_bits(transport: TransportName, url: str) -> None:
    pytest.importorskip(transport)
    kv = random_kv(layers=3, tokens=700)
    lynxkv.encode(kv, "memory://same.lynx", overwrite=True)
    lynxkv.encode(kv, url)
    plain = lynxkv.load("memory://same.lynx")
    loaded = lynxkv.load(url, options=FetchOptions(transport=transport))
    for mine, right in zip(loaded.layers, plain.layers, strict=True):
        assert all(mine.tensors[name].equal(tensor) for name, tensor in right.tensors.items())
    assert lynxkv.check(url).orphans == ()
    assert lynxkv.inspect(url).tokens.count == 700


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_ranges_at_and_behind_the_end(transport: TransportName, url: str) -> None:
    pytest.importorskip(transport)
    lynxkv.encode(random_kv(), url)
    with CacheReader(url, options=FetchOptions(transport=transport), header_only=True) as reader:
        size = reader.bytes_anchor
        assert reader.size("anchor.safetensors") == size
        assert len(reader.read("anchor.safetensors", size - 10, size + 10)) == 10
        assert reader.read("anchor.safetensors", size, size + 10) == b""
        assert reader.read("anchor.safetensors", size + 100, size + 200) == b""
        with pytest.raises(lynxkv.CacheNotFoundError):
            reader.read("absent", 0, 10)
        with pytest.raises(lynxkv.CacheNotFoundError):
            reader.size("absent")


def test_what_is_there_is_not_overwritten_unasked(url: str) -> None:
    lynxkv.encode(random_kv(seed=1), url)
    with pytest.raises(lynxkv.CacheExistsError):
        lynxkv.encode(random_kv(seed=2), url)
    lynxkv.encode(random_kv(seed=2), url, overwrite=True)
    assert len(lynxkv.check(url).orphans) == 1


def test_of_many_writers_one_wins(url: str) -> None:
    def write(seed: int) -> str | None:
        try:
            return lynxkv.encode(random_kv(layers=1, seed=seed), url).cache_id
        except lynxkv.CacheExistsError:
            return None

    with ThreadPoolExecutor(6) as pool:
        winners = [cache_id for cache_id in pool.map(write, range(6)) if cache_id]
    assert len(winners) == 1
    report = lynxkv.check(url)
    assert report.cache_id == winners[0]
    assert not report.orphans


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """S3 refuses them, but only when they are to become an object."""
    monkeypatch.setattr("lynxkv.store.uploads.PART_BYTES", 10_000)
    monkeypatch.setattr("lynxkv.store.uploads.SINGLE_BYTES", 0)


def test_parts_are_sent_while_others_are_quantised(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lynxkv.store.uploads.PART_BYTES", 5 << 20)
    store = Store(url)
    started: list[int] = []

    def look(what: str, done: int, count: int) -> None:
        started.append(len(list(unfinished(store.fs, store.path))) if done < count else 0)

    kv = random_kv(layers=6, heads=8, tokens=1000, head_dim=128)
    report = lynxkv.encode(kv, url, codec="raw", progress=look)
    assert report.bytes_anchor > 16 << 20
    assert max(started) == 1
    assert lynxkv.check(url).cache_id == report.cache_id
    assert not list(unfinished(store.fs, store.path))
    with pytest.raises(lynxkv.CacheExistsError):
        lynxkv.encode(kv, url)


@pytest.mark.usefixtures("small_parts")
def test_an_upload_that_fails_leaves_nothing(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(url)

    def interrupt(what: str, done: int, count: int) -> None:
        if done == 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lynxkv.encode(random_kv(layers=6, tokens=500), url, progress=interrupt)
    stock, calls = type(store.fs)._call_s3, 0

    async def forbidden(self: Any, method: str, *settings: Any, **what: Any) -> Any:
        nonlocal calls
        calls += method == "upload_part"
        if method == "upload_part" and calls > 3:
            raise PermissionError("Access Denied")
        return await stock(self, method, *settings, **what)

    monkeypatch.setattr(type(store.fs), "_call_s3", forbidden)
    with pytest.raises(lynxkv.StoreError, match="Access Denied"):
        lynxkv.encode(random_kv(layers=6, tokens=500), url)
    assert not list(unfinished(store.fs, store.path))
    assert not store.try_objects()


@pytest.mark.usefixtures("small_parts")
def test_pruning_ends_uploads_of_killed_writers(url: str, s3: str) -> None:
    store = Store(url)
    parts = [bytes(8_000)] * 9
    for name in ("anchor.safetensors", "residual-0123456789abcdef.safetensors", "notes.txt"):
        upload = Upload(store.fs, store.path_of(name))
        for part in parts:
            upload.write(part)
        wait(upload._parts)
    lynxkv.encode(random_kv(), url)  # is not in the way
    assert not lynxkv.prune(url).removed
    preview = lynxkv.prune(url, grace_s=0, now_s=lambda: time.time() + 60, dry_run=True)
    report = lynxkv.prune(url, grace_s=0, now_s=lambda: time.time() + 60)
    assert report.removed == preview.removed
    assert {(item.reason, *item.objects) for item in report.removed} == {
        ("upload never completed", "anchor.safetensors"),
        ("upload never completed", "residual-0123456789abcdef.safetensors"),
    }
    assert all(item.url == url and item.bytes >= 40_000 for item in report.removed)
    (left,) = unfinished(store.fs, store.path)
    assert left.path.endswith("notes.txt")
    left.abort(store.fs)
    assert lynxkv.check(url).tokens == 70


@pytest.mark.slow
def test_large_objects_are_created_on_condition_too(url: str) -> None:
    """In several parts, the last of them completed under the condition."""
    store = Store(url)
    parts = [bytes(30 << 20)] * 2
    store._writer.put("big", parts, overwrite=False)
    assert store.size("big") == 60 << 20
    with pytest.raises(FileExistsError):
        store._writer.put("big", parts, overwrite=False)
    assert not list(unfinished(store.fs, store.path))
    store._writer.remove("big")
    assert not store.exists("big")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_copies_on_disk_follow_the_object(transport: TransportName, url: str, tmp_path: Path) -> None:
    pytest.importorskip(transport)
    options = FetchOptions(transport=transport, cache_dir=tmp_path / "copies")
    for seed in (1, 2):
        kv = random_kv(layers=3, tokens=700, seed=seed)
        lynxkv.encode(kv, url, overwrite=True)
        lynxkv.encode(kv, "memory://same.lynx", overwrite=True)
        right = lynxkv.load("memory://same.lynx")
        for _ in range(2):
            loaded = lynxkv.load(url, options=options)
            for mine, other in zip(loaded.layers, right.layers, strict=True):
                assert all(mine.tensors[name].equal(tensor) for name, tensor in other.tensors.items())
    assert len(list((tmp_path / "copies").glob("*.shard"))) == 3


def test_a_lost_answer_is_no_lost_race(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store_writer = type(Store(url)._writer)
    stock = store_writer.put

    def twice(self: Any, name: str, buffers: Any, *, overwrite: bool) -> None:
        stock(self, name, buffers, overwrite=overwrite)
        if name.startswith("anchor"):
            stock(self, name, buffers, overwrite=overwrite)

    monkeypatch.setattr(store_writer, "put", twice)
    report = lynxkv.encode(random_kv(), url)
    assert lynxkv.check(url).cache_id == report.cache_id


def test_a_missing_cache_is_not_found(url: str) -> None:
    with pytest.raises(lynxkv.CacheNotFoundError, match=r"there is no anchor\.safetensors"):
        lynxkv.open(url)


def misconfigured(s3: str, what: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A URL, after one thing has been made wrong."""
    import s3fs

    if what == "bucket":
        return "s3://no-such-bucket-here/a.lynx"
    name, value = {
        "secret": ("AWS_SECRET_ACCESS_KEY", "wrong-secret"),
        "key": ("AWS_ACCESS_KEY_ID", "AKNOBODY"),
        "endpoint": ("AWS_ENDPOINT_URL", "http://127.0.0.1:9"),
        "host": ("AWS_ENDPOINT_URL", "http://no-such-host.invalid"),
    }[what]
    monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    return f"{s3}/a.lynx"


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    ("what", "hint"),
    [
        ("bucket", "bucket"),
        ("secret", "credentials"),
        ("key", "credentials"),
        ("endpoint", "AWS_ENDPOINT_URL"),
        ("host", "AWS_ENDPOINT_URL"),
    ],
)
def test_reading_says_what_is_misconfigured(
    transport: TransportName, what: str, hint: str, s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(transport)
    url = misconfigured(s3, what, monkeypatch)
    with pytest.raises(lynxkv.FetchError) as caught:
        lynxkv.open(url, options=FetchOptions(transport=transport, attempts=2))
    assert url in str(caught.value)
    assert hint in str(caught.value.hint), (str(caught.value), caught.value.hint)


@pytest.mark.parametrize(
    ("what", "hint"), [("secret", "credentials"), ("key", "credentials"), ("host", "AWS_ENDPOINT_URL")]
)
def test_writing_says_so_before_any_work(what: str, hint: str, s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    url = misconfigured(s3, what, monkeypatch)
    with pytest.raises(lynxkv.StoreError) as caught:
        Store(url).check_target(overwrite=False)
    assert hint in str(caught.value.hint), (str(caught.value), caught.value.hint)


def test_probing_a_target_leaves_nothing(url: str) -> None:
    store = Store(url)
    store.check_target(overwrite=False)
    assert not store.try_objects()
    assert not list(unfinished(store.fs, store.path))


def test_packets_can_be_marked(url: str) -> None:
    kv = random_kv(layers=3, tokens=700)
    lynxkv.encode(kv, url)
    with CacheReader(url, options=FetchOptions(dscp=True)) as reader:
        (span,) = reader.spans
        for ranges, tos in ((span._ranges, ANCHOR_TOS), (span._residual_ranges, RESIDUAL_TOS)):
            assert isinstance(ranges.transport, S3Transport)  # obstore has no way to
            assert ranges.transport.fs.config_kwargs["connector_args"] == {"socket_factory": marked_sockets(tos)}
        assert list(reader.stream_anchor())
        assert list(reader.start_residual())


def test_obstore_is_the_default_where_it_does_what_s3fs_would(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("obstore")
    from lynxkv.store.obstore_transport import ObstoreTransport

    monkeypatch.delenv("AWS_CA_BUNDLE", raising=False)
    with ThreadPoolExecutor(1) as workers:
        assert isinstance(transport_for(Store(url), "auto", workers), ObstoreTransport)
        monkeypatch.setenv("AWS_CA_BUNDLE", "/somewhere/ca.pem")
        assert isinstance(transport_for(Store(url), "auto", workers), S3Transport)
        monkeypatch.delenv("AWS_CA_BUNDLE")
        monkeypatch.setitem(fsspec.config.conf, "s3", {"requester_pays": True})
        assert isinstance(transport_for(Store(url), "auto", workers), S3Transport)
