"""What reaches a decoder has been checked; what fails is tried again, then told; closing leaves nothing behind."""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from fsspec.asyn import get_loop

import lynxkv
from lynxkv.decoder import KVDestination, decode_into
from lynxkv.fetch import CacheReader, FetchOptions
from lynxkv.fetch.head import Front
from lynxkv.fetch.options import IN_FLIGHT_BYTES, IN_FLIGHT_S
from lynxkv.fetch.scheduler import Lane, Scheduler
from lynxkv.store import Link, Store
from lynxkv.store.transport import Answer, BlockingTransport, LocalTransport, Transport, transport_for
from lynxkv.testing.faults import FAULTS, Fault, FaultyTransport
from lynxkv.testing.kv import random_kv


@pytest.fixture
def url(tmp_path: Path) -> str:
    url = str(tmp_path / "a.lynx")
    lynxkv.encode(random_kv(layers=3, tokens=400), url)
    return url


@pytest.fixture
def small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lynxkv.fetch.options.RANGE_BYTES", 4096)
    monkeypatch.setattr("lynxkv.fetch.options.MAX_REQUEST_BYTES", 3000)
    monkeypatch.setattr("lynxkv.fetch.ranges.MAX_REQUEST_BYTES", 3000)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lynxkv.fetch.ranges.FIRST_PAUSE_S", 0.001)


@pytest.fixture
def inner(url: str) -> Iterator[Transport]:
    """What reads the cache, to be wrapped."""
    with ThreadPoolExecutor(4) as workers:
        yield LocalTransport(Store(url), workers)


@pytest.fixture
def faulty(inner: Transport) -> Callable[..., FaultyTransport]:
    def make(*faults: Fault, share: float = 1.0, **options: Any) -> FaultyTransport:
        return FaultyTransport(inner, share=share, faults=faults or FAULTS, **options)

    return make


def assert_equal(one: lynxkv.KV, other: lynxkv.KV) -> None:
    """Bit by bit."""
    for mine, right in zip(one.layers, other.layers, strict=True):
        assert all(mine.tensors[name].equal(tensor) for name, tensor in right.tensors.items())


def idle_loop_tasks() -> int:
    """Tasks on fsspec's loop besides the one that counts."""

    async def count() -> int:
        await asyncio.sleep(0)
        return len(asyncio.all_tasks()) - 1

    return asyncio.run_coroutine_threadsafe(count(), get_loop()).result(5)


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


def test_a_local_cache_opens_with_one_request(url: str, faulty: Callable[..., FaultyTransport]) -> None:
    transport = faulty(share=0)
    with lynxkv.open(url, options=FetchOptions(transport=transport)):
        assert [(item.name, item.start, item.stop) for item in transport.requests] == [
            ("anchor.safetensors", 0, 128 << 10)
        ]


class Remote:
    """A transport whose answers take a round trip, and tell sizes if asked to."""

    is_remote = True

    def __init__(self, inner: Transport, *, tells_size: bool) -> None:
        self.inner, self.tells_size = inner, tells_size
        self.asked: list[tuple[str, int, int]] = []
        self.sizes = 0

    @asynccontextmanager
    async def get(self, name: str, start: int, stop: int) -> AsyncIterator[Answer]:
        self.asked.append((name, start, stop))
        size = await self.inner.size(name) if self.tells_size else None
        async with self.inner.get(name, start, stop) as answer:
            yield Answer(chunks=answer.chunks, size=size)

    async def size(self, name: str) -> int:
        self.sizes += 1
        return await self.inner.size(name)

    async def keep(self, name: str) -> None:
        await self.inner.keep(name)

    def close(self) -> None:
        self.inner.close()


