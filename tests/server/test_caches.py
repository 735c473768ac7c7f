"""Which cache answers a prompt: the longest stored prefix; what happens when it fails; what stays in memory."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import lynxkv
from lynxkv.codecs.uniform import Uniform
from lynxkv.encoder import encode
from lynxkv.errors import (
    FetchError,
    FormatError,
    IdentityError,
    InputError,
    LynxError,
    StoreError,
    UnsupportedModelError,
)
from lynxkv.fetch import CacheReader, FetchOptions
from lynxkv.fetch.options import SPAN_EDGES
from lynxkv.integrations.hf import Model
from lynxkv.kv import KV
from lynxkv.models import prefill
from lynxkv.server.catalog import Catalog
from lynxkv.server.hot import HotCaches, HotReading, RecordingTransport, _Object
from lynxkv.server.opening import Openings
from lynxkv.server.problems import Refusal
from lynxkv.server.uncached import generate_uncached
from lynxkv.store import Store
from lynxkv.store.transport import Answer, chunks_of, transport_for
from lynxkv.testing.faults import FaultyTransport
from lynxkv.testing.tiny_models import tiny_model
from tests.server.conftest import Running, eventually, running
from tests.server.test_refusals import send

CODEC = Uniform(key_step=0.7, value_step=0.9, radix=32)


def some_ids(count: int, seed: int = 0) -> list[int]:
    return [3 + (number * number + 7 * number + seed) % 45 for number in range(count)]


def publish(model: Model, url: str, ids: Sequence[int]) -> None:
    encode(prefill(model, ids), url, codec=CODEC, identity=model.identity, overwrite=True)


@pytest.fixture
def root(model: Model, tmp_path: Path) -> Path:
    """Caches of the first 256 and 300 of the same tokens, and of 300 others."""
    for name, ids in {"a/short": some_ids(256), "a/long": some_ids(300), "other": some_ids(300, seed=1)}.items():
        publish(model, str(tmp_path / f"{name}.lynx"), ids)
    return tmp_path


def complete(server: Running, ids: Sequence[int], **lynx: Any) -> dict[str, Any]:
    """The greedy completion of a prompt of token ids."""
    body = {"model": "org/tiny", "prompt": list(ids), "max_tokens": 6, "temperature": 0, "lynx": lynx}
    status, _, content = send(server, body, path="/v1/completions")
    return {"status": status, **content, **content.get("lynx", {})}


def from_cache(model: Model, url: Path, suffix_ids: Sequence[int]) -> str:
    with lynxkv.open(url) as reader:
        return lynxkv.generate(reader, model, suffix_ids, max_new_tokens=6, speculate="off").text


def without(model: Model, ids: Sequence[int]) -> str:
    return generate_uncached(model, ids, max_new_tokens=6, sampling=lynxkv.Sampling()).text


def test_the_longest_stored_prefix_is_used(model: Model, root: Path) -> None:
    with running(model, str(root)) as server:
        ids = some_ids(310)
        answer = complete(server, ids)
        assert (answer["source"], answer["cache"], answer["cached_tokens"]) == ("cache", "a/long.lynx", 300)
        assert answer["usage"]["prompt_tokens"] == 310
        assert answer["choices"][0]["text"] == from_cache(model, root / "a" / "long.lynx", ids[300:])
        # The long one is not a prefix of this, the short one is.
        answer = complete(server, [*ids[:280], 9, 9])
        assert (answer["cache"], answer["cached_tokens"]) == ("a/short.lynx", 256)
        # Not a token follows the long one here.
        assert complete(server, ids[:300])["cache"] == "a/short.lynx"
        # A single other token in the first block.
        answer = complete(server, [4, *ids[1:]])
        assert (answer["source"], answer["cache"], answer["cached_tokens"]) == ("prefill", None, 0)
        assert answer["choices"][0]["text"] == without(model, [4, *ids[1:]])


def test_a_chain_is_found_by_its_whole_prompt(model: Model, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And stays in memory whole, as it is stored: each of its caches has a transport of its own."""
    ids, url = some_ids(440), "memory://chains/b.lynx"
    publish(model, "memory://chains/a.lynx", ids[:256])
    with lynxkv.open("memory://chains/a.lynx") as reader:
        parent = lynxkv.continuation(reader, "full")
    kv = lynxkv.prefill(model, ids[:430])
    encode(cut_kv(kv, 256), url, codec=CODEC, identity=model.identity, parent=parent)
    made: list[FaultyTransport] = []

    def counting(*arguments: Any) -> FaultyTransport:
        made.append(FaultyTransport(transport_for(*arguments), share=0))
        return made[-1]

    monkeypatch.setattr("lynxkv.server.hot.transport_for", counting)
    with running(model, "memory://chains") as server:
        for source in (complete(server, ids), complete(server, ids), complete(server, ids[430:], cache="b.lynx")):
            assert (source["source"], source["cache"], source["cached_tokens"]) == ("cache", "b.lynx", 430)
            with lynxkv.open(url) as reader:
                own = lynxkv.generate(reader, model, ids[430:], max_new_tokens=6, speculate="off")
            assert source["choices"][0]["text"] == own.text
        assert [bool(transport.requests) for transport in made] == [True, True, False, False, False, False]
        # The second cache alone is no prefix, and neither is it after other tokens.
        assert complete(server, [4, *ids[1:]])["source"] == "prefill"
    lynxkv.remove(url)
    lynxkv.remove("memory://chains/a.lynx")


