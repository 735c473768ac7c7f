"""Caches side by side under one folder or prefix: which there are, and getting rid of some (`ls`, `rm`, `prune`)."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from lynxkv.errors import CacheNotFoundError, FormatError, InputError, StoreError, UnsupportedFormatError
from lynxkv.fetch import CacheReader
from lynxkv.format.document import ANCHOR_NAME, is_sibling_name
from lynxkv.layout import CacheHeader
from lynxkv.store import SUFFIX, Store, Url
from lynxkv.store.prefix import file_system
from lynxkv.store.problems import reading, writing
from lynxkv.store.uploads import unfinished

# Objects that lynxkv writes, and those that killed writers leave behind. Nothing else is ever removed.
_OWN = re.compile(r"anchor\.safetensors|residual-[0-9a-f]+\.safetensors")
_LEFT_BEHIND = re.compile(r"\.(?:anchor\.safetensors|residual-[0-9a-f]+\.safetensors|probe)\.(?:[0-9a-f]{32}|claim)")
# The same of bases, which lie beside caches. Bases themselves stay: others may name them.
_BASIS = r"basis-[0-9a-f]{16}\.safetensors"
_BASIS_UPLOAD = re.compile(_BASIS)
_BASIS_LEFT_BEHIND = re.compile(rf"\.{_BASIS}\.(?:[0-9a-f]{{32}}|claim)")
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
    """A cache in a listing. `problem`: why its header cannot be read, and what follows from it is None.

    Attributes:
        tokens: of the cache and those it continues.
        own_tokens: those that it holds itself.
        continues: names of the caches before it in its chain, first to last.
        part_of: the name of the chain that it was written as a part of, which may not be complete yet.
    """

    url: str
    bytes: int
    modified_s: float | None
    tokens: int | None
    own_tokens: int | None
    continues: tuple[str, ...]
    part_of: str | None
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


@dataclass(kw_only=True)
class _Cache:
    """A cache that `prune` may remove. `continues`: URLs of those before it in its chain, first to last."""

    url: str
    modified_s: float | None
    objects: list[StoredObject]
    continues: list[str] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        return sum(item.bytes for item in self.objects)


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
        InputError: other caches continue it.
        StoreError: it cannot be removed, or cannot be told whether others continue it.
    """
    store = Store(url)
    objects = find_objects(store.url).get(store.url, [])
    if not objects:
        raise CacheNotFoundError(f"{store.url}: there is no cache", hint="`lynxkv ls` shows what there is")
    check_not_continued(store)
    return _remove(store.url, objects, "asked for", dry_run=False)


def remove_chain(url: Url) -> list[Removed]:
    """Remove the cache at `url`, then those that it continues, last to first, as far as no other cache continues them.

    Raises:
        As `remove`.
    """
    store = Store(url)
    header, _ = _try_header(store.url)
    removed = [remove(store.url)]
    for name in reversed(_names_before(header)):
        span = Store(store.sibling(name))
        if not span.exists() or continued_by(span):
            break
        removed.append(remove(span.url))
    return removed


def continued_by(store: Store) -> list[str]:
    """Names of the caches beside a cache that continue it.

    Raises:
        StoreError: it cannot be told, for a header beside it cannot be read.
    """
    names = [name for name in store.try_siblings() if name != store.name]
    with ThreadPoolExecutor(READERS) as pool:
        before = list(pool.map(_continues, [store.sibling(name) for name in names]))
    return [name for name, spans in zip(names, before, strict=True) if store.name in spans]


