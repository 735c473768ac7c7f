"""What lynxkv asks of a store, as tests: subclass it to see whether a file system of fsspec will do.

    class TestMyStore(StoreContract):
        @pytest.fixture
        def root(self, tmp_path):
            return "myfs://bucket/folder"      # a prefix for these tests alone; its caches are removed again

        @pytest.fixture
        def options(self):                     # to fetch with, if the defaults will not do
            return FetchOptions(transport="obstore")

`ReadOnlyStoreContract` is for stores that can only be read: `put` says how a cache gets there.
"""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from lynxkv.decoder import load
from lynxkv.encoder import encode
from lynxkv.errors import CacheExistsError, CacheNotFoundError
from lynxkv.fetch import CacheReader, FetchOptions, open_cache
from lynxkv.format.document import ANCHOR_NAME
from lynxkv.kv import KV
from lynxkv.manage import find_objects, list_caches, prune, remove
from lynxkv.report import check
from lynxkv.store import Store
from lynxkv.testing.kv import random_kv


def assert_same(one: KV, other: KV) -> None:
    """Two caches hold the same bits and token ids."""
    for mine, right in zip(one.layers, other.layers, strict=True):
        for name, tensor in right.tensors.items():
            assert mine.tensors[name].equal(tensor), f"{name} differs"
    assert one.token_ids == other.token_ids


class ReadOnlyStoreContract:
    """What reading takes. `root` is the prefix, and `put` brings a local cache there under a name."""

    @pytest.fixture
    def options(self) -> FetchOptions:
        """How to fetch."""
        return FetchOptions()

    @pytest.fixture
    def root(self) -> str:
        """The URL of a folder or prefix for one test."""
        raise NotImplementedError

    def put(self, root: str, folder: Path, name: str) -> None:
        """Bring the cache in `folder` to `root`/`name`."""
        raise NotImplementedError

    @pytest.fixture
    def local(self, tmp_path: Path) -> Path:
        """A cache on this machine, with all that one can have."""
        folder = tmp_path / "contract" / "a.lynx"
        encode(random_kv(layers=3, tokens=700), folder, exact=True)
        return folder

    @pytest.fixture
    def url(self, root: str, local: Path) -> str:
        """The same one in the store."""
        name = f"{uuid.uuid4().hex}.lynx"
        self.put(root, local, name)
        return f"{root}/{name}"

    @pytest.mark.parametrize("precision", ["anchor", "full", "exact"])
    def test_the_same_bits_come_back(self, precision: Any, url: str, local: Path, options: FetchOptions) -> None:
        """At every precision."""
        loaded = load(url, precision=precision, options=options)
        assert_same(loaded, load(local, precision=precision))

    def test_a_whole_cache_passes_its_check(self, url: str, local: Path, options: FetchOptions) -> None:
        """Every byte, padding included."""
        report = check(url, options=options)
        assert report.cache_id == check(local).cache_id

    def test_ranges_are_what_was_asked_for(self, url: str, local: Path, options: FetchOptions) -> None:
        """Inside the object, across its end, at its end and behind it."""
        data = (local / ANCHOR_NAME).read_bytes()
        with CacheReader(url, options=options, header_only=True) as reader:
            assert reader.size(ANCHOR_NAME) == len(data)
            for start, stop in ((0, 1), (0, len(data)), (1000, 3000), (len(data) - 10, len(data) + 10)):
                assert reader.read(ANCHOR_NAME, start, stop) == data[start:stop]
            for start in (len(data), len(data) + 100):
                assert reader.read(ANCHOR_NAME, start, start + 10) == b""

    def test_many_ranges_at_once(self, url: str, local: Path, options: FetchOptions) -> None:
        """From several threads and readers."""
        data = (local / ANCHOR_NAME).read_bytes()

        def read(number: int) -> bool:
            start = number * 997 % len(data)
            with CacheReader(url, options=options, header_only=True) as reader:
                return reader.read(ANCHOR_NAME, start, start + 500) == data[start : start + 500]

        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(read, range(12)))

    def test_what_is_missing_is_told(self, root: str, url: str, options: FetchOptions) -> None:
        """A cache, and an object of one."""
        with pytest.raises(CacheNotFoundError):
            open_cache(f"{root}/absent.lynx", options=options)
        with CacheReader(url, options=options, header_only=True) as reader:
            with pytest.raises(CacheNotFoundError):
                reader.read("absent", 0, 10)
            with pytest.raises(CacheNotFoundError):
                reader.size("absent")

    def test_closing_leaves_nothing_behind(self, url: str, options: FetchOptions) -> None:
        """No thread of a reader that was closed while it was fetching."""
        with CacheReader(url, options=options) as reader:
            reader.stream_anchor()
            reader.start_residual()
        for thread in threading.enumerate():
            if thread.name.startswith("lynxkv-fetch"):
                thread.join(10)
                assert not thread.is_alive()