@pytest.mark.parametrize("tells_size", [True, False])
@pytest.mark.parametrize("first", [512, 4096, 1 << 20])
def test_remote_caches_are_asked_ahead(
    first: int, tells_size: bool, url: str, inner: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether what is asked for ahead ends inside the header, inside the data or behind the end."""
    for module in ("span", "head"):
        monkeypatch.setattr(f"lynxkv.fetch.{module}.FIRST_READ_BYTES", first)
    monkeypatch.setattr("lynxkv.fetch.options.FRONT_EDGES", (0, first, 4 * first))
    transport = Remote(inner, tells_size=tells_size)
    kv = lynxkv.load(url, options=FetchOptions(transport=transport))
    assert_equal(kv, lynxkv.load(url))
    asked = [(start, stop) for name, start, stop in transport.asked if name == "anchor.safetensors"]
    ahead = {(0, first), (first, 4 * first)}
    assert ahead <= set(asked)
    size = Path(url, "anchor.safetensors").stat().st_size  # where nobody tells it, what is behind is asked for, too
    assert all(start >= min(4 * first, size) for start, _ in set(asked) - ahead)
    assert transport.sizes == (0 if tells_size or first == 1 << 20 else 2)


@pytest.mark.parametrize("tells_size", [True, False])
@pytest.mark.parametrize("concurrency", [1, 2, 8])
def test_the_rest_is_asked_for_once_its_size_is_known(
    concurrency: int, tells_size: bool, url: str, inner: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lynxkv.fetch.options.FRONT_EDGES", (0, 4096, 16384))
    transport = Remote(inner, tells_size=tells_size)
    kv = lynxkv.load(url, options=FetchOptions(transport=transport, concurrency=concurrency))
    assert_equal(kv, lynxkv.load(url))
    size = Path(url, "anchor.safetensors").stat().st_size
    assert ("anchor.safetensors", 16384, size) in transport.asked


def test_a_front_is_freed_with_whoever_has_it() -> None:
    gc.disable()
    try:
        front = Front((0, 10, 20), lambda arrival, start, stop: Future(), most=100)
        part = front.part(5, 15, lambda arrival: None)
        known = weakref.ref(front)
        del front
        assert known() is None
        whole = weakref.ref(part.within)
        del part
        assert whole() is None
    finally:
        gc.enable()


class Noted(Front):
    """Fronts whose memory is noted when they are made."""

    memory: ClassVar[list[weakref.ref[Any]]] = []

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.memory.append(weakref.ref(self._arrival.between(0, 1).obj))


@pytest.fixture
def fronts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., bool]]:
    """Whether the memory of each front so far comes to be held, or not, by references alone."""
    monkeypatch.setattr("lynxkv.fetch.span.Front", Noted)
    monkeypatch.setattr(Noted, "memory", [])

    def come_to(*held: bool) -> bool:
        limit = time.monotonic() + 10
        while (found := tuple(memory() is not None for memory in Noted.memory)) != held and time.monotonic() < limit:
            time.sleep(0.001)
        return found == held

    gc.disable()
    yield come_to
    gc.enable()


@pytest.mark.parametrize("edges", [(0, 4096, 16384), (0, 1 << 20, 8 << 20)])
@pytest.mark.parametrize("tokens", [400, 389])
def test_what_came_ahead_goes_with_the_last_that_is_decoded(
    tokens: int,
    edges: tuple[int, ...],
    tmp_path: Path,
    fronts: Callable[..., bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Token ids and padding come behind that; they are kept, and so are logits, and nothing is fetched twice."""
    for module in ("fetch.span", "fetch.head", "format.read"):
        monkeypatch.setattr(f"lynxkv.{module}.FIRST_READ_BYTES", 4096)
    monkeypatch.setattr("lynxkv.fetch.options.FRONT_EDGES", edges)
    monkeypatch.setattr("lynxkv.fetch.options.RANGE_BYTES", 4096)
    url, logits = str(tmp_path / "a.lynx"), torch.arange(50.0)
    lynxkv.encode(random_kv(layers=3, tokens=tokens), url, exact=True, logits=logits)
    with ThreadPoolExecutor(4) as workers:
        transport = Remote(LocalTransport(Store(url), workers), tells_size=True)
        with lynxkv.open(url, options=FetchOptions(transport=transport)) as reader:
            ids = reader.token_ids()
            assert fronts(True)
            assert len(list(reader.stream_anchor())) > 3
            assert fronts(False)
            asked = sorted((start, stop) for name, start, stop in transport.asked if name == "anchor.safetensors")
            size = Path(url, "anchor.safetensors").stat().st_size
            assert [start for start, _ in asked] == [0, *(stop for _, stop in asked[:-1])]
            assert asked[-1][1] >= size
            before = len(transport.asked)
            for array, right in ((reader.token_ids(), ids), (reader.logits(), logits.numpy())):
                assert array is not None
                assert right is not None
                assert np.array_equal(array, right)
            assert len(transport.asked) == before
            residual = reader.start_residual()
            assert len(list(residual)) >= 6
            assert fronts(False, False)


def test_the_first_tokens_leave_nothing_of_what_came_ahead(url: str, fronts: Callable[..., bool]) -> None:
    with lynxkv.open(url, tokens=70) as reader:
        assert list(reader.stream_anchor())
        assert list(reader.start_residual())
        assert fronts(False, False)


def test_a_closed_reader_holds_nothing_that_came_ahead(url: str, inner: Transport, fronts: Callable[..., bool]) -> None:
    with lynxkv.open(url, options=FetchOptions(transport=Remote(inner, tells_size=True))) as reader:
        assert fronts(True)
    assert fronts(False)
    assert reader.spans  # which are here all the while


def test_little_is_asked_for_ahead_of_what_is_not_loaded_at_once(url: str, inner: Transport) -> None:
    transport = Remote(inner, tells_size=True)
    with CacheReader(url, options=FetchOptions(transport=transport), at_once=False) as reader:
        while idle_loop_tasks():
            pass
        assert transport.asked == [("anchor.safetensors", 0, 512 << 10)]
        destination = KVDestination(reader.extent)
        decode_into(reader, destination, "full")
    assert_equal(destination.kv, lynxkv.load(url))


def test_headers_alone_ask_for_nothing_ahead(url: str, inner: Transport) -> None:
    transport = Remote(inner, tells_size=True)
    with CacheReader(url, options=FetchOptions(transport=transport), header_only=True):
        assert len(transport.asked) == 1


def test_ready_never_blocks(url: str, inner: Transport) -> None:
    gate = threading.Event()

    class Gated(Remote):
        @asynccontextmanager
        async def get(self, name: str, start: int, stop: int) -> AsyncIterator[Answer]:
            while name.startswith("residual") and not gate.is_set():
                await asyncio.sleep(0.001)
            async with self.inner.get(name, start, stop) as answer:
                yield answer

    with lynxkv.open(url, options=FetchOptions(transport=Gated(inner, tells_size=False))) as reader:
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


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_overcome(
    fault: Fault, url: str, small_ranges: None, faulty: Callable[..., FaultyTransport]
) -> None:
    # A range that is damaged twice in a row counts as damaged in the store.
    transport = faulty(fault, share=0.3, skip=1, limit=1 if fault == "corrupt" else None)
    options = FetchOptions(transport=transport, stall_s=0.02, attempts=12)
    assert lynxkv.load(url, options=options).tokens == 400
    assert transport.injected


def test_lasting_damage_is_told(url: str, small_ranges: None, faulty: Callable[..., FaultyTransport]) -> None:
    residual = next(Path(url).glob("residual-*"))
    data = bytearray(residual.read_bytes())
    with lynxkv.open(url) as reader:
        head = reader.read_residual_head()
    data[head.header_bytes + head.segments[0].offset] ^= 1
    residual.write_bytes(data)
    transport = faulty(share=0)
    with pytest.raises(lynxkv.ChecksumError, match=r"layer\.0\.k\.residual"):
        lynxkv.load(url, options=FetchOptions(transport=transport))
    again = [item for item in transport.requests if item.start == head.header_bytes + head.segments[0].offset]
    assert len(again) == 1  # it came with the head at first, and was asked for once more
    assert lynxkv.load(url, precision="anchor").tokens == 400


@pytest.mark.parametrize("failures", [1, 2, 3])
def test_a_range_is_given_up_after_so_many_attempts(
    failures: int, url: str, faulty: Callable[..., FaultyTransport]
) -> None:
    options = FetchOptions(transport=faulty("refused", limit=failures), attempts=3)
    if failures < 3:
        assert lynxkv.load(url, precision="anchor", options=options).tokens == 400
    else:
        with pytest.raises(lynxkv.FetchError, match="connection reset"):
            lynxkv.load(url, precision="anchor", options=options)


class Dripping(Remote):
    """Every answer ends after 50 bytes."""

    @asynccontextmanager
    async def get(self, name: str, start: int, stop: int) -> AsyncIterator[Answer]:
        self.asked.append((name, start, stop))

        async def some() -> AsyncIterator[bytes]:
            async with self.inner.get(name, start, min(stop, start + 5000)) as answer:
                async for chunk in answer.chunks:
                    yield chunk
            raise ConnectionResetError("injected")

        yield Answer(chunks=some(), size=await self.inner.size(name))


def test_an_interrupted_answer_is_continued_where_it_ended(url: str, inner: Transport) -> None:
    transport = Dripping(inner, tells_size=True)
    options = FetchOptions(transport=transport, attempts=2)
    assert lynxkv.load(url, precision="anchor", options=options).tokens == 400
    starts = [start for _, start, _ in transport.asked]
    assert len(starts) == len(set(starts))


class Failing(Remote):
    """Every request raises."""

    def __init__(self, inner: Transport, error: Exception) -> None:
        super().__init__(inner, tells_size=False)
        self.error = error

    @asynccontextmanager
    async def get(self, name: str, start: int, stop: int) -> AsyncIterator[Answer]:
        self.asked.append((name, start, stop))
        raise self.error
        yield


class HttpError(OSError):
    def __init__(self, status: int) -> None:
        super().__init__(f"{status} says the server")
        self.status = status


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (HttpError(500), True),
        (HttpError(503), True),
        (HttpError(429), True),
        (HttpError(408), True),
        (HttpError(400), False),
        (HttpError(403), False),
        (ConnectionRefusedError("refused"), True),
        (TimeoutError(), True),
        (PermissionError("no"), False),
        (FileNotFoundError("none"), False),
        (ValueError("nonsense"), False),
    ],
)
def test_what_is_worth_retrying(error: Exception, again: bool, url: str, inner: Transport) -> None:
    transport = Failing(inner, error)
    with pytest.raises(lynxkv.StoreError):
        CacheReader(url, options=FetchOptions(transport=transport, attempts=3), header_only=True)
    assert len(transport.asked) == (3 if again else 1)