def check_not_continued(store: Store) -> None:
    """Refuse to remove or replace a cache that others continue.

    Raises:
        InputError: they do.
        StoreError: it cannot be told.
    """
    if is_sibling_name(store.name) and (others := continued_by(store)):
        raise InputError(
            f"{store.url} is continued by {', '.join(others)}",
            hint="remove these first; they could not be loaded without",
        )


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
    which nobody sees and somebody pays for; caches that are older than `older_than_s`; and the oldest ones while all
    together take more than `max_bytes`. No cache younger than `grace_s` is removed, and none that another one continues
    which stays.

    Readers on this machine's disks keep what they have opened. Others get a `CacheNotFoundError` if the cache they are
    reading is removed.

    Raises:
        StoreError: the store cannot be listed or written.
        InputError: a limit is negative, or an age is asked for that the store does not tell.
    """
    if min(max_bytes or 0, older_than_s or 0, grace_s) < 0:
        raise InputError("a limit is negative", hint="give bytes and seconds of at least 0")
    now, removed = now_s(), []
    caches: list[_Cache] = []
    everything = _list_objects(url)
    for where, objects in _of_caches(everything).items():
        anchor = next((item for item in objects if item.name == ANCHOR_NAME), None)
        loose = _unneeded(where, objects, anchor)
        # A Residual that is superseded became so when the Anchor was replaced.
        since = anchor.modified_s if anchor is not None else None
        old = [item for item in loose if _age(now, item.modified_s, since) > grace_s]
        if old:
            removed.append(_remove(where, old, "needed by no cache", dry_run=dry_run))
        if anchor is not None:
            kept = [item for item in objects if item not in old]
            caches.append(_Cache(url=where, modified_s=anchor.modified_s, objects=kept))
    for where, objects in everything.items():
        left = [item for item in objects if _BASIS_LEFT_BEHIND.fullmatch(item.name)]
        if old := [item for item in left if _age(now, item.modified_s) > grace_s]:
            removed.append(_remove(where, old, "needed by no cache", dry_run=dry_run))
    removed += _end_uploads(url, started_before_s=now - grace_s, dry_run=dry_run)
    if older_than_s is not None or max_bytes is not None:
        if any(cache.modified_s is None for cache in caches):
            hint = "remove caches with lynxkv rm"
            raise InputError(f"{url}: the store does not tell how old its objects are", hint=hint)
        with ThreadPoolExecutor(READERS) as pool:
            for cache, names in zip(caches, pool.map(_continues, [cache.url for cache in caches]), strict=True):
                cache.continues = [Store(cache.url).sibling(name) for name in names]
    total, count = sum(cache.bytes for cache in caches), len(caches)
    # How many caches continue one; and those that would go if none did.
    needed = Counter(parent for cache in caches for parent in cache.continues)
    blocked: dict[str, _Cache] = {}
    for oldest in sorted(caches, key=lambda cache: cache.modified_s or 0.0):
        candidates = [oldest]
        while candidates:
            cache = candidates.pop()
            age = _age(now, cache.modified_s)
            reason = None
            if older_than_s is not None and age > older_than_s:
                reason = "too old"
            elif max_bytes is not None and total > max_bytes:
                reason = "too many bytes"
            if reason is None or age <= grace_s:
                continue
            if needed[cache.url]:
                blocked[cache.url] = cache
                continue
            removed.append(_remove(cache.url, cache.objects, reason, dry_run=dry_run))
            total, count = total - cache.bytes, count - 1
            needed.subtract(cache.continues)
            candidates += [
                blocked.pop(parent) for parent in cache.continues if parent in blocked and not needed[parent]
            ]
    return PruneReport(
        removed=tuple(removed),
        removed_bytes=sum(item.bytes for item in removed),
        kept_caches=count,
        kept_bytes=total,
        dry_run=dry_run,
    )


def find_objects(url: Url) -> dict[str, list[StoredObject]]:
    """The objects of all caches at or under `url`, by the cache's URL.

    Raises:
        StoreError: it cannot be listed.
        InputError: no file system takes the URL.
    """
    return _of_caches(_list_objects(url))


def _list_objects(url: Url) -> dict[str, list[StoredObject]]:
    """All objects at or below `url`, by the folder or prefix they lie in."""
    fs, base, url = file_system(url)
    fs.invalidate_cache(base)
    with reading(url, ""):
        listing: dict[str, dict[str, Any]] = fs.find(base, detail=True)
        if not listing and not fs.exists(base):
            raise FileNotFoundError(url)
    found: dict[str, list[StoredObject]] = {}
    for path, info in sorted(listing.items()):
        folder, _, name = path.rpartition("/")
        item = StoredObject(name=name, bytes=int(info.get("size") or 0), modified_s=_modified(info))
        found.setdefault(url + folder.removeprefix(base), []).append(item)
    return found


def _of_caches(listed: dict[str, list[StoredObject]]) -> dict[str, list[StoredObject]]:
    """What lynxkv has written under the prefixes of caches."""
    own = {
        where: [item for item in objects if _OWN.fullmatch(item.name) or _LEFT_BEHIND.fullmatch(item.name)]
        for where, objects in listed.items()
        if where.endswith(SUFFIX)
    }
    return {where: objects for where, objects in own.items() if objects}


def _end_uploads(url: Url, *, started_before_s: float, dry_run: bool) -> Iterator[Removed]:
    """End uploads to S3 that lynxkv has started before a time and that were not completed."""
    fs, base, url = file_system(url)
    with writing(url):
        for item in unfinished(fs, base):
            folder, _, name = item.path.rpartition("/")
            ours = any(names.fullmatch(name) for names in (_OWN, _LEFT_BEHIND, _BASIS_UPLOAD))
            if item.started_s > started_before_s or not ours:
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
        tokens=header.tokens.stop if header and header.parent else header.tokens.count if header else None,
        own_tokens=header.tokens.count if header else None,
        continues=_names_before(header),
        part_of=header.part_of.name if header and header.part_of else None,
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


def _continues(url: str) -> tuple[str, ...]:
    """Names of what a cache continues; none if it is damaged, and so of no use to anybody.

    Raises:
        StoreError: its header cannot be read, or is that of a later version.
    """
    try:
        with CacheReader(url, header_only=True, alone=True) as reader:
            return _names_before(reader.header)
    except UnsupportedFormatError as error:
        raise StoreError(f"{url} may continue others: {error.message}", hint="use the lynxkv that wrote it") from error
    except (CacheNotFoundError, FormatError):
        return ()


def _names_before(header: CacheHeader | None) -> tuple[str, ...]:
    return tuple(span.name for span in header.parent.spans) if header is not None and header.parent is not None else ()


def _try_header(url: str) -> tuple[CacheHeader | None, str | None]:
    try:
        with CacheReader(url, header_only=True, alone=True) as reader:
            return reader.header, None
    except (StoreError, FormatError) as error:
        return None, error.message


def _remove(url: str, objects: Iterable[StoredObject], reason: str, *, dry_run: bool) -> Removed:
    """Remove objects, an Anchor before what it names."""
    store = Store(url) if url.endswith(SUFFIX) else Store.of_folder(url)
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
