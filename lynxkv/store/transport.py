"""Ranges of objects, asked for on an event loop: the part of a store that loading is made of.

http, s3      through the sessions of fsspec's own file systems, as their bytes arrive
other async   whatever else fsspec reaches asynchronously, a range at a time
local         files of this machine, opened once
blocking      memory, sftp and the like, on worker threads

`obstore` (see `obstore_transport.py`) does the same for S3 and HTTP in compiled code.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Executor
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, get_args

from fsspec.asyn import AsyncFileSystem

from lynxkv.choices import TransportName
from lynxkv.errors import FetchError, InputError
from lynxkv.store.files import SharedFile, open_plain
from lynxkv.store.prefix import Store
from lynxkv.store.problems import is_past_end

_CONTENT_RANGE = re.compile(r"bytes (?:\d+-\d+|\*)/(\d+)")
# At most so many at once: what has arrived is handed on, and the loop goes round.
CHUNK_BYTES = 256 << 10
FILE_CHUNK_BYTES = 512 << 10
NO_RANGES_HINT = "the server ignores Range requests; serve the cache from one that honours them"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a store answers to a range: chunks as they arrive, and the size of the whole object if it says so."""

    chunks: AsyncIterator[Any]
    size: int | None = None


class Transport(Protocol):
    """Reads ranges of the objects of one cache. Errors are those of the backend; see `problems.reading`."""

    is_remote: bool
    """Whether an answer takes a round trip, so that asking ahead pays."""

    def get(self, name: str, start: int, stop: int) -> AbstractAsyncContextManager[Answer]:
        """Ask for the bytes [start, stop) of an object; none come where it ends before `start`."""
        ...

    async def size(self, name: str) -> int:
        """The size of an object in bytes."""
        ...

    async def keep(self, name: str) -> None:
        """See to it that an object can be read until the end, whoever removes it, where the store can promise that."""
        ...

    def close(self) -> None:
        """Nothing more will be read."""
        ...


TransportChoice = TransportName | Transport | Callable[[Store], Transport]
"""A transport by name, one that reads the cache that was named, or what makes one for each cache of a chain."""


def transport_for(store: Store, name: TransportChoice, workers: Executor) -> Transport:
    """The transport called `name` for a store; blocking file systems are read on `workers`.

    Raises:
        InputError: there is none of that name, or it does not reach this store.
    """
    if not isinstance(name, str):
        return name(store) if callable(name) else name
    if name == "obstore" or (name == "auto" and _suits_obstore(store)):
        from lynxkv.store.obstore_transport import ObstoreTransport

        return ObstoreTransport(store)
    if name not in get_args(TransportName):
        raise InputError(f"transport is {name!r}", hint=f"use one of {', '.join(get_args(TransportName))}")
    if store.is_local:
        return LocalTransport(store, workers)
    if not isinstance(store.fs, AsyncFileSystem):
        return BlockingTransport(store, workers)
    kinds: dict[str, type[AsyncTransport]] = {"http": HttpTransport, "s3": S3Transport}
    return kinds.get(store.protocol, AsyncTransport)(store)


def _suits_obstore(store: Store) -> bool:
    """Whether obstore is here and does what s3fs would: it is told endpoint, region and credentials, and no more.

    Over a link of 200 Mbit/s and 20 ms, on two busy cores, loading took 1.06 times a bare download with it, and 1.3
    times with s3fs, which takes more time of the processor for each request (docs/stores.md).
    """
    if store.protocol != "s3" or find_spec("obstore") is None or "AWS_CA_BUNDLE" in os.environ:
        return False
    fs = store.fs
    return not (fs.client_kwargs or fs.req_kw or fs.s3_additional_kwargs or set(fs.config_kwargs) - {"retries"})


class AsyncTransport:
    """Any asynchronous file system of fsspec."""

    is_remote = True

    def __init__(self, store: Store) -> None:
        self.store, self.fs = store, store.fs

    @asynccontextmanager
    async def get(self, name: str, start: int, stop: int) -> AsyncIterator[Answer]:
        """One chunk."""
        try:
            data = await self.fs._cat_file(self.store.path_of(name), start=start, end=stop)
        except Exception as error:
            if not is_past_end(error):
                raise
            data = b""
        yield _whole(data, start, stop)

    async def size(self, name: str) -> int:
        """As the file system says."""
        return int((await self.fs._info(self.store.path_of(name)))["size"])

    async def keep(self, name: str) -> None:
        """No store promises that."""

    def close(self) -> None:
        """Connections are the file system's, which keeps them for the next reader."""