class StoreContract(ReadOnlyStoreContract):
    """What reading and writing take. `root` is removed, with the caches in it, when a test is over.

    `exclusive` says whether of writers that create one name at the same time exactly one succeeds; where it is false,
    the last may.
    """

    exclusive = True

    @pytest.fixture(autouse=True)
    def clean(self, root: str) -> Iterator[None]:
        """Take away what a test has written."""
        yield
        with contextlib.suppress(CacheNotFoundError):
            for url in find_objects(root):
                remove(url)

    def put(self, root: str, folder: Path, name: str) -> None:
        """Write the shards as `encode` would."""
        names = sorted((path.name for path in folder.iterdir()), reverse=True)
        store = Store(f"{root}/{name}")
        for each in names:  # the Residual before the Anchor
            store._writer.put(each, [(folder / each).read_bytes()], overwrite=False)

    @pytest.fixture
    def target(self, root: str) -> str:
        """A URL where nothing is yet."""
        return f"{root}/{uuid.uuid4().hex}.lynx"

    def test_a_cache_is_published_whole(self, target: str, options: FetchOptions) -> None:
        """And nothing else is left there."""
        report = encode(random_kv(), target)
        assert check(target, options=options).cache_id == report.cache_id
        (objects,) = find_objects(target).values()
        assert len(objects) == 2

    def test_what_is_there_is_not_replaced_unasked(self, target: str, options: FetchOptions) -> None:
        """Asked for, it is; the old Residual stays for readers of the old Anchor, until `prune`."""
        encode(random_kv(seed=1), target)
        with pytest.raises(CacheExistsError):
            encode(random_kv(seed=2), target)
        report = encode(random_kv(seed=2), target, overwrite=True)
        checked = check(target, options=options)
        assert checked.cache_id == report.cache_id
        assert len(checked.orphans) == 1
        pruned = prune(target, grace_s=0, now_s=lambda: 1e11)
        assert [item.objects for item in pruned.removed] == [checked.orphans]
        assert check(target, options=options).orphans == ()

    def test_of_many_writers_one_wins(self, target: str, options: FetchOptions) -> None:
        """And its cache is whole, whatever the others did meanwhile."""

        def write(seed: int) -> str | None:
            try:
                return encode(random_kv(layers=1, seed=seed), target).cache_id
            except CacheExistsError:
                return None

        with ThreadPoolExecutor(4) as pool:
            winners = [cache_id for cache_id in pool.map(write, range(4)) if cache_id]
        report = check(target, options=options)
        assert report.cache_id in winners
        if self.exclusive:
            assert len(winners) == 1
            assert not report.orphans

    def test_targets_are_tried_before_any_work(self, target: str) -> None:
        """And that leaves nothing."""
        Store(target).check_target(overwrite=False)
        assert not Store(target).exists()
        assert not Store(target).try_objects()

    def test_caches_are_listed_and_removed(self, root: str, target: str, options: FetchOptions) -> None:
        """With what their headers say."""
        report = encode(random_kv(), target)
        (entry,) = list_caches(root)
        assert (entry.url, entry.tokens, entry.problem) == (target, 70, None)
        assert entry.bytes == report.bytes_anchor + report.bytes_residual
        remove(target)
        with pytest.raises(CacheNotFoundError):
            open_cache(target, options=options)