def cut_kv(kv: KV, start: int) -> KV:
    """The positions from `start` on."""
    layers = [
        replace(layer, tensors={name: tensor[:, start:].clone() for name, tensor in layer.tensors.items()}, start=start)
        for layer in kv.layers
    ]
    assert kv.token_ids is not None
    return KV(layers=layers, start=start, stop=kv.stop, token_ids=list(kv.token_ids)[start:])


def test_a_cache_that_waits_to_be_loaded_holds_little(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    url = "memory://waiting/a.lynx"
    publish(model, url, some_ids(300))
    made: list[FaultyTransport] = []

    def far(store: Store) -> FaultyTransport:
        made.append(FaultyTransport(transport_for(store, "auto", workers), share=0))
        made[-1].is_remote = True
        return made[-1]

    async def scenario() -> None:
        openings = Openings(1)
        async with openings.open(url, link=None, options=FetchOptions(transport=far)) as reader:
            assert [(item.start, item.stop) for item in made[0].requests] == [(0, SPAN_EDGES[-1])]
            assert reader.extent.stop == 300
        openings.close()

    with ThreadPoolExecutor(1) as workers:
        asyncio.run(scenario())
    lynxkv.remove(url)


def test_a_refresh_reads_what_is_new(model: Model, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []

    def counting(url: str, **options: Any) -> Any:
        opened.append(url)
        return CacheReader(url, **options)

    monkeypatch.setattr("lynxkv.server.catalog.CacheReader", counting)
    catalog = Catalog(f"{root}/")
    assert len(catalog.refresh()) == len(opened) == 3
    assert [entry.name for entry in catalog.entries] == ["a/long.lynx", "a/short.lynx", "other.lynx"]
    assert catalog.refresh() == []
    assert len(opened) == 3
    publish(model, str(root / "a" / "long.lynx"), some_ids(310))
    shutil.rmtree(root / "other.lynx")
    (root / "broken.lynx").mkdir()
    (root / "broken.lynx" / "anchor.safetensors").write_bytes(b"no cache")
    assert sorted(Path(url).name for url in catalog.refresh()) == ["broken.lynx", "long.lynx", "other.lynx"]
    assert {entry.name: entry.tokens for entry in catalog.entries} == {"a/long.lynx": 310, "a/short.lynx": 256}
    assert catalog.longest_prefix(some_ids(320), [model.identity]) == catalog.find("a/long.lynx")
    assert Catalog(str(root / "nothing")).refresh() == []


@pytest.mark.parametrize(
    "error",
    [
        Refusal("no"),
        FormatError("no"),
        IdentityError("no", field="model_id"),
        StoreError("no"),
        InputError("no"),
        UnsupportedModelError("no"),
        LynxError("no"),
        ValueError("no"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_cache_that_cannot_be_read_hides_no_other(
    model: Model, root: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def failing(url: str, **options: Any) -> Any:
        if "other" in url:
            raise error
        return CacheReader(url, **options)

    monkeypatch.setattr("lynxkv.server.catalog.CacheReader", failing)
    catalog = Catalog(str(root))
    catalog.refresh()
    assert [entry.name for entry in catalog.entries] == ["a/long.lynx", "a/short.lynx"]


def test_a_cache_of_an_odd_name_hides_no_other(model: Model, root: Path) -> None:
    for name in ("may (1)", "mañana?", ".hidden"):
        shutil.copytree(root / "a" / "long.lynx", root / f"{name}.lynx")
    with running(model, str(root)) as server:
        assert [entry.name for entry in server.service.catalog.entries] == ["a/long.lynx", "a/short.lynx", "other.lynx"]
        assert complete(server, some_ids(310))["cache"] == "a/long.lynx"


def test_a_miss_is_published_in_the_background(model: Model, tmp_path: Path) -> None:
    ids = some_ids(280)
    with running(model, str(tmp_path), publish=True) as server:
        first = complete(server, ids)
        assert (first["source"], first["choices"][0]["text"]) == ("prefill", without(model, ids))
        eventually(lambda: bool(server.service.catalog.entries))
        (entry,) = server.service.catalog.entries
        assert entry.tokens == 256
        second = complete(server, ids)
        assert (second["source"], second["cache"]) == ("cache", entry.name)
        assert second["choices"][0]["text"] == from_cache(model, Path(entry.url), ids[256:])
        assert b'lynxkv_publish_total{outcome="published"} 1.0' in server.service.metrics.page()
        # What a listing finds is the same.
        asyncio.run(server.service.refresh())
        assert [found.name for found in server.service.catalog.entries] == [entry.name]
        # Less than a block is not worth it.
        complete(server, ids[:200])
    assert [path.name for path in (tmp_path / "auto").iterdir()] == [Path(entry.name).name]


def damage(cache: Path, name: str) -> None:
    (path,) = cache.glob(name)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["anchor*", "residual*"])
def test_a_cache_that_cannot_be_loaded(model: Model, root: Path, name: str) -> None:
    ids = some_ids(310)
    with running(model, str(root)) as server:
        damage(root / "a" / "long.lynx", name)
        # The client does not know of the cache that was found, so that its prompt is computed.
        found = complete(server, ids)
        assert (found["source"], found["load_failure"], found["cache"]) == ("recompute", "cache_damaged", "a/long.lynx")
        assert found["choices"][0]["text"] == without(model, ids)
        named = complete(server, ids[300:], cache="a/long.lynx")
        assert (named["status"], named["error"]["code"]) == (502, "cache_damaged")
        assert complete(server, ids, on_failure="error")["error"]["code"] == "cache_damaged"
        again = complete(server, ids[300:], cache="a/long.lynx", on_failure="recompute")
        assert (again["source"], again["choices"][0]["text"]) == ("recompute", without(model, ids))
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        page = server.service.metrics.page()
        assert b'lynxkv_load_failures_total{code="cache_damaged"} 4.0' in page
        assert b'lynxkv_failures_total{code="cache_damaged"} 2.0' in page


def test_drafts_on_a_cache_that_fails_are_taken_back(model: Model, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*arguments: Any, on_event: Any, **options: Any) -> Any:
        def report(event: Any) -> None:
            if type(event).__name__ == "Phase" and event.name in ("refine", "verify"):
                raise FetchError("the link is gone")
            on_event(event)

        return lynxkv.generate(*arguments, speculate=4, on_event=report, **options)

    monkeypatch.setattr("lynxkv.server.runs.generate", failing)
    ids = some_ids(310)
    with running(model, str(root)) as server:
        stream = server.client.completions.create(
            model="org/tiny",
            prompt=ids,
            max_tokens=6,
            temperature=0,
            stream=True,
            extra_body={"lynx": {"draft": True}},
        )
        chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == without(model, ids)
    events: list[dict[str, Any]] = [chunk.model_extra["lynx"] for chunk in chunks]  # type: ignore[index]
    drafted = [event["token_id"] for event in events if event["event"] == "draft"]
    (retracted,) = [event["token_ids"] for event in events if event["event"] == "retract"]
    assert drafted == retracted != []
    (note,) = [event["text"] for event in events if event["event"] == "note"]
    assert "the link is gone" in note
    assert (events[-1]["source"], events[-1]["load_failure"]) == ("recompute", "store_failed")


def test_a_cache_that_was_used_stays_in_memory(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, url = some_ids(310), "memory://hot-caches/a.lynx"
    publish(model, url, ids[:300])
    made: list[FaultyTransport] = []

    def faulty(*arguments: Any) -> FaultyTransport:
        # The first answer of the first reading is damaged; what it brought is asked for again.
        limit = 0 if made else 1
        made.append(FaultyTransport(transport_for(*arguments), share=1, faults=("corrupt",), limit=limit))
        return made[-1]

    monkeypatch.setattr("lynxkv.server.hot.transport_for", faulty)
    with running(model, "memory://hot-caches") as server:
        texts = [complete(server, ids)["choices"][0]["text"] for _ in range(3)]
        assert texts[0] == texts[1] == texts[2]
        assert made[0].injected == ["corrupt"]
        assert made[0].requests
        assert made[1].requests == made[2].requests == []
        assert (server.service.hot.misses, server.service.hot.hits) == (1, 2)
        assert server.service.hot.bytes > 0
        # What is replaced is not believed after the next listing.
        publish(model, url, some_ids(300, seed=1))
        asyncio.run(server.service.refresh())
        assert server.service.hot.bytes == 0
        assert complete(server, ids)["source"] == "prefill"
        assert complete(server, some_ids(310, seed=1))["source"] == "cache"
    lynxkv.remove(url)


@pytest.mark.parametrize("another", ["text", "model"])
def test_a_cache_that_was_replaced_since_it_was_listed(model: Model, root: Path, another: str) -> None:
    """It is no prefix of the prompt any more, whatever the listing says: another one is, or none."""
    ids, url = some_ids(310), root / "a" / "long.lynx"
    with running(model, str(root), refresh_s=3600.0) as server:
        publish(model if another == "text" else tiny_model("llama", seed=1), str(url), some_ids(290, seed=2))
        answer = complete(server, ids)
        assert (answer["status"], answer["source"], answer["cache"]) == (200, "cache", "a/short.lynx")
        assert answer["choices"][0]["text"] == from_cache(model, root / "a" / "short.lynx", ids[256:])
        publish(model, str(root / "a" / "short.lynx"), some_ids(300, seed=3))
        answer = complete(server, ids)
        assert (answer["source"], answer["load_failure"]) == ("prefill", None)
        assert answer["choices"][0]["text"] == without(model, ids)
        # It is still there by its name, and by its own prompt from the next listing on.
        named = complete(server, [5, 6], cache="a/short.lynx")
        assert named["choices"][0]["text"] == from_cache(model, root / "a" / "short.lynx", [5, 6])
        assert complete(server, some_ids(310, seed=3))["source"] == "prefill"
        asyncio.run(server.service.refresh())
        assert complete(server, some_ids(310, seed=3))["cache"] == "a/short.lynx"


def test_a_copy_in_memory_of_what_was_replaced(model: Model) -> None:
    """The listing knows of the new one already, the memory of the old one."""
    url, old, new = "memory://replaced-caches/a.lynx", some_ids(310), some_ids(310, seed=1)
    publish(model, url, old[:300])
    with running(model, "memory://replaced-caches", refresh_s=3600.0) as server:
        assert complete(server, old)["source"] == "cache"
        publish(model, url, new[:300])
        server.service.catalog.refresh()
        assert server.service.hot.has(url)
        answer = complete(server, new)
        assert (answer["source"], answer["choices"][0]["text"]) == ("prefill", without(model, new))
        assert not server.service.hot.has(url)
        asyncio.run(server.service.refresh())
        assert complete(server, new)["source"] == "cache"
    lynxkv.remove(url)


class Plain:
    """A transport of an object whose bytes are its name's, over and over."""

    is_remote = True

    def get(self, name: str, start: int, stop: int) -> Any:
        @asynccontextmanager
        async def answer() -> Any:
            yield Answer(chunks=chunks_of((name.encode() * 100)[start:stop]), size=100 * len(name))

        return answer()

    async def size(self, name: str) -> int:
        return 100 * len(name)

    async def keep(self, name: str) -> None: ...

    def close(self) -> None: ...


def test_the_least_lately_used_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lynxkv.server.hot.transport_for", lambda *arguments: Plain())

    async def read(transport: RecordingTransport, start: int, stop: int) -> bytes:
        async with transport.get("ab", start, stop) as answer:
            return b"".join([bytes(chunk) async for chunk in answer.chunks])

    async def use(hot: HotCaches, number: int, start: int = 0, stop: int = 200) -> None:
        transport = hot.transport(Store(f"memory://h/{number}.lynx"))
        assert await read(transport, start, stop) == (b"ab" * 100)[start:stop]
        hot.keep(f"memory://h/{number}.lynx", transport)

    async def scenario() -> None:
        with ThreadPoolExecutor(1) as pool:
            hot = HotCaches(500, pool)
            for number in (1, 2, 1, 3):
                await use(hot, number)
            assert (hot.bytes, hot.hits, hot.misses) == (400, 1, 3)
            await use(hot, 1)
            assert hot.hits == 2
            await use(hot, 2)
            assert hot.misses == 4
            small = HotCaches(100, pool)
            await use(small, 1)
            assert small.bytes == 0
            # Pieces join, and more of a cache can come later.
            await use(small, 1, 0, 30)
            await use(small, 1, 20, 60)
            await use(small, 1, 10, 55)
            assert (small.bytes, small.hits) == (60, 2)

    asyncio.run(scenario())


def test_a_cache_may_be_dropped_while_it_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread opens one that another thread drops at the worst moment."""
    monkeypatch.setattr("lynxkv.server.hot.transport_for", lambda *arguments: Plain())
    store = Store("memory://h/one.lynx")

    class Watched(OrderedDict[str, Any]):
        def get(self, url: str, default: Any = None) -> Any:
            found = super().get(url, default)
            if dropping is None:
                return found
            dropping.start()
            dropping.join(0.2)  # it comes when it may
            return found

    dropping: threading.Thread | None = None
    with ThreadPoolExecutor(1) as pool:
        hot = HotCaches(1000, pool)
        transport = hot.transport(store)
        transport.written["ab"] = _Object(data=bytearray(b"ab"), known=[(0, 2)], size=2)
        hot.keep(store.url, transport)
        assert hot.has(store.url)
        hot._kept = Watched(hot._kept)
        thread = dropping = threading.Thread(target=hot.drop, args=(store.url,))
        hot.transport(store)
        thread.join(30)
        assert (hot.has(store.url), hot.bytes, hot.hits, hot.misses) == (False, 0, 1, 1)


def test_what_is_read_while_a_cache_is_dropped_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lynxkv.server.hot.transport_for", lambda *arguments: Plain())
    one, other = Store("memory://h/one.lynx"), Store("memory://h/other.lynx")

    async def read(hot: HotCaches, *stores: Store) -> HotReading:
        reading = hot.reading()
        for store in stores:
            async with reading(store).get("ab", 0, 200) as answer:
                assert b"".join([bytes(chunk) async for chunk in answer.chunks]) == b"ab" * 100
        return reading

    async def scenario() -> None:
        with ThreadPoolExecutor(1) as pool:
            hot = HotCaches(1000, pool)
            first, second = await read(hot, one, other), await read(hot, one)
            hot.drop(one.url)  # a listing has found another
            first.keep()
            second.keep()
            assert (hot.has(one.url), hot.has(other.url)) == (False, True)
            later, beside = await read(hot, one), await read(hot, one)
            later.keep()
            assert hot.has(one.url)
            # One reading keeps nothing from another of the same bytes.
            beside.keep()
            assert (hot.has(one.url), hot.bytes) == (True, 400)
            # What a reading was not content with is not kept by those beside it.
            beside.drop()
            later.keep()
            assert not hot.has(one.url)

    asyncio.run(scenario())


def test_a_publication_that_does_not_fit(model: Model, tmp_path: Path) -> None:
    with running(model, str(tmp_path), publish=True) as server:
        publisher = server.service._publisher
        told: list[str] = []
        publisher._told = told.append
        kv = prefill(model, some_ids(256))
        memory = server.service.memory
        memory.hold(server.service.options.memory_bytes - 10)
        publisher.offer(kv, model.identity)
        assert told == ["busy"]
        memory.free(server.service.options.memory_bytes - 10)
        refuse: Callable[..., None] = partial(publisher.offer, kv, model.identity)
        refuse()
        eventually(lambda: told == ["busy", "published"] and publisher.held_bytes == 0)
        refuse()
        eventually(lambda: told[2:] == ["there_already"] and memory.held == 0)


def test_residuals_may_be_elsewhere(model: Model, tmp_path: Path) -> None:
    ids, elsewhere = some_ids(300), tmp_path / "cold"
    encode(prefill(model, ids), str(tmp_path / "hot" / "a.lynx"), identity=model.identity, residual_url=str(elsewhere))
    asked = [*ids, *some_ids(5, seed=1)]
    with running(model, str(tmp_path / "hot"), residual_url=str(elsewhere), concurrency=2) as server:
        found = complete(server, asked)
        assert (found["source"], found["choices"][0]["text"]) == ("cache", without(model, asked))
    with running(model, str(tmp_path / "hot")) as server:
        assert complete(server, ids[:5], cache="a.lynx")["error"]["code"] == "cache_not_found"