class HttpTransport(AsyncTransport):
    """HTTP and HTTPS."""

    @asynccontextmanager
    async def get(self, name: str, start: int, stop: int) -> AsyncIterator[Answer]:
        """Chunks as the socket gives them."""
        url = self.store.path_of(name)
        session = await self.fs.set_session()
        options = dict(self.fs.kwargs)
        headers = {**options.pop("headers", {}), "Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
        async with session.get(self.fs.encode_url(url), headers=headers, **options) as response:
            if response.status == 416:
                yield Answer(chunks=chunks_of(b""), size=_total(response.headers.get("Content-Range")))
                return
            self.fs._raise_not_found_for_status(response, url)
            length: int | None = response.content_length
            # A server may answer with the whole object; that is of use only if it is what was asked for.
            if response.status != 206 and (start or length is None or length > stop):
                sent = "all of it" if length is None else f"{length}"
                raise FetchError(
                    f"{self.store.url}/{name}: asked for {stop - start} bytes, got {sent}", hint=NO_RANGES_HINT
                )
            size = length if response.status != 206 else _total(response.headers.get("Content-Range"))
            yield Answer(chunks=response.content.iter_any(), size=size)


class S3Transport(AsyncTransport):
    """S3 and what speaks its protocol, through the client that s3fs has made; retries are ours."""

    @asynccontextmanager
    async def get(self, name: str, start: int, stop: int) -> AsyncIterator[Answer]:
        """Chunks as the socket gives them."""
        bucket, key, _ = self.fs.split_path(self.store.path_of(name))
        await self.fs.set_session()
        client = await self.fs.get_s3(bucket)
        try:
            response = await client.get_object(
                Bucket=bucket, Key=key, Range=f"bytes={start}-{stop - 1}", **self.fs.req_kw
            )
        except Exception as error:
            if not is_past_end(error):
                raise
            yield Answer(chunks=chunks_of(b""))
            return
        async with response["Body"] as body:
            size = _total(response.get("ContentRange"))
            if size is None and (start or response["ContentLength"] > stop):
                raise FetchError(
                    f"{self.store.url}/{name}: asked for {stop - start} bytes, got {response['ContentLength']}",
                    hint=NO_RANGES_HINT,
                )
            chunks = body.iter_chunks(CHUNK_BYTES)
            yield Answer(chunks=chunks, size=response["ContentLength"] if size is None else size)


class LocalTransport:
    """Files of this machine, each opened once: whoever replaces or removes a cache, its readers keep what they have."""

    is_remote = False

    def __init__(self, store: Store, workers: Executor) -> None:
        self.folder, self.workers = Path(store.path), workers
        self._lock = threading.Lock()
        self._files: dict[str, SharedFile] = {}
        self._reading = 0
        self._closed = False

    @asynccontextmanager
    async def get(self, name: str, start: int, stop: int) -> AsyncIterator[Answer]:
        """Chunks as they are read: the first ones can be worked on meanwhile, and none is held for long."""
        loop = asyncio.get_running_loop()
        end = min(stop, start + FILE_CHUNK_BYTES)
        first = await loop.run_in_executor(self.workers, self._read, name, start, end)

        async def chunks() -> AsyncIterator[bytes]:
            chunk, at = first, start
            while chunk:
                yield chunk
                at += len(chunk)
                chunk = b""
                if at < stop:
                    end = min(stop, at + FILE_CHUNK_BYTES)
                    chunk = await loop.run_in_executor(self.workers, self._read, name, at, end)

        yield Answer(chunks=chunks(), size=_whole(first, start, end).size)

    async def size(self, name: str) -> int:
        """Of the open file."""
        return await asyncio.get_running_loop().run_in_executor(self.workers, self._size, name)

    async def keep(self, name: str) -> None:
        """Open it. If it is not there, whoever reads it is told."""
        with contextlib.suppress(OSError):
            await self.size(name)

    def close(self) -> None:
        """Close the files as soon as nobody reads them."""
        with self._lock:
            self._closed = True
            self._close_unread()

    def _read(self, name: str, start: int, stop: int) -> bytes:
        with self._opened(name) as file:
            return file.read(start, stop)

    def _size(self, name: str) -> int:
        with self._opened(name) as file:
            return file.size()

    @contextlib.contextmanager
    def _opened(self, name: str) -> Iterator[SharedFile]:
        with self._lock:
            if name not in self._files:
                self._files[name] = open_plain(self.folder / name)
            self._reading += 1
        try:
            yield self._files[name]
        finally:
            with self._lock:
                self._reading -= 1
                self._close_unread()

    def _close_unread(self) -> None:
        if self._closed and not self._reading:
            for file in self._files.values():
                file.close()
            self._files.clear()


class BlockingTransport:
    """Other file systems that block: each range occupies a worker thread."""

    def __init__(self, store: Store, workers: Executor) -> None:
        self.store, self.workers = store, workers
        self.is_remote = store.protocol != "memory"

    @asynccontextmanager
    async def get(self, name: str, start: int, stop: int) -> AsyncIterator[Answer]:
        """One chunk."""
        loop = asyncio.get_running_loop()
        yield _whole(await loop.run_in_executor(self.workers, self.store.read, name, start, stop), start, stop)

    async def size(self, name: str) -> int:
        """As the file system says."""
        return await asyncio.get_running_loop().run_in_executor(self.workers, self.store.size, name)

    async def keep(self, name: str) -> None:
        """No store promises that."""

    def close(self) -> None:
        """Nothing is held."""


async def chunks_of(data: bytes) -> AsyncIterator[bytes]:
    """An answer that arrives at once, or nothing at all."""
    if data:
        yield data


def _whole(data: bytes, start: int, stop: int) -> Answer:
    """What a file system has read for us: fewer bytes than asked for where the file ends."""
    ends = 0 < len(data) < stop - start
    return Answer(chunks=chunks_of(data), size=start + len(data) if ends else None)


def _total(content_range: str | None) -> int | None:
    match = _CONTENT_RANGE.fullmatch(content_range or "")
    return int(match[1]) if match else None