def test_more_than_was_asked_for_is_refused(url: str, inner: Transport) -> None:
    class Generous(Remote):
        @asynccontextmanager
        async def get(self, name: str, start: int, stop: int) -> AsyncIterator[Answer]:
            async with self.inner.get(name, 0, 1 << 30) as answer:
                yield answer

    with lynxkv.open(url) as reader:
        reader.spans[0].ranges_reader("anchor.safetensors").transport = Generous(inner, tells_size=False)
        with pytest.raises(lynxkv.FetchError, match="got more") as caught:
            reader.read("anchor.safetensors", 10, 20)
    assert "Range" in str(caught.value.hint)


def test_a_deadline_ends_what_would_go_on(url: str, faulty: Callable[..., FaultyTransport]) -> None:
    options = FetchOptions(transport=faulty("refused"), deadline_s=0.05, attempts=1000)
    with pytest.raises(lynxkv.FetchError, match=r"not fetched within 0\.05 s"):
        lynxkv.open(url, options=options)
    options = FetchOptions(transport=faulty("missing_answer"), deadline_s=0.05, attempts=1000)
    with pytest.raises(lynxkv.FetchError, match=r"not fetched within 0\.05 s"):
        lynxkv.open(url, options=options)


@pytest.mark.parametrize(
    "wrong",
    [
        {"concurrency": 0},
        {"attempts": 0},
        {"stall_s": 0},
        {"deadline_s": -1},
        {"request_timeout_s": 0},
        {"if_residual_unavailable": "shrug"},
    ],
)
def test_options_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(lynxkv.InputError):
        FetchOptions(**wrong)


