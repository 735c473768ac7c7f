"""What reaches a decoder has been checked; what fails is retried once, then told; closing never hangs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import lynxkv
from lynxkv.fetch import CacheReader, SegmentStream
from lynxkv.store import Link, Store
from lynxkv.testing.kv import random_kv


@pytest.fixture
def url(tmp_path: Path) -> str:
    url = str(tmp_path / "a.lynx")
    lynxkv.encode(random_kv(layers=3, tokens=400), url)
    return url


@pytest.fixture
def small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lynxkv.fetch.RANGE_BYTES", 4096)


Fault = Callable[[str, int, int, bytes], bytes]


def inject(monkeypatch: pytest.MonkeyPatch, fault: Fault) -> list[tuple[str, int, int]]:
    """Let every read pass through `fault`; returns the log of reads."""
    stock = Store.read
    log: list[tuple[str, int, int]] = []
    lock = threading.Lock()

    def read(self: Store, name: str, start: int, stop: int) -> bytes:
        with lock:
            log.append((name, start, stop))
        return fault(name, start, stop, stock(self, name, start, stop))

    monkeypatch.setattr(Store, "read", read)
    return log


def test_segments_come_in_file_order_and_cover_both_shards(url: str, small_ranges: None) -> None:
    with lynxkv.open(url) as reader:
        for stream in (reader.stream_anchor(), reader.start_residual()):
            offsets = [payload.segment.offset for payload in stream]
            assert offsets == sorted(offsets)
            assert stream.done
            assert stream.bytes_in_flight == 0
            assert stream.bytes_done > 0
        names = [segment.plan.name for segment in reader.read_residual_head().segments]
        assert names == [f"layer.{i}.{t}.residual" for t in "kv" for i in range(3)]


def test_opening_reads_the_header_only(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    log = inject(monkeypatch, lambda name, start, stop, data: data)
    with lynxkv.open(url):
        assert log == [("anchor.safetensors", 0, min(128 << 10, log[0][2]))]


def test_ready_never_blocks(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()

    def wait(name: str, start: int, stop: int, data: bytes) -> bytes:
        if name.startswith("residual"):
            gate.wait(10)
        return data

    inject(monkeypatch, wait)
    with lynxkv.open(url) as reader:
        stream = reader.start_residual()
        assert stream.ready() == []
        assert not stream.done
        gate.set()
        assert len(list(stream)) == 6
        assert stream.ready() == []


def test_waiting_gives_the_next_segments_until_there_are_none(url: str, small_ranges: None) -> None:
    with lynxkv.open(url) as reader:
        stream = reader.start_residual()
        names = []
        while payloads := stream.wait():
            names += [payload.segment.plan.name for payload in payloads]
        assert stream.done
        assert names == [item.plan.name for item in reader.read_residual_head().segments]


def test_one_damaged_answer_is_read_again(url: str, small_ranges: None, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[tuple[str, int]] = set()

    def damage_once(name: str, start: int, stop: int, data: bytes) -> bytes:
        if start > 0 and (name, start) not in seen:
            seen.add((name, start))
            return data[:-1] if start % 128 else bytes(len(data))
        return data

    log = inject(monkeypatch, damage_once)
    undamaged = lynxkv.load(url)
    assert seen
    assert len(log) > len(seen)
    assert undamaged.tokens == 400


def test_lasting_damage_is_told(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inject(monkeypatch, lambda name, start, stop, data: bytes(len(data)) if name.startswith("res") and start else data)
    with pytest.raises(lynxkv.ChecksumError, match=r"layer\.0\.k\.residual"):
        lynxkv.load(url)
    assert lynxkv.load(url, precision="anchor").tokens == 400


@pytest.mark.parametrize("failures", [1, 2, 3])
def test_failed_reads_are_retried(url: str, failures: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lynxkv.fetch.time.sleep", lambda seconds: None)
    left = failures

    def fail(name: str, start: int, stop: int, data: bytes) -> bytes:
        nonlocal left
        if start and left:
            left -= 1
            raise lynxkv.FetchError("injected")
        return data

    inject(monkeypatch, fail)
    if failures < 3:
        assert lynxkv.load(url, precision="anchor").tokens == 400
    else:
        with pytest.raises(lynxkv.FetchError, match="injected"):
            lynxkv.load(url, precision="anchor")


def test_a_missing_residual_is_named(url: str) -> None:
    next(Path(url).glob("residual-*")).unlink()
    with pytest.raises(lynxkv.CacheNotFoundError, match="Residual"):
        lynxkv.load(url)
    assert lynxkv.load(url, precision="anchor").tokens == 400


def test_the_residual_of_another_encode_is_refused(url: str, tmp_path: Path) -> None:
    other = str(tmp_path / "b.lynx")
    lynxkv.encode(random_kv(layers=3, tokens=400, seed=9), other)
    mine = next(Path(url).glob("residual-*"))
    mine.write_bytes(next(Path(other).glob("residual-*")).read_bytes())
    for read in (lynxkv.load, lynxkv.check, lynxkv.inspect):
        with pytest.raises((lynxkv.BindingError, lynxkv.TruncatedError)):
            read(url)


def test_whole_caches_have_no_residual(tmp_path: Path) -> None:
    url = str(tmp_path / "a.lynx")
    lynxkv.encode(random_kv(), url, codec="int8")
    with lynxkv.open(url) as reader:
        assert reader.bytes_residual == 0
        with pytest.raises(lynxkv.BindingError):
            reader.start_residual()


def test_closing_ends_a_slow_read_at_once(url: str) -> None:
    before = threading.active_count()
    with lynxkv.open(url, link=Link(bit_per_s=8e9)) as reader:
        reader.store.link = Link(bit_per_s=8.0)  # a byte a second from here on
        stream: SegmentStream = reader.start_residual()
        assert stream.ready() == []
    reader._pool.shutdown(wait=True)
    assert threading.active_count() == before


def test_a_closed_reader_says_so(url: str, small_ranges: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lynxkv.fetch.WINDOW_BYTES", 10_000)
    with lynxkv.open(Path(url)) as reader:
        stream = reader.stream_anchor()
        assert stream.wait()
    for use in (
        lambda: list(stream),
        reader.stream_anchor,
        reader.start_residual,
        reader.token_ids,
        reader.read_residual_head,
        lambda: reader.read("anchor.safetensors", 0, 8),
    ):
        with pytest.raises(lynxkv.StoreError, match="the reader is closed"):
            use()


def test_in_flight_bytes_are_bounded(url: str, small_ranges: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lynxkv.fetch.WINDOW_BYTES", 10_000)
    with lynxkv.open(url) as reader:
        stream = reader.stream_anchor()
        largest = 0
        for _ in stream:
            largest = max(largest, stream.bytes_in_flight)
        biggest_segment = max(segment.stored_bytes for segment in reader.anchor_head.segments)
        assert largest <= 10_000 + max(4096, biggest_segment)


def test_readers_are_independent(url: str) -> None:
    readers = [CacheReader(url) for _ in range(4)]
    streams = [reader.stream_anchor() for reader in readers]
    assert len({sum(payload.raw.size for payload in stream) for stream in streams}) == 1
    for reader in readers:
        reader.close()
