"""Listing, removing and pruning: what is needed stays, what is not ours stays, and what goes is told."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

import lynxkv
from lynxkv.continuing import continuation
from lynxkv.decoder import KVDestination, decode_into
from lynxkv.fetch import CacheReader
from lynxkv.manage import GRACE_S
from lynxkv.testing.kv import random_kv

LATER = time.time() + 10 * GRACE_S


def encode(url: object, seed: int = 0) -> str:
    return lynxkv.encode(random_kv(layers=1, seed=seed), str(url), overwrite=True).cache_id


def age(cache: Path, seconds: float) -> None:
    """Make all objects of a cache so old."""
    for path in cache.iterdir():
        os.utime(path, (time.time() - seconds,) * 2)


@pytest.fixture
def caches(tmp_path: Path) -> Path:
    """Three caches of different age, one of them replaced once, and files of others."""
    for at, name in enumerate(("old", "deep/middle", "new")):
        encode(tmp_path / f"{name}.lynx", seed=at)
        age(tmp_path / f"{name}.lynx", (3 - at) * 100_000)
    encode(tmp_path / "new.lynx", seed=9)
    (tmp_path / "notes.txt").write_text("not a cache")
    (tmp_path / "old.lynx" / "README").write_text("not lynxkv's")
    return tmp_path


@pytest.fixture
def memory() -> Iterator[str]:
    yield "memory://managed"
    fsspec.filesystem("memory").rm("/managed", recursive=True)


def test_caches_are_listed_at_any_depth(caches: Path) -> None:
    listed = lynxkv.list_caches(caches)
    assert [Path(entry.url).relative_to(caches).as_posix() for entry in listed] == [
        "deep/middle.lynx", "new.lynx", "old.lynx",
    ]  # fmt: skip
    for entry in listed:
        report = lynxkv.check(entry.url)
        assert (entry.problem, entry.tokens, entry.codec) == (None, 70, "default")
        assert entry.bytes == report.bytes + report.orphan_bytes
        assert entry.orphan_bytes == report.orphan_bytes
        assert (entry.bytes_anchor or 0) + (entry.bytes_residual or 0) == report.bytes
    assert [entry.orphan_bytes > 0 for entry in listed] == [False, True, False]
    assert [entry.url for entry in lynxkv.list_caches(caches / "old.lynx")] == [str(caches / "old.lynx")]
    assert lynxkv.list_caches(caches / "deep" / "middle.lynx" / "..")[0].tokens == 70


def test_broken_caches_are_listed_with_what_is_wrong(caches: Path) -> None:
    (caches / "new.lynx" / "anchor.safetensors").write_bytes(b"nonsense")
    (caches / "old.lynx" / "anchor.safetensors").unlink()
    listed = {Path(entry.url).stem: entry for entry in lynxkv.list_caches(caches)}
    assert "header" in str(listed["new"].problem)
    assert "no anchor" in str(listed["old"].problem)
    assert (listed["old"].tokens, listed["old"].bytes_anchor, listed["middle"].problem) == (None, None, None)


def test_a_folder_without_caches_is_empty_and_one_that_is_missing_an_error(tmp_path: Path) -> None:
    assert lynxkv.list_caches(tmp_path) == []
    with pytest.raises(lynxkv.StoreError):
        lynxkv.list_caches(tmp_path / "absent")


def test_removing_takes_only_what_is_ours(caches: Path) -> None:
    removed = lynxkv.remove(caches / "old.lynx")
    assert removed.objects[0] == "anchor.safetensors"
    assert len(removed.objects) == 2
    assert [path.name for path in (caches / "old.lynx").iterdir()] == ["README"]
    lynxkv.remove(caches / "new.lynx")
    assert not (caches / "new.lynx").exists()
    with pytest.raises(lynxkv.CacheNotFoundError):
        lynxkv.remove(caches / "new.lynx")
    lynxkv.check(caches / "deep" / "middle.lynx")


def test_what_no_cache_needs_goes_after_the_grace_period(caches: Path) -> None:
    (caches / "new.lynx" / f".anchor.safetensors.{'0' * 32}").write_bytes(b"left behind")
    assert lynxkv.prune(caches).removed == ()  # replaced just now: somebody may have the old Anchor open
    (removed,) = lynxkv.prune(caches, now_s=lambda: LATER, dry_run=True).removed
    assert lynxkv.check(caches / "new.lynx").orphans
    report = lynxkv.prune(caches, now_s=lambda: LATER)
    assert report.removed == (removed,)
    assert (removed.reason, len(removed.objects), report.kept_caches) == ("needed by no cache", 2, 3)
    assert lynxkv.check(caches / "new.lynx").orphans == ()
    assert len(list((caches / "new.lynx").iterdir())) == 2


def test_a_residual_without_anchor_goes_too(tmp_path: Path) -> None:
    encode(tmp_path / "a.lynx")
    (tmp_path / "a.lynx" / "anchor.safetensors").unlink()
    assert lynxkv.prune(tmp_path).removed == ()
    assert len(lynxkv.prune(tmp_path, now_s=lambda: LATER).removed) == 1
    assert not (tmp_path / "a.lynx").exists()


def test_nothing_of_a_cache_that_cannot_be_read_counts_as_not_needed(caches: Path) -> None:
    (caches / "new.lynx" / "anchor.safetensors").write_bytes(b"nonsense")
    assert lynxkv.prune(caches, now_s=lambda: LATER).removed == ()


def test_old_caches_go(caches: Path) -> None:
    report = lynxkv.prune(caches, older_than_s=150_000)
    assert [(Path(item.url).stem, item.reason) for item in report.removed] == [
        ("old", "too old"), ("middle", "too old"),
    ]  # fmt: skip
    assert [Path(entry.url).stem for entry in lynxkv.list_caches(caches)] == ["new"]


def test_the_oldest_go_until_the_rest_fits(caches: Path) -> None:
    sizes = {Path(entry.url).stem: entry.bytes for entry in lynxkv.list_caches(caches)}
    report = lynxkv.prune(caches, max_bytes=sizes["middle"] + sizes["new"])
    assert [Path(item.url).stem for item in report.removed] == ["old"]
    assert (report.kept_caches, report.kept_bytes) == (2, sizes["middle"] + sizes["new"])
    assert report.removed_bytes == sizes["old"]
    report = lynxkv.prune(caches, max_bytes=0)
    assert [Path(item.url).stem for item in report.removed] == [
        "middle"
    ]  # the new one is younger than the grace period
    assert report.kept_caches == 1


def test_a_reader_keeps_what_is_pruned(caches: Path) -> None:
    url = caches / "old.lynx"
    before = lynxkv.load(url)
    with lynxkv.open(url) as reader:
        lynxkv.prune(caches, older_than_s=0)
        destination = KVDestination(reader.extent)
        decode_into(reader, destination, "full")
    assert destination.kv.layers[0].tensors["k"].equal(before.layers[0].tensors["k"])


def test_any_fsspec_url_will_do(memory: str) -> None:
    cache_id = encode(f"{memory}/a.lynx", seed=1)
    encode(f"{memory}/b.lynx", seed=2)
    assert [entry.url for entry in lynxkv.list_caches(memory)] == [f"{memory}/a.lynx", f"{memory}/b.lynx"]
    lynxkv.remove(f"{memory}/b.lynx")
    assert lynxkv.prune(memory, older_than_s=5 * GRACE_S).removed == ()
    assert lynxkv.check(f"{memory}/a.lynx").cache_id == cache_id
    assert len(lynxkv.prune(memory, older_than_s=5 * GRACE_S, now_s=lambda: LATER).removed) == 1
    assert lynxkv.list_caches("memory://") == [] or not fsspec.filesystem("memory").find("/managed")
    encode(f"{memory}/a.lynx")


@pytest.mark.parametrize("limits", [{"max_bytes": -1}, {"older_than_s": -1.0}, {"grace_s": -1.0}])
def test_negative_limits_are_refused(limits: dict[str, float], tmp_path: Path) -> None:
    with pytest.raises(lynxkv.InputError):
        lynxkv.prune(tmp_path, **limits)  # type: ignore[arg-type]


class TestChains:
    """A chain is removed from its end, or not at all."""

    @pytest.fixture
    def chain(self, tmp_path: Path) -> Path:
        """a, b on a, c on b, and d on a; each older than the next."""
        kv = random_kv(layers=1, tokens=400)
        for at, (name, start, stop, parent) in enumerate(
            [("a", 0, 100, ""), ("b", 100, 200, "a"), ("c", 200, 300, "b"), ("d", 100, 400, "a")]
        ):
            continued = None
            if parent:
                with lynxkv.open(tmp_path / f"{parent}.lynx") as reader:
                    continued = continuation(reader, "full")
            lynxkv.encode(kv.between(start, stop), tmp_path / f"{name}.lynx", parent=continued)
            age(tmp_path / f"{name}.lynx", (4 - at) * 100_000)
        return tmp_path

    @staticmethod
    def left(folder: Path) -> list[str]:
        for url in (entry.url for entry in lynxkv.list_caches(folder)):
            lynxkv.check(url)
        return sorted(path.stem for path in folder.iterdir())

    def test_listing(self, chain: Path) -> None:
        listed = {Path(entry.url).stem: entry for entry in lynxkv.list_caches(chain)}
        assert (listed["c"].tokens, listed["c"].own_tokens) == (300, 100)
        assert (listed["a"].continues, listed["c"].continues) == ((), ("a.lynx", "b.lynx"))

    def test_what_others_continue_is_not_removed(self, chain: Path) -> None:
        with pytest.raises(lynxkv.InputError, match=r"a\.lynx is continued by b\.lynx, c\.lynx, d\.lynx"):
            lynxkv.remove(chain / "a.lynx")
        with pytest.raises(lynxkv.InputError, match=r"continued by c\.lynx"):
            lynxkv.remove(chain / "b.lynx")
        lynxkv.remove(chain / "c.lynx")
        lynxkv.remove(chain / "b.lynx")
        assert self.left(chain) == ["a", "d"]

    def test_a_chain_is_removed_as_far_as_nobody_needs_it(self, chain: Path) -> None:
        assert [Path(item.url).stem for item in lynxkv.remove_chain(chain / "c.lynx")] == ["c", "b"]
        assert self.left(chain) == ["a", "d"]
        assert [Path(item.url).stem for item in lynxkv.remove_chain(chain / "d.lynx")] == ["d", "a"]
        assert self.left(chain) == []

    def test_pruning_by_age_goes_from_the_end(self, chain: Path) -> None:
        pruned = lynxkv.prune(chain, older_than_s=150_000)
        assert [Path(item.url).stem for item in pruned.removed] == ["c", "b"]
        assert (pruned.kept_caches, self.left(chain)) == (2, ["a", "d"])
        assert [Path(item.url).stem for item in lynxkv.prune(chain, older_than_s=50_000).removed] == ["d", "a"]

    def test_pruning_by_size_goes_from_the_end(self, chain: Path) -> None:
        sizes = {Path(entry.url).stem: entry.bytes for entry in lynxkv.list_caches(chain)}
        pruned = lynxkv.prune(chain, max_bytes=sum(sizes.values()) - 1)
        assert [Path(item.url).stem for item in pruned.removed] == ["c"]
        assert pruned.kept_bytes == sum(sizes.values()) - sizes["c"]
        pruned = lynxkv.prune(chain, max_bytes=0, dry_run=True)
        assert [Path(item.url).stem for item in pruned.removed] == ["b", "d", "a"]
        assert self.left(chain) == ["a", "b", "d"]

    def test_what_a_young_cache_continues_stays(self, chain: Path) -> None:
        age(chain / "c.lynx", 10)
        assert [Path(item.url).stem for item in lynxkv.prune(chain, max_bytes=0).removed] == ["d"]
        assert self.left(chain) == ["a", "b", "c"]

    def test_what_cannot_be_told_stays(self, chain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def unreadable(self: CacheReader, url: object, **options: object) -> None:
            raise lynxkv.FetchError(f"{url}: no permission")

        monkeypatch.setattr(CacheReader, "__init__", unreadable)
        with pytest.raises(lynxkv.FetchError):
            lynxkv.prune(chain, max_bytes=0)
        with pytest.raises(lynxkv.FetchError):
            lynxkv.remove(chain / "d.lynx")
        monkeypatch.undo()
        assert self.left(chain) == ["a", "b", "c", "d"]

    def test_damaged_caches_keep_nothing(self, chain: Path) -> None:
        (chain / "c.lynx" / "anchor.safetensors").write_bytes(b"nonsense")
        lynxkv.remove(chain / "b.lynx")
