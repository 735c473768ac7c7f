"""A file system of fsspec that is slow and fails, for whoever reads and writes through URLs.

    with simulated("memory://caches", link=Link.parse("200mbit/20ms"), share=0.1, seed=1) as far:
        lynxkv.encode(kv, f"{far}/a.lynx")
        lynxkv.load(f"{far}/a.lynx")

`faults.FaultyTransport` does the same for what lynxkv fetches alone, and knows more ways to fail.
"""

from __future__ import annotations

import errno
import itertools
import os
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args

import fsspec
from fsspec.registry import _registry
from fsspec.spec import AbstractFileSystem

from lynxkv.store import Link
from lynxkv.store.prefix import file_system
from lynxkv.testing.faults import OverloadedError

FileFault = Literal["refused", "overloaded", "cut", "corrupt"]
FILE_FAULTS: tuple[FileFault, ...] = get_args(FileFault)
_NUMBERS = itertools.count()


class SimulatedFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """Another file system behind a link, some of whose operations go wrong. Made by `simulated`.

    Attributes:
        reads: path and range of every read so far, those that went wrong too.
        injected: what went wrong, in order.
    """

    cachable = False
    lead: str
    inner: Any
    link: Link | None
    share: float
    faults: tuple[FileFault, ...]
    chance: random.Random
    reads: list[tuple[str, int | None, int | None]]
    injected: list[FileFault]
    _lock: threading.Lock

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        """Bytes of a file, after as long as the link takes for them."""
        with self._lock:
            self.reads.append((self._strip_protocol(path), start, end))
        fault = self._draw(self.faults)
        data: bytes = self.inner.cat_file(self._path(path), start=start, end=end, **options)
        if self.link is not None:
            time.sleep(self.link.delay_s(len(data)))
        if fault == "cut":
            return data[: self.chance.randrange(len(data) + 1)]
        if fault == "corrupt" and data:
            at = self.chance.randrange(len(data))
            return data[:at] + bytes([data[at] ^ 1 << self.chance.randrange(8)]) + data[at + 1 :]
        return data

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        """As the other file system says, under this one's name."""
        return self._ours(self.inner.info(self._path(path), **options))

    def ls(self, path: str, detail: bool = True, **options: Any) -> list[Any]:
        """As the other file system says, under this one's names."""
        found = [self._ours(item) for item in self.inner.ls(self._path(path), detail=True, **options)]
        return found if detail else [item["name"] for item in found]

    def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        """A file of the other file system; what is written is not slowed down, but opening may fail."""
        self._draw(("refused", "overloaded"))
        return self.inner.open(self._path(path), mode, **options)

    def mv(self, path1: str, path2: str, **options: Any) -> None:
        """Move a file, or fail before that."""
        self._draw(("refused", "overloaded"))
        self.inner.mv(self._path(path1), self._path(path2), **options)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make folders."""
        self.inner.makedirs(self._path(path), exist_ok=exist_ok)

    def rm_file(self, path: str) -> None:
        """Remove a file."""
        self.inner.rm_file(self._path(path))

    def invalidate_cache(self, path: str | None = None) -> None:
        """Forget listings."""
        self.inner.invalidate_cache(None if path is None else self._path(path))

    def _path(self, path: str) -> str:
        return self.lead + str(self._strip_protocol(path)).strip("/")

    def _ours(self, info: dict[str, Any]) -> dict[str, Any]:
        return {**info, "name": str(info["name"]).strip("/")}

    def _draw(self, faults: tuple[FileFault, ...]) -> FileFault | None:
        """What goes wrong with the next operation, if something does; errors are raised at once."""
        faults = tuple(fault for fault in faults if fault in self.faults)
        with self._lock:
            if not faults or self.chance.random() >= self.share:
                return None
            fault = self.chance.choice(faults)
            self.injected.append(fault)
        if fault == "refused":
            raise ConnectionResetError(errno.ECONNRESET, f"{os.strerror(errno.ECONNRESET)} (injected)")
        if fault == "overloaded":
            raise OverloadedError("503 Slow Down (injected)")
        return fault


@contextmanager
def simulated(
    url: str,
    *,
    link: Link | None = None,
    share: float = 0.0,
    faults: tuple[FileFault, ...] = FILE_FAULTS,
    seed: int = 0,
) -> Iterator[str]:
    """A URL for what is under the folder or prefix `url`, over a slower link and with faults; valid inside the block.

    refused     the connection is reset
    overloaded  the server answers 503
    cut         a read ends too early
    corrupt     one bit of a read is wrong

    `filesystem_of` has the file system, which counts. The same faults come in the same order for one seed, as long as
    operations do.

    Args:
        link: what all reads share.
        share: of the operations that go wrong, by chance, each in one of the ways `faults`.
    """
    inner, path, _ = file_system(url)
    name = f"simulated{next(_NUMBERS)}"
    settings = {
        "protocol": name,
        "lead": "/" if path.startswith("/") else "",
        "inner": inner,
        "link": link,
        "share": share,
        "faults": faults,
        "chance": random.Random(seed),
        "reads": [],
        "injected": [],
        "_lock": threading.Lock(),
    }
    fsspec.register_implementation(name, type("SimulatedFileSystem", (SimulatedFileSystem,), settings))
    try:
        yield f"{name}://{path.strip('/')}"
    finally:
        _registry.pop(name, None)


def filesystem_of(url: str) -> SimulatedFileSystem:
    """The file system behind a URL that `simulated` gave."""
    fs = fsspec.core.url_to_fs(url)[0]
    assert isinstance(fs, SimulatedFileSystem)
    return fs
