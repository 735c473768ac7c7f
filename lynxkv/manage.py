"""Caches side by side under one folder or prefix: which there are, and getting rid of some (`ls`, `rm`, `prune`)."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from lynxkv.errors import CacheNotFoundError, FormatError, InputError, StoreError
from lynxkv.fetch import CacheReader
from lynxkv.format.document import ANCHOR_NAME
from lynxkv.layout import CacheHeader
from lynxkv.store import SUFFIX, Store, Url
from lynxkv.store.prefix import file_system
from lynxkv.store.problems import reading, writing
from lynxkv.store.uploads import unfinished

# Objects that lynxkv writes, and those that killed writers leave behind. Nothing else is ever removed.
_OWN = re.compile(r"anchor\.safetensors|residual-[0-9a-f]+\.safetensors")
_LEFT_BEHIND = re.compile(r"\.(?:anchor\.safetensors|residual-[0-9a-f]+\.safetensors|probe)\.(?:[0-9a-f]{32}|claim)")
# Headers read at a time.
READERS = 8
GRACE_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class StoredObject:
    """An object under a cache's prefix. `modified_s`: since the epoch, None where the store does not say."""

    name: str
    bytes: int
    modified_s: float | None


@dataclass(frozen=True, kw_only=True)
class CacheEntry:
    """A cache in a listing. `problem`: why its header cannot be read, and what follows from it is None."""

    url: str
    bytes: int
    modified_s: float | None
    tokens: int | None
    model_id: str | None
    codec: str | None
    bytes_anchor: int | None
    bytes_residual: int | None
    orphan_bytes: int
    problem: str | None


@dataclass(frozen=True, kw_only=True)
class Removed:
    """Something removed, or that would be: a cache, or objects that no cache needs. `reason` says why."""

    url: str
    reason: str
    objects: tuple[str, ...]
    bytes: int


@dataclass(frozen=True, kw_only=True)
class PruneReport:
    """What `prune` has removed, and what is left."""

    removed: tuple[Removed, ...]
    removed_bytes: int
    kept_caches: int
    kept_bytes: int
    dry_run: bool


def list_caches(url: Url) -> list[CacheEntry]:
    """The caches under a folder or prefix, at any depth, or the one at `url`; by name.

    Raises:
        StoreError: it cannot be listed, as plain HTTP often cannot.
        InputError: no file system takes the URL.
    """
    found = find_objects(url)
    with ThreadPoolExecutor(READERS) as pool:
        return list(pool.map(_entry, found.items()))


def remove(url: Url) -> Removed:
    """Remove the cache at `url`: its Anchor first, so that nobody finds one without its Residual.

    Raises:
        CacheNotFoundError: there is none, not even parts of one.
        StoreError: it cannot be removed.
    """
    store = Store(url)
    objects = find_objects(store.url).get(store.url, [])
    if not objects:
        raise CacheNotFoundError(f"{store.url}: there is no cache", hint="`lynxkv ls` shows what there is")
    return _remove(store.url, objects, "asked for", dry_run=False)


def prune(
    url: Url,
    *,
    max_bytes: int | None = None,
    older_than_s: float | None = None,
    grace_s: float = GRACE_S,
    dry_run: bool = False,
    now_s: Callable[[], float] = time.time,
) -> PruneReport:
    """Remove what is not needed any more under a folder or prefix.

    These are, in this order: Residuals that no Anchor names and what killed writers left, once that has been so for
    `grace_s`, since somebody may have the old Anchor open; uploads that were started so long ago and never completed,
    which nobody sees and somebody pays for; caches that are older than `older_than_s`; and the oldest
    ones while all together take more than `max_bytes`. No cache younger than `grace_s` is removed.

    Readers on this machine's disks keep what they have opened. Others get a `CacheNotFoundError` if the cache they are
    reading is removed.

    Raises:
        StoreError: the store cannot be listed or written.
        InputError: a limit is negative, or an age is asked for that the store does not tell.
    """
    if min(max_bytes or 0, older_than_s or 0, grace_s) < 0:
        raise InputError("a limit is negative", hint="give bytes and seconds of at least 0")
    now, removed = now_s(), []
    caches: list[tuple[float | None, str, list[StoredObject]]] = []
    for cache, objects in find_objects(url).items():
        anchor = next((item for item in objects if item.name == ANCHOR_NAME), None)
        loose = _unneeded(cache, objects, anchor)
        # A Residual that is superseded became so when the Anchor was replaced.
        since = anchor.modified_s if anchor is not None else None
        old = [item for item in loose if _age(now, item.modified_s, since) > grace_s]
        if old:
            removed.append(_remove(cache, old, "needed by no cache", dry_run=dry_run))
        if anchor is not None:
            caches.append((anchor.modified_s, cache, [item for item in objects if item not in old]))
    removed += _end_uploads(url, started_before_s=now - grace_s, dry_run=dry_run)
    if (older_than_s is not None or max_bytes is not None) and any(modified is None for modified, _, _ in caches):
        raise InputError(f"{url}: the store does not tell how old its objects are", hint="remove caches with lynxkv rm")
    caches.sort(key=lambda item: item[0] or 0.0)
    total = sum(item.bytes for _, _, objects in caches for item in objects)
    kept = 0
    for modified, cache, objects in caches:
        age, size = _age(now, modified), sum(item.bytes for item in objects)
        reason = None
        if older_than_s is not None and age > older_than_s:
            reason = "too old"
        elif max_bytes is not None and total > max_bytes:
            reason = "too many bytes"
        if reason is None or age <= grace_s:
            kept += 1
            continue
        removed.append(_remove(cache, objects, reason, dry_run=dry_run))
        total -= size
    return PruneReport(
        removed=tuple(removed),
        removed_bytes=sum(item.bytes for item in removed),
        kept_caches=kept,
        kept_bytes=total,
        dry_run=dry_run,
    )


