"""What the store has: an index by prefix digests, refreshed in the background, so that no request lists anything."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from lynxkv.errors import CacheNotFoundError, LynxError
from lynxkv.fetch import CacheReader
from lynxkv.format.document import ANCHOR_NAME
from lynxkv.layout import PREFIX_BLOCK_TOKENS, CacheHeader, Identity
from lynxkv.manage import READERS, StoredObject, find_objects
from lynxkv.prefix import prefix_digests
from lynxkv.server.names import cache_url

U32 = npt.NDArray[np.uint32]
Stamp = tuple[int, float | None]
"""Size and time of an Anchor: another one has others."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A cache in the store.

    Attributes:
        name: relative to the store.
        tokens: of its prompt, those of the caches that it continues included.
        parts: ranges of tokens that make up the prompt, with the SHA-256 of their ids as u32; none if unknown.
        digest: of the last whole block of the prompt (SPEC 9.2), None without one.
        stamp: of its Anchor; None until the next listing, for one that was just published or has turned out to be
            another.
    """

    name: str
    url: str
    tokens: int
    parts: tuple[tuple[int, int, str], ...]
    digest: bytes | None
    identity: Identity
    stamp: Stamp | None

    def begins(self, ids: U32) -> bool:
        """Whether its tokens are the first of a prompt, but not all of it."""
        return _begin(self.parts, ids)


@dataclass(frozen=True, kw_only=True)
class _Snapshot:
    by_name: dict[str, Entry] = field(default_factory=dict)
    by_digest: dict[bytes, list[Entry]] = field(default_factory=dict)


class Catalog:
    """The caches under `root`, as they were when it was last refreshed."""

    def __init__(self, root: str) -> None:
        self.root = root.rstrip("/") or root
        self._now = _Snapshot()
        self._lock = threading.Lock()
        self.refreshed_at: float | None = None

    @property
    def entries(self) -> list[Entry]:
        """All caches, by name."""
        return [entry for _, entry in sorted(self._now.by_name.items())]

    @property
    def age_s(self) -> float | None:
        """Seconds since the last refresh; None before the first."""
        return None if self.refreshed_at is None else time.monotonic() - self.refreshed_at

    def find(self, name: str) -> Entry | None:
        """The cache of this name."""
        return self._now.by_name.get(name)

    def longest_prefix(self, prompt_ids: Sequence[int], identities: Iterable[Identity]) -> Entry | None:
        """The longest cache of one of these identities whose tokens are the first of the prompt, but not all of it.

        Caches of less than a block of 256 tokens are not found.
        """
        ids = np.asarray(prompt_ids, "<u4")
        blocks = [prefix_digests(ids, identity) for identity in identities]
        snapshot = self._now
        for number in reversed(range(len(ids) // PREFIX_BLOCK_TOKENS)):
            found = [entry for digests in blocks for entry in snapshot.by_digest.get(digests[number].tobytes(), ())]
            for entry in sorted(found, key=lambda entry: -entry.tokens):
                if entry.begins(ids):
                    return entry
        return None

    def add(self, entry: Entry) -> None:
        """Know a cache that was just published."""
        with self._lock:
            self._show({**self._now.by_name, entry.name: entry})

    def doubt(self, entry: Entry) -> None:
        """Find a cache, which the store has another of by now, by its name only until the next listing."""
        with self._lock:
            if self._now.by_name.get(entry.name) is entry:
                doubted = replace(entry, parts=(), digest=None, stamp=None)
                self._show({**self._now.by_name, entry.name: doubted})

    def refresh(self) -> list[str]:
        """List the store, and read the headers of what is new in it; returns URLs of caches that have changed.

        Raises:
            StoreError: the store cannot be listed; what was known stays.
        """
        try:
            objects = find_objects(self.root)
        except CacheNotFoundError:  # an empty store need not exist
            objects = {}
        stamps = {url: stamp for url, items in objects.items() if (stamp := _stamp(items)) is not None}
        known = {entry.url: entry for entry in self._now.by_name.values()}
        changed = [url for url, stamp in stamps.items() if url not in known or known[url].stamp != stamp]
        with ThreadPoolExecutor(READERS) as pool:
            read = [entry for entry in pool.map(self._read, changed, map(stamps.get, changed)) if entry is not None]
        gone = known.keys() - stamps.keys()
        with self._lock:
            entries = {
                entry.name: entry
                for entry in self._now.by_name.values()
                if entry.url not in gone and entry.url not in changed
            }
            self._show(entries | {entry.name: entry for entry in read})
            self.refreshed_at = time.monotonic()
        return [*changed, *gone]

    def _show(self, by_name: dict[str, Entry]) -> None:
        by_digest: dict[bytes, list[Entry]] = {}
        for entry in by_name.values():
            if entry.digest is not None and entry.parts:
                by_digest.setdefault(entry.digest, []).append(entry)
        self._now = _Snapshot(by_name=by_name, by_digest=by_digest)

    def _read(self, url: str, stamp: Stamp | None) -> Entry | None:
        """The entry of a cache; None if it cannot be read, or has a name that no request can ask for."""
        name = url.removeprefix(self.root).lstrip("/")
        try:
            cache_url(self.root, name)
            with CacheReader(url, header_only=True, alone=True) as reader:
                digests = reader.prefix_sha256()
                header = reader.header
        except (LynxError, ValueError):  # whatever is wrong with it is no matter of the others
            return None
        return Entry(
            name=name,
            url=url,
            tokens=header.tokens.stop,
            parts=_parts(header),
            digest=digests[-1].tobytes() if digests is not None and len(digests) else None,
            identity=header.identity,
            stamp=stamp,
        )


def begins(header: CacheHeader, prompt_ids: Sequence[int]) -> bool:
    """Whether the tokens of the cache that has this header, and those that it continues, are the first of a prompt, but
    not all of it. A cache that does not say which tokens it has begins nothing.
    """
    return _begin(_parts(header), np.asarray(prompt_ids, "<u4"))


def _begin(parts: tuple[tuple[int, int, str], ...], ids: U32) -> bool:
    return (
        bool(parts)
        and parts[-1][1] < len(ids)
        and all(hashlib.sha256(ids[start:stop].tobytes()).hexdigest() == digest for start, stop, digest in parts)
    )


def _parts(header: CacheHeader) -> tuple[tuple[int, int, str], ...]:
    before = header.parent.tokens_sha256 if header.parent is not None else None
    own, start, stop = header.tokens.sha256, header.tokens.start, header.tokens.stop
    if own is None or (start and before is None):
        return ()
    return ((0, start, before), (start, stop, own)) if before is not None else ((0, stop, own),)


def _stamp(objects: list[StoredObject]) -> Stamp | None:
    return next(((item.bytes, item.modified_s) for item in objects if item.name == ANCHOR_NAME), None)
