"""Reading on an event loop: the same segments, progress, callbacks, and nothing left when it is cancelled."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from fsspec.asyn import get_loop

import lynxkv
from lynxkv.decoder import CacheDecoder, KVDestination
from lynxkv.fetch import FetchOptions, SegmentStream
from lynxkv.store import Store
from lynxkv.store.transport import Answer, LocalTransport
from lynxkv.testing.kv import random_kv


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr("lynxkv.fetch.options.RANGE_BYTES", 4096)
    monkeypatch.setattr("lynxkv.fetch.options.LAST_RANGE_BYTES", 4096)
    lynxkv.encode(random_kv(layers=3, tokens=400), tmp_path / "a.lynx")
    return str(tmp_path / "a.lynx")


def tasks_on_the_loop_of_the_loader() -> int:
    async def count() -> int:
        await asyncio.sleep(0)
        return len(asyncio.all_tasks()) - 1

    return asyncio.run_coroutine_threadsafe(count(), get_loop()).result(5)


def test_both_shards_come_with_progress_and_callbacks(url: str) -> None:
    told: list[str] = []

    async def take(stream: SegmentStream, how: Any) -> None:
        done = 0
        async for payload in stream:
            how(payload)
            assert stream.bytes_done > done or stream.bytes_done == done
            done = stream.bytes_done
        assert stream.bytes_done == stream.bytes_total
        assert stream.done

    async def load() -> lynxkv.KV:
        async with lynxkv.open_async(url) as reader:
            destination = KVDestination(reader.extent)
            decoder = CacheDecoder(reader.extent, destination)
            anchor, residual = reader.stream_anchor(), reader.start_residual()
            anchor.on_ready(lambda: told.append("anchor"))
            residual.on_ready(lambda: told.append("residual"))
            await take(anchor, decoder.anchor)
            await take(residual, decoder.refine)
            anchor.on_ready(lambda: told.append("late"))
        return destination.kv

    loaded, plain = asyncio.run(load()), lynxkv.load(url)
    assert sorted(told) == ["anchor", "late", "residual"]
    for mine, right in zip(loaded.layers, plain.layers, strict=True):
        assert all(mine.tensors[name].equal(tensor) for name, tensor in right.tensors.items())


def test_errors_are_those_of_the_plain_api(url: str) -> None:
    async def load(url: str) -> None:
        async with lynxkv.open_async(url) as reader:
            async for _ in reader.start_residual():
                pass

    with pytest.raises(lynxkv.CacheNotFoundError):
        asyncio.run(load(url.replace("a.lynx", "absent.lynx")))
    residual = next(Path(url).glob("residual-*"))
    data = bytearray(residual.read_bytes())
    data[-70] ^= 1
    residual.write_bytes(data)
    with pytest.raises(lynxkv.FormatError):
        asyncio.run(load(url))


class Silent(LocalTransport):
    """Answers about the Anchor, and never about anything else."""

    @asynccontextmanager
    async def get(self, name: str, start: int, stop: int) -> AsyncIterator[Answer]:
        if not name.startswith("anchor"):
            await asyncio.Event().wait()
        async with super().get(name, start, stop) as answer:
            yield answer


def test_cancelling_leaves_nothing_behind(url: str) -> None:
    async def wait_for_ever(transport: Silent) -> None:
        async with lynxkv.open_async(url, options=FetchOptions(transport=transport)) as reader:
            async for _ in reader.start_residual():
                pass

    async def cancelled() -> None:
        with ThreadPoolExecutor(2) as workers:
            task = asyncio.create_task(wait_for_ever(Silent(Store(url), workers)))
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(cancelled())
    assert tasks_on_the_loop_of_the_loader() == 0
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("lynxkv-fetch")]


def test_an_anchor_alone_keeps_no_codes(url: str) -> None:
    with lynxkv.open(url) as reader:
        for refines in (True, False):
            decoder = CacheDecoder(reader.extent, KVDestination(reader.extent), refines=refines)
            decoder.anchor_all(reader.stream_anchor())
            assert (decoder.resident_bytes > 0) is refines