def find_objects(url: Url) -> dict[str, list[StoredObject]]:
    """The objects of all caches at or under `url`, by the cache's URL.

    Raises:
        StoreError: it cannot be listed.
        InputError: no file system takes the URL.
    """
    fs, base, url = file_system(url)
    fs.invalidate_cache(base)
    with reading(url, ""):
        listing: dict[str, dict[str, Any]] = fs.find(base, detail=True)
        if not listing and not fs.exists(base):
            raise FileNotFoundError(url)
    found: dict[str, list[StoredObject]] = {}
    for path, info in sorted(listing.items()):
        folder, _, name = path.rpartition("/")
        if not folder.endswith(SUFFIX) or not (_OWN.fullmatch(name) or _LEFT_BEHIND.fullmatch(name)):
            continue
        item = StoredObject(name=name, bytes=int(info["size"] or 0), modified_s=_modified(info))
        found.setdefault(url + folder.removeprefix(base), []).append(item)
    return found


def _end_uploads(url: Url, *, started_before_s: float, dry_run: bool) -> Iterator[Removed]:
    """End uploads to S3 that lynxkv has started before a time and that were not completed."""
    fs, base, url = file_system(url)
    with writing(url):
        for item in unfinished(fs, base):
            folder, _, name = item.path.rpartition("/")
            if item.started_s > started_before_s or not (_OWN.fullmatch(name) or _LEFT_BEHIND.fullmatch(name)):
                continue
            taken = item.bytes(fs)
            if not dry_run:
                item.abort(fs)
            where = url + folder.removeprefix(base)
            yield Removed(url=where, reason="upload never completed", objects=(name,), bytes=taken)


def _entry(found: tuple[str, list[StoredObject]]) -> CacheEntry:
    url, objects = found
    header, problem = _try_header(url)
    anchor = next((item for item in objects if item.name == ANCHOR_NAME), None)
    residual = header.residual if header is not None else None
    own = {ANCHOR_NAME, residual.name if residual else ""}
    return CacheEntry(
        url=url,
        bytes=sum(item.bytes for item in objects),
        modified_s=anchor.modified_s if anchor else None,
        tokens=header.tokens.count if header else None,
        model_id=header.identity.model_id if header else None,
        codec=header.codec_name if header else None,
        bytes_anchor=anchor.bytes if anchor else None,
        bytes_residual=(residual.bytes if residual else 0) if header else None,
        orphan_bytes=sum(item.bytes for item in objects if item.name not in own) if header else 0,
        problem=problem,
    )


def _unneeded(url: str, objects: list[StoredObject], anchor: StoredObject | None) -> list[StoredObject]:
    """Objects that the cache as it is does not need; none if what it needs cannot be told."""
    needed: set[str] = set()
    if anchor is not None:
        header, _ = _try_header(url)
        if header is None:
            return []
        needed = {ANCHOR_NAME, header.residual.name if header.residual else ""}
    return [item for item in objects if item.name not in needed]


def _try_header(url: str) -> tuple[CacheHeader | None, str | None]:
    try:
        with CacheReader(url, header_only=True, alone=True) as reader:
            return reader.header, None
    except (StoreError, FormatError) as error:
        return None, error.message


def _remove(url: str, objects: Iterable[StoredObject], reason: str, *, dry_run: bool) -> Removed:
    """Remove objects, an Anchor before what it names."""
    store = Store(url)
    items = sorted(objects, key=lambda item: item.name != ANCHOR_NAME)
    if not dry_run:
        with writing(url):
            for item in items:
                store.remove(item.name)
    return Removed(
        url=url, reason=reason, objects=tuple(item.name for item in items), bytes=sum(item.bytes for item in items)
    )


def _age(now_s: float, *modified_s: float | None) -> float:
    """Seconds since the last of these; 0 where one of a single one is not known."""
    known = [value for value in modified_s if value is not None]
    return now_s - max(known) if known else 0.0


def _modified(info: dict[str, Any]) -> float | None:
    """When an object was written, whatever its file system calls that."""
    for name in ("mtime", "LastModified", "last_modified", "updated", "created"):
        value = info.get(name)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, int | float):
            return float(value)
        if isinstance(value, str):
            try:
                return datetime.fromisoformat(value).timestamp()
            except ValueError:
                continue
    return None
