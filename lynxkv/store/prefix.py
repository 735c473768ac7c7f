"""One cache's prefix: its objects, read in ranges, listed, and published so that no reader sees half a cache."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from lynxkv.errors import CacheNotFoundError, FetchError, InputError, StoreError
from lynxkv.format.document import ANCHOR_NAME
from lynxkv.format.read import read_anchor_head
from lynxkv.format.write import Buffer, Shard
from lynxkv.store.marks import marked_client, marked_sockets
from lynxkv.store.problems import (
    exists_already,
    hint_of,
    in_the_way,
    is_past_end,
    reading,
    unknown_scheme,
    words_of,
    writing,
)
from lynxkv.store.uploads import Upload
from lynxkv.store.writers import writer_for

SUFFIX = ".lynx"
Url = str | os.PathLike[str]
"""Where a cache is: a path, or any URL that fsspec takes."""


@dataclass(frozen=True, kw_only=True)
class ObjectInfo:
    """An object of a cache and its size."""

    name: str
    bytes: int


class Store:
    """One cache's prefix `NAME.lynx/` on any file system that fsspec reaches.

    With `tos`, packets to S3 and HTTP carry this mark; see `marks`.
    """

    def __init__(self, url: Url, *, tos: int | None = None) -> None:
        name = os.fspath(url).rstrip("/")
        if not name.endswith(SUFFIX) or name.rsplit("/", 1)[-1] == SUFFIX:
            raise InputError(f"{url} does not name a cache", hint=f"a cache is a folder or prefix NAME{SUFFIX}")
        self._open(url, tos)

    @classmethod
    def of_residuals(cls, url: Url, *, tos: int | None = None) -> Store:
        """A folder or prefix that holds Residuals whose Anchors are elsewhere.

        Raises:
            InputError: its name is that of a cache, in which a Residual without an Anchor is taken for a leftover.
        """
        if os.fspath(url).rstrip("/").endswith(SUFFIX):
            raise InputError(f"{url} names a cache", hint=f"Residuals go to a folder whose name has no {SUFFIX}")
        return cls.of_folder(url, tos=tos)

    @classmethod
    def of_folder(cls, url: Url, *, tos: int | None = None) -> Store:
        """A folder or prefix of any name, as one that caches lie in."""
        store = cls.__new__(cls)
        store._open(url, tos)
        return store

    def _open(self, url: Url, tos: int | None) -> None:
        self.fs, self.path, self.url = file_system(url, tos=tos)
        self._writer = writer_for(self.fs, self.path)

    @property
    def protocol(self) -> str:
        """What fsspec calls this kind of file system, by its first name."""
        names = self.fs.protocol
        return str(names if isinstance(names, str) else names[0])

    @property
    def is_local(self) -> bool:
        """Whether it is a folder of this machine."""
        return isinstance(self.fs, LocalFileSystem)

    @property
    def name(self) -> str:
        """The last part of the URL."""
        return self.url.rpartition("/")[2]

    @property
    def folder(self) -> str:
        """What comes before the name, with the slash between: the prefix that this one is under."""
        return self.url.removesuffix(self.name)

    def sibling(self, name: str) -> str:
        """The URL of the cache called `name` under the prefix that this one is under."""
        return self.folder + name

    def try_siblings(self) -> list[str]:
        """Names of all caches under the prefix that this one is under; none where that cannot be listed."""
        folder = self.path.rpartition("/")[0]
        self.fs.invalidate_cache(folder)
        try:
            with reading(self.folder, ""):
                paths = self.fs.ls(folder, detail=False)
        except StoreError:
            return []
        return sorted(name for path in paths if (name := path.rstrip("/").rpartition("/")[2]).endswith(SUFFIX))

    def path_of(self, name: str) -> str:
        return f"{self.path}/{name}"

    def exists(self, name: str = ANCHOR_NAME) -> bool:
        """Whether an object, by default the Anchor, is published here."""
        self.fs.invalidate_cache(self.path)  # of listings, which others may have outdated
        with reading(self.url, name):
            return bool(self.fs.exists(self.path_of(name)))

    def size(self, name: str) -> int:
        """Size of an object in bytes.

        Raises:
            CacheNotFoundError: there is none.
            FetchError: the store cannot be asked.
        """
        self.fs.invalidate_cache(self.path)
        with reading(self.url, name):
            return int(self.fs.info(self.path_of(name))["size"])

    def read(self, name: str, start: int, stop: int) -> bytes:
        """Bytes [start, stop) of an object; shorter only where the object ends.

        Raises:
            CacheNotFoundError: there is no such object.
            FetchError: the read failed, or the server sent more than was asked for.
        """
        with reading(self.url, name):
            try:
                data: bytes = self.fs.cat_file(self.path_of(name), start=start, end=stop)
            except Exception as error:
                if not is_past_end(error):
                    raise
                return b""
        if len(data) > stop - start:
            raise FetchError(
                f"{self.url}/{name}: asked for {stop - start} bytes, got {len(data)}",
                hint="the server ignores Range requests; serve the cache from one that honours them",
            )
        return data

    def try_objects(self) -> list[ObjectInfo]:
        """The objects under the prefix; empty where the store cannot be listed, as plain HTTP often cannot."""
        self.fs.invalidate_cache(self.path)
        try:
            with reading(self.url, ""):
                listing = self.fs.ls(self.path, detail=True)
        except StoreError:
            return []
        return sorted(
            (ObjectInfo(name=item["name"].rsplit("/", 1)[-1], bytes=int(item.get("size") or 0)) for item in listing),
            key=lambda item: item.name,
        )

    def remove(self, name: str) -> None:
        """Remove one object, if it is there.

        Raises:
            StoreError: it cannot be removed.
        """
        with writing(self.url):
            self._writer.remove(name)

    def check_target(self, *, overwrite: bool) -> None:
        """Refuse early what `publish` would refuse late.

        Raises:
            CacheExistsError: a cache is there and `overwrite` is false.
            StoreError: the target cannot be written, as far as that shows beforehand.
        """
        self.check_writable()
        if not overwrite and self.exists():
            raise exists_already(self.url, "give another name, or --force to replace it")

    def check_writable(self) -> None:
        """Raise a StoreError if objects cannot be written here, as far as that shows beforehand."""
        with writing(self.url):
            self._check_path()
            self._writer.probe()

    def put(self, name: str, shard: Shard) -> None:
        """Write one object, unless it is there already with these very bytes; one that is damaged is replaced at once.

        Raises:
            StoreError: it cannot be written, or what is there cannot be read.
        """
        self._check_path()
        with contextlib.suppress(CacheNotFoundError):
            if self.size(name) == shard.bytes and self.read(name, 0, shard.bytes) == b"".join(shard.buffers):
                return
        with writing(self.url):
            self._writer.put(name, shard.buffers, overwrite=True)

    @contextlib.contextmanager
    def starting_anchor(self) -> Iterator[Upload | None]:
        """An upload of the Anchor, to `send` to while it is made and then to `publish`; None where that is of no use.

        What has been sent is given up if the block is left by an error.
        """
        upload = self._writer.start(ANCHOR_NAME)
        try:
            yield upload
        except BaseException:
            if upload is not None:
                upload.abort()
            raise

    def send(self, upload: Upload, buffer: Buffer) -> None:
        """Send the next bytes of the Anchor.

        Raises:
            StoreError: some of them could not be written.
        """
        with writing(self.url):
            upload.write(buffer)

    def publish(
        self,
        anchor: Shard,
        residual: tuple[str, Shard] | None,
        *,
        overwrite: bool,
        residual_store: Store | None = None,
        upload: Upload | None = None,
    ) -> None:
        """Write the Residual, then the Anchor; whoever sees the Anchor sees a complete cache.

        The Residual of a cache that is replaced stays: a reader may have its Anchor open. With `residual_store` it goes
        there; readers have to be told. `upload` is what has been sent of the Anchor.

        Raises:
            CacheExistsError: an Anchor is there and `overwrite` is false.
            StoreError: a write failed; what was written has been removed.
        """
        self._check_path()
        if not overwrite and self.exists():
            raise exists_already(self.url, "give another name, or --force to replace it")
        beside = residual_store or self
        beside._check_path()
        ours = residual is not None and not beside.exists(residual[0])
        try:
            with writing(self.url):
                if residual is not None:
                    beside._writer.put(residual[0], residual[1].buffers, overwrite=True)
                self._put_anchor(anchor, upload, overwrite=overwrite)
                if residual is not None and not beside.exists(residual[0]):
                    # A writer of the same bytes failed meanwhile and has taken the Residual with it.
                    beside._writer.put(residual[0], residual[1].buffers, overwrite=True)
        except BaseException:
            if residual is not None and ours:
                self._withdraw(residual[0], beside)
            raise

    def _put_anchor(self, anchor: Shard, upload: Upload | None, *, overwrite: bool) -> None:
        try:
            if upload is not None:
                upload.complete(anchor.buffers, create=not overwrite)
            else:
                self._writer.put(ANCHOR_NAME, anchor.buffers, overwrite=overwrite)
        except FileExistsError as error:
            # A client that has lost the answer to its first attempt is refused by its own object.
            if bytes(anchor.buffers[0]) != self.read(ANCHOR_NAME, 0, anchor.header_bytes):
                raise exists_already(self.url, "another writer was first") from error

    def _withdraw(self, residual: str, beside: Store) -> None:
        """Remove a Residual whose Anchor was not published. Writers of equal bytes share one: theirs may have been."""
        with contextlib.suppress(Exception):
            if self._named_residual() != residual:
                beside._writer.remove(residual)

    def _named_residual(self) -> str | None:
        """The Residual that the published Anchor names; None without Anchor.

        Raises:
            LynxError: an Anchor is there and cannot be read.
        """
        try:
            size = self.size(ANCHOR_NAME)
        except CacheNotFoundError:
            return None
        header, _ = read_anchor_head(lambda start, stop: self.read(ANCHOR_NAME, start, stop), size, what=self.url)
        return header.residual.name if header.residual else None

    def _check_path(self) -> None:
        if self.is_local:
            for path in (Path(self.path), *Path(self.path).parents):
                if path.exists() and not path.is_dir():
                    raise in_the_way(self.url, path)


def file_system(url: Url, *, tos: int | None = None) -> tuple[Any, str, str]:
    """The file system that takes `url`, the path in it, and `url` as text without a slash at its end.

    Raises:
        InputError: no file system takes it.
    """
    text = os.fspath(url)
    if text.strip("/") and not text.endswith("://"):
        text = text.rstrip("/")
    try:
        fs, path = fsspec.core.url_to_fs(text, **_settings(text, tos))
    except (ValueError, ImportError) as error:
        raise unknown_scheme(text, error) from error
    except OSError as error:  # of file systems inside files
        raise StoreError(f"cannot open {text}: {words_of(error)}", hint=hint_of(error)) from error
    return fs, path, text


def _settings(url: str, tos: int | None) -> dict[str, Any]:
    """What a file system is told beside what its users have set up."""
    scheme = url.partition("://")[0]
    if scheme in ("http", "https") and tos is not None:
        return {"get_client": marked_client(tos)}
    if scheme not in ("s3", "s3a"):
        return {}
    # Retrying is done once, by whoever knows the deadline: botocore alone would try a wrong host for a quarter minute.
    settings: dict[str, Any] = {"retries": {"total_max_attempts": 1}}
    if tos is not None:
        settings["connector_args"] = {"socket_factory": marked_sockets(tos)}
    configured = fsspec.config.conf.get("s3", {}).get("config_kwargs", {})
    return {"config_kwargs": {**settings, **configured}}