def test_an_unknown_transport_is_refused(url: str) -> None:
    with pytest.raises(lynxkv.InputError, match="carrier pigeon"):
        lynxkv.open(url, options=FetchOptions(transport="carrier pigeon"))  # type: ignore[arg-type]


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
    for read in (lynxkv.load, lynxkv.check):
        with pytest.raises((lynxkv.BindingError, lynxkv.TruncatedError)):
            read(url)
    assert "another encode" in str(lynxkv.inspect(url).residual_problem)


def test_whole_caches_have_no_residual(tmp_path: Path) -> None:
    url = str(tmp_path / "a.lynx")
    lynxkv.encode(random_kv(), url, codec="int8")
    with lynxkv.open(url) as reader:
        assert reader.bytes_residual == 0
        with pytest.raises(lynxkv.BindingError):
            reader.start_residual()


def test_closing_ends_slow_requests_and_leaves_nothing_behind(url: str, faulty: Callable[..., FaultyTransport]) -> None:
    lynxkv.load(url)  # starts the loop's thread
    before = set(threading.enumerate())
    transport = faulty("missing_answer", only="residual")
    with lynxkv.open(url, options=FetchOptions(transport=transport)) as reader:
        stream = reader.start_residual()
        assert stream.ready() == []
        while not transport.injected:
            stream.ready()
    with pytest.raises(lynxkv.StoreError, match="the reader is closed"):
        stream.wait()
    reader._scheduler.workers.shutdown(wait=True)
    reader._scheduler._computing.shutdown(wait=True)
    assert {thread for thread in set(threading.enumerate()) - before if "lynxkv-fetch" in thread.name} == set()
    assert idle_loop_tasks() == 0


