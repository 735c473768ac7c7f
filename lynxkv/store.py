"""Where caches live: any fsspec URL, local folders first among them. Reads are ranged, publishing is atomic."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import fsspec

from lynxkv.errors import CacheExistsError, CacheNotFoundError, FetchError, InputError, StoreError
from lynxkv.format.document import ANCHOR_NAME
from lynxkv.format.write import Shard

SUFFIX = ".lynx"
_LINK = re.compile(r"(\d+(?:\.\d+)?)(k|m|g)bit(?:/(\d+(?:\.\d+)?)ms)?", re.IGNORECASE)
_UNITS = {"k": 1e3, "m": 1e6, "g": 1e9}


class Link:
    """A simulated link: one token bucket that all reads share, and a round trip before each answer.

    Requests are served in the order they arrive, as one saturated link would.
    """

    def __init__(self, *, bit_per_s: float, rtt_s: float = 0.0) -> None:
        self.bit_per_s = bit_per_s
        self.rtt_s = rtt_s
        self._free_at = 0.0
        self._lock = threading.Lock()

    @classmethod
    def parse(cls, text: str) -> Link:
        """A link from `200mbit`, `1gbit/20ms` and the like.

        Raises:
            InputError: text is not of that form.
        """
        match = _LINK.fullmatch(text.strip())
        bit_per_s = float(match[1]) * _UNITS[match[2].lower()] if match else 0.0
        rtt_s = float(match[3] or 0) / 1e3 if match else 0.0
        if not 1 <= bit_per_s <= 1e15 or rtt_s > 3600:
            raise InputError(f"cannot read the link {text!r}", hint="write it like 200mbit or 1gbit/20ms")
        return cls(bit_per_s=bit_per_s, rtt_s=rtt_s)

    def transfer(self, size_bytes: int, stop: threading.Event) -> None:
        """Wait as long as the link would take for one more answer of `size_bytes`, or until `stop` is set."""
        with self._lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now + self.rtt_s) + size_bytes * 8 / self.bit_per_s
            wait = self._free_at - now
        stop.wait(wait)


@dataclass(frozen=True, kw_only=True)
class ObjectInfo:
    """An object of a cache and its size."""

    name: str
    bytes: int


class Store:
    """One cache's prefix `NAME.lynx/` on any file system that fsspec reaches."""

    def __init__(self, url: str, *, link: Link | None = None) -> None:
        self.url = url.rstrip("/")
        if not self.url.endswith(SUFFIX) or self.url.rsplit("/", 1)[-1] == SUFFIX:
            raise InputError(f"{url} does not name a cache", hint=f"a cache is a folder or prefix NAME{SUFFIX}")
        try:
            self.fs, self.path = fsspec.core.url_to_fs(self.url)
        except (ValueError, ImportError) as error:
            raise InputError(
                f"cannot open {url}: {error}", hint="install the fsspec package for this scheme"
            ) from error
        self.link = link
        self.closing = threading.Event()

    @property
    def is_local(self) -> bool:
        return "file" in (self.fs.protocol if isinstance(self.fs.protocol, tuple) else (self.fs.protocol,))

    def path_of(self, name: str) -> str:
        return f"{self.path}/{name}"

    def exists(self) -> bool:
        """Whether an Anchor is published here."""
        with self._reading(ANCHOR_NAME):
            return bool(self.fs.exists(self.path_of(ANCHOR_NAME)))

    def size(self, name: str) -> int:
        """Size of an object in bytes.

        Raises:
            CacheNotFoundError: there is none.
            FetchError: the store cannot be asked.
        """
        with self._reading(name):
            return int(self.fs.info(self.path_of(name))["size"])

    def read(self, name: str, start: int, stop: int) -> bytes:
        """Bytes [start, stop) of an object; shorter only where the object ends.

        Raises:
            CacheNotFoundError: there is no such object.
            FetchError: the read failed, or the server sent more than was asked for.
        """
        with self._reading(name):
            data: bytes = self.fs.cat_file(self.path_of(name), start=start, end=stop)
        if len(data) > stop - start:
            raise FetchError(
                f"{self.url}/{name}: asked for {stop - start} bytes, got {len(data)}",
                hint="the server ignores Range requests; serve the cache from one that honours them",
            )
        if self.link:
            self.link.transfer(len(data), self.closing)
        return data

    def try_objects(self) -> list[ObjectInfo]:
        """The objects under the prefix; empty where the store cannot be listed, as plain HTTP often cannot."""
        try:
            with self._reading(""):
                listing = self.fs.ls(self.path, detail=True)
        except StoreError:
            return []
        return sorted(
            (ObjectInfo(name=item["name"].rsplit("/", 1)[-1], bytes=int(item["size"] or 0)) for item in listing),
            key=lambda item: item.name,
        )

    def check_target(self, *, overwrite: bool) -> None:
        """Refuse early what `publish` would refuse late.

        Raises:
            CacheExistsError: a cache is there and `overwrite` is false.
            StoreError: a local target cannot be written.
        """
        if not overwrite and self.exists():
            raise CacheExistsError(f"{self.url} exists already", hint="give another name, or --force to replace it")
        if self.is_local:
            folder = Path(self.path)
            existing = next(path for path in (folder, *folder.parents) if path.exists())
            with self._writing(), tempfile.TemporaryFile(dir=existing):
                pass

    def publish(self, anchor: Shard, residual: tuple[str, Shard] | None, *, overwrite: bool) -> None:
        """Write the Residual, then the Anchor; whoever sees the Anchor sees a complete cache.

        On a local file system each object is written under a unique temporary name, flushed, and then moved.

        Raises:
            CacheExistsError: an Anchor is there and `overwrite` is false.
            StoreError: a write failed; nothing is half-published.
        """
        if not overwrite and self.exists():
            raise CacheExistsError(f"{self.url} exists already", hint="give another name, or --force to replace it")
        put = self._put_local if self.is_local else self._put_remote
        with self._writing():
            if residual is not None:
                put(*residual, overwrite=True)
            put(ANCHOR_NAME, anchor, overwrite=overwrite)

    def _put_local(self, name: str, shard: Shard, *, overwrite: bool) -> None:
        folder = Path(self.path)
        final, temporary = folder / name, folder / f".{name}.{uuid.uuid4().hex}"
        try:
            with _create(temporary) as file:
                for buffer in shard.buffers:
                    file.write(buffer)
                file.flush()
                os.fsync(file.fileno())
            if overwrite:
                temporary.replace(final)
            else:
                os.link(temporary, final)  # fails if somebody else has published meanwhile
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink()
            with contextlib.suppress(OSError):
                folder.rmdir()  # succeeds only if nothing was published

    def _put_remote(self, name: str, shard: Shard, *, overwrite: bool) -> None:
        # An object appears when its upload completes, so no temporary name is needed; but leaving the `with` block of a
        # buffered fsspec file completes it, whatever the reason for leaving.
        file = self.fs.open(self.path_of(name), "wb")
        try:
            for buffer in shard.buffers:
                file.write(buffer)
        except BaseException:
            with contextlib.suppress(Exception):
                file.discard()
            file.closed = True
            raise
        file.close()

    @contextlib.contextmanager
    def _reading(self, name: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            if error.__cause__ is not None and not isinstance(error.__cause__, FileNotFoundError):
                # fsspec's HTTP says "not found" of servers it cannot reach, too.
                cause = error.__cause__
                raise FetchError(
                    f"{self.url}/{name}: {str(cause) or type(cause).__name__}", hint=_hint(cause)
                ) from error
            raise CacheNotFoundError(
                f"{self.url}: there is no {name or 'such prefix'}",
                hint="check the URL with your store's own tools",
            ) from error
        except StoreError:
            raise
        except Exception as error:  # fsspec backends raise errors of their own
            raise FetchError(f"{self.url}/{name}: {_words(error)}", hint=_hint(error)) from error

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except FileExistsError as error:
            if Path(self.path).is_dir():
                raise CacheExistsError(f"{self.url} exists already", hint="another writer was first") from error
            raise StoreError(f"{self.url}: {_words(error)}", hint="a file is in the way") from error
        except StoreError:
            raise
        except Exception as error:  # fsspec backends raise errors of their own
            raise StoreError(f"cannot write {self.url}: {_words(error)}", hint=_hint(error)) from error


def _create(path: Path) -> BinaryIO:
    """A new file in a folder that another writer may be removing because its own attempt failed."""
    for _ in range(3):
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            return path.open("xb")
    return path.open("xb")


def _words(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__


def _hint(error: Any) -> str:
    text = f"{type(error).__name__} {error}".lower()
    if isinstance(error, PermissionError) or "credential" in text or "forbidden" in text or "accessdenied" in text:
        return "check credentials and permissions"
    if isinstance(error, OSError) and error.errno == 28:
        return "the disk is full; free space or write elsewhere"
    if "bucket" in text:
        return "check the bucket's name, region and endpoint"
    if "certificate" in text or "ssl" in text:
        return "check TLS certificates and the machine's clock"
    return "check the URL, the endpoint and the network"