def test_a_simulated_link_ends_with_its_reader(url: str) -> None:
    with lynxkv.open(url, link=Link(bit_per_s=8e9)) as reader:
        link = reader.spans[0].ranges_reader("anchor.safetensors").link
        assert link
        link.bit_per_s = 8.0  # a byte a second from here on
        assert reader.start_residual().ready() == []
    assert idle_loop_tasks() == 0


def test_a_failed_opening_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(lynxkv.CacheNotFoundError):
        lynxkv.open(tmp_path / "absent.lynx")
    assert idle_loop_tasks() == 0


def test_a_closed_reader_says_so(url: str, small_ranges: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lynxkv.fetch.options.WINDOW_BYTES", 10_000)
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
    reader.close()


def test_in_flight_bytes_are_bounded(url: str, small_ranges: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lynxkv.fetch.options.WINDOW_BYTES", 10_000)
    with lynxkv.open(url) as reader:
        stream = reader.stream_anchor()
        largest = 0
        for _ in stream:
            largest = max(largest, stream.bytes_in_flight)
        # When a segment is checked, it is there as it is stored and as it expands to.
        biggest_segment = max(item.stored_bytes + item.raw_bytes for item in reader.anchor_head.segments)
        assert largest <= 10_000 + max(4096, biggest_segment)


def test_readers_are_independent(url: str) -> None:
    readers = [CacheReader(url) for _ in range(4)]
    streams = [reader.stream_anchor() for reader in readers]
    assert len({sum(payload.raw.size for payload in stream) for stream in streams}) == 1
    for reader in readers:
        reader.close()


def test_the_residual_waits_for_the_anchor(
    url: str, small_ranges: None, faulty: Callable[..., FaultyTransport]
) -> None:
    transport = faulty(share=0)
    with lynxkv.open(url, options=FetchOptions(transport=transport)) as reader:
        anchor, residual = reader.stream_anchor(), reader.start_residual()
        anchor.ready(), residual.ready()
        list(anchor), list(residual)
    names = [item.name.partition(".")[0] for item in transport.requests]
    assert names.index(next(name for name in names if name.startswith("residual"))) > names.count("anchor") - 1


def test_lanes_are_strict_and_concurrency_is_bounded() -> None:
    scheduler = Scheduler(2, what="test")
    running: list[Lane] = []
    seen: list[tuple[Lane, ...]] = []

    def job(lane: Lane) -> Callable[[], Any]:
        async def work() -> None:
            running.append(lane)
            seen.append(tuple(running))
            await asyncio.sleep(0.002)
            running.remove(lane)

        return work

    lanes = [Lane.RESIDUAL, Lane.ANCHOR, Lane.RESIDUAL, Lane.ANCHOR, Lane.ANCHOR]
    futures: list[Future[None]] = [scheduler.submit(lane, job(lane)) for lane in lanes]
    for future in futures:
        future.result(5)
    scheduler.close()
    assert max(map(len, seen)) == 2
    assert seen[-1] == (Lane.RESIDUAL,) or seen[-1] == (Lane.RESIDUAL, Lane.RESIDUAL)
    # Once the Anchor's jobs were there, no Residual's started before the last of them had ended.
    last_anchor = max(at for at, lanes in enumerate(seen) if lanes[-1] is Lane.ANCHOR)
    assert all(lanes[-1] is Lane.ANCHOR for lanes in seen[1 : last_anchor + 1])


def test_few_bytes_are_on_their_way_until_a_link_has_shown_that_it_is_fast() -> None:
    scheduler = Scheduler(8, what="test")
    quarter = IN_FLIGHT_BYTES // 4
    running, most = 0, 0

    async def job(seconds: float, size: int) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(seconds)
        running -= 1
        scheduler.arrived(size)

    def most_at_once(count: int, seconds: float, size: int) -> int:
        nonlocal most
        most = 0
        for future in [scheduler.submit(Lane.ANCHOR, partial(job, seconds, size), size=size) for _ in range(count)]:
            future.result(10)
        return most

    # What a slow link brings, a busy machine brings later still.
    assert most_at_once(12, 1.5 * IN_FLIGHT_S, quarter) == 4
    assert most_at_once(8, 0.05, 0) == 8
    assert most_at_once(3, 0.05, 2 * IN_FLIGHT_BYTES) == 1
    assert most_at_once(200, 0.001, quarter) == 8
    scheduler.close()


def test_what_brings_nothing_shows_no_fast_link() -> None:
    scheduler = Scheduler(8, what="test")

    async def refused() -> None:
        raise ConnectionResetError("reset by peer")

    for future in [scheduler.submit(Lane.ANCHOR, refused, size=IN_FLIGHT_BYTES) for _ in range(8)]:
        with pytest.raises(ConnectionResetError):
            future.result(5)
    assert scheduler._most == IN_FLIGHT_BYTES
    scheduler.close()


def test_what_is_urgent_waits_for_no_room() -> None:
    scheduler = Scheduler(8, what="test")
    ended: list[str] = []

    async def job(name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        ended.append(name)

    large = [
        scheduler.submit(Lane.ANCHOR, partial(job, f"large {number}", 0.2), size=IN_FLIGHT_BYTES) for number in range(3)
    ]
    scheduler.submit(Lane.ANCHOR, partial(job, "urgent", 0.0), urgent=True).result(5)
    for future in large:
        future.result(5)
    scheduler.close()
    assert ended == ["urgent", "large 0", "large 1", "large 2"]


def test_a_small_job_that_waits_does_not_keep_a_large_one_from_an_idle_link() -> None:
    scheduler = Scheduler(8, what="test")
    done = asyncio.Event()

    async def waiting() -> None:
        await done.wait()

    async def large() -> None:
        done.set()

    futures = [
        scheduler.submit(Lane.ANCHOR, waiting),
        scheduler.submit(Lane.ANCHOR, large, size=2 * IN_FLIGHT_BYTES),
    ]
    for future in futures:
        future.result(5)
    scheduler.close()


@pytest.mark.parametrize("seed", range(40))
def test_mixed_faults_end_in_the_right_bits_or_a_typed_error(
    seed: int, url: str, small_ranges: None, inner: Transport
) -> None:
    """One request in five goes wrong."""
    transport = FaultyTransport(inner, share=0.2, seed=seed)
    options = FetchOptions(transport=transport, stall_s=0.02, deadline_s=5, attempts=3)
    try:
        kv = lynxkv.load(url, options=options)
    except (lynxkv.StoreError, lynxkv.FormatError):
        pass
    else:
        assert_equal(kv, lynxkv.load(url))
    assert idle_loop_tasks() == 0


@pytest.mark.skipif(sys.platform == "win32", reason="open files cannot be removed there")
def test_readers_on_this_machine_keep_what_they_have_opened(url: str) -> None:
    before = lynxkv.load(url)
    with lynxkv.open(url) as reader:
        lynxkv.encode(random_kv(seed=5), url, overwrite=True)
        shutil.rmtree(url)
        destination = KVDestination(reader.extent)
        decode_into(reader, destination, "full")
    assert_equal(destination.kv, before)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_files_are_closed_with_their_reader(url: str) -> None:
    with lynxkv.open(url) as reader:
        list(reader.stream_anchor())
    reader._scheduler.workers.shutdown(wait=True)
    reader._scheduler._computing.shutdown(wait=True)
    assert not [link for link in Path("/proc/self/fd").iterdir() if str(link.resolve()).startswith(url)]


def test_transports_are_chosen_by_name_and_store(url: str) -> None:
    pytest.importorskip("obstore")
    with ThreadPoolExecutor(1) as workers:
        assert isinstance(transport_for(Store(url), "fsspec", workers), LocalTransport)
        assert isinstance(transport_for(Store(url), "auto", workers), LocalTransport)
        assert isinstance(transport_for(Store("memory://a.lynx"), "fsspec", workers), BlockingTransport)
        with pytest.raises(lynxkv.InputError, match="does not reach"):
            transport_for(Store(url), "obstore", workers)


def test_a_residual_may_be_elsewhere(tmp_path: Path) -> None:
    kv, hot, cold = random_kv(layers=3), tmp_path / "hot.lynx", tmp_path / "cold"
    lynxkv.encode(kv, hot, residual_url=cold)
    assert [path.name for path in hot.iterdir()] == ["anchor.safetensors"]
    (residual,) = cold.iterdir()
    lynxkv.encode(kv, tmp_path / "plain.lynx")
    options = FetchOptions(residual_url=cold)
    assert_equal(lynxkv.load(hot, options=options), lynxkv.load(tmp_path / "plain.lynx"))
    assert lynxkv.check(hot, options=options).segments == lynxkv.check(tmp_path / "plain.lynx").segments
    assert "is missing" in (lynxkv.inspect(hot).residual_problem or "")
    told = lynxkv.inspect(hot, options=options)
    assert told.residual_problem is None
    assert told.parts == lynxkv.inspect(tmp_path / "plain.lynx").parts
    assert lynxkv.compare(hot, kv, options=options) == lynxkv.compare(tmp_path / "plain.lynx", kv)
    with pytest.raises(lynxkv.CacheNotFoundError, match="is missing"):
        lynxkv.compare(hot, kv)
    with pytest.raises(lynxkv.CacheNotFoundError, match=r"hot\.lynx: the Residual .* is missing") as caught:
        lynxkv.load(hot)
    assert "elsewhere" in str(caught.value.hint)
    with pytest.raises(lynxkv.CacheExistsError):
        lynxkv.encode(random_kv(seed=3), hot, residual_url=cold)
    assert list(cold.iterdir()) == [residual]


def test_a_target_for_residuals_is_checked_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(lynxkv.StoreError, match="is a file"):
        lynxkv.encode(random_kv(), tmp_path / "a.lynx", residual_url=tmp_path / "file")
    assert not (tmp_path / "a.lynx").exists()


@pytest.mark.parametrize("after", [0, 1, 4])
def test_without_residual_the_anchor_serves_if_that_is_asked_for(
    after: int, url: str, small_ranges: None, faulty: Callable[..., FaultyTransport]
) -> None:
    """Also if the Residual is lost half way: nothing that has been refined stays."""
    anchor = lynxkv.load(url, precision="anchor")
    counting = faulty(share=0)
    lynxkv.load(url, precision="anchor", options=FetchOptions(transport=counting))
    assert (anchor.precision, lynxkv.load(url).precision) == ("anchor", "full")
    transport = faulty("refused", only="residual", skip=len(counting.requests) + after)
    loaded = lynxkv.load(
        url, options=FetchOptions(transport=transport, attempts=1, if_residual_unavailable="anchor-only")
    )
    assert transport.injected
    assert loaded.precision == "anchor"
    assert_equal(loaded, anchor)
    with pytest.raises(lynxkv.FetchError):
        lynxkv.load(url, options=FetchOptions(transport=faulty("refused", only="residual"), attempts=1))


def test_a_damaged_residual_is_an_error_always(url: str) -> None:
    residual = next(Path(url).glob("residual-*"))
    data = bytearray(residual.read_bytes())
    data[-70] ^= 1
    residual.write_bytes(data)
    with pytest.raises(lynxkv.FormatError):
        lynxkv.load(url, options=FetchOptions(if_residual_unavailable="anchor-only"))


def test_a_lost_anchor_is_an_error_always(url: str, faulty: Callable[..., FaultyTransport]) -> None:
    transport = faulty("refused", only="anchor")
    options = FetchOptions(transport=transport, attempts=1, if_residual_unavailable="anchor-only")
    with pytest.raises(lynxkv.FetchError):
        lynxkv.load(url, options=options)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_reader_does_not_hang_in_a_forked_child(url: str, tmp_path: Path) -> None:
    code = f"""
import os, lynxkv
reader = lynxkv.open({url!r})
child = os.fork()
if child == 0:
    try:
        reader.token_ids()
    except lynxkv.StoreError as error:
        with lynxkv.open({url!r}) as own:
            os._exit(0 if "another process" in str(error) and own.header.tokens.count == 400 else 1)
    os._exit(2)
assert os.waitpid(child, 0)[1] == 0
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=60)
