"""Copies of remote shards on this machine's disk, up to a bound, the least lately used dropped first.

Each copy is one file, filled in as segments are fetched and have passed their checks. Its name says of which object it
is, by the digest of its URL, and of which content, by that of its header, in which all others have their root (SPEC 5).
So an object that is replaced has another copy, and processes that fill in one at the same time write the same bytes to
the same places. Nothing else is relied on: whatever is read from a copy is checked again, as if it had been fetched.

    bytes     0     magic, the number of segments, and how long the shard's head is, 0 while it is not here
             24     one byte a segment: 1 if it is here; written after the segment
    _data_at(n)     the shard, at its own offsets; what is not here is a hole
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

try:
    import fcntl
except ImportError:  # where it is missing, processes that make room at the same time may pass the bound for a moment
    fcntl = None  # type: ignore[assignment]

from lynxkv.errors import StoreError
from lynxkv.format.index import Segment
from lynxkv.format.limits import MAX_SEGMENTS
from lynxkv.format.read import ShardHead
from lynxkv.layout import roundup
from lynxkv.store.files import SharedFile
from lynxkv.store.problems import hint_of, words_of

_SUFFIX = ".shard"
_MAGIC = b"lynxcopy"
_PROLOGUE = struct.Struct("<8sQQ")
# What may wait to be written. A disk that cannot keep up with the network loses copies, not time.
PENDING_BYTES = 16 << 20
# Room is made in milliseconds. Who waits longer waits for a process that was stopped meanwhile.
LOCK_S = 1.0


class DiskCache:
    """The copies in one folder, which take at most `max_bytes` together. Any number of processes may share it.

    A copy counts for as much as it may grow to while it is being filled in.

    Raises:
        StoreError: the folder cannot be made or written.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder, self.max_bytes = folder, max_bytes
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise StoreError(f"cannot use the cache folder {folder}: {words_of(error)}", hint=hint_of(error)) from error
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="lynxkv-copy")
        self._pending = 0
        self._lock = threading.Lock()
        self._copies: list[ShardCopy] = []

    def has(self, url: str) -> bool:
        """Whether there is a copy of any content of the object at `url`."""
        start = f"{_digest(url)}-"
        with contextlib.suppress(OSError), os.scandir(self.folder) as entries:
            return any(entry.name.startswith(start) for entry in entries)
        return False

    def copy(self, url: str, header_sha256: str) -> ShardCopy:
        """The copy of one content of the object at `url`, which may have nothing in it yet; other contents go."""
        path = self.folder / f"{_digest(url)}-{header_sha256}{_SUFFIX}"
        for other in self.folder.glob(f"{_digest(url)}-*{_SUFFIX}"):
            if other != path:
                _drop(other)
        copy = ShardCopy(self, path)
        with self._lock:
            self._copies.append(copy)
        return copy

    def write_later(self, copy: ShardCopy, start: int, data: memoryview, numbers: range) -> None:
        """Have bytes written by the one thread that does that, unless too many wait for it already."""
        with self._lock:
            if self._pending + len(data) > PENDING_BYTES:
                return
            self._pending += len(data)
        try:
            self._writer.submit(self._write, copy, start, data, numbers)
        except RuntimeError:  # closed meanwhile
            return

    def close(self) -> None:
        """Finish what waits to be written, and close all files."""
        self._writer.shutdown(wait=True)
        with self._lock:
            for copy in self._copies:
                copy.close()
            self._copies.clear()

    def make_room(self, path: Path, size: int, count: int) -> SharedFile | None:
        """The file of a copy with `count` segments, which may take `size` bytes; others are dropped for that.

        None if there is no room, or it cannot be told in time. Raises an OSError if the file cannot be made.
        """
        if size > self.max_bytes:
            return None
        with self._alone() as alone:
            if not alone:
                return None
            others = sorted(item for item in self._sizes() if item[2] != path)
            total = sum(taken for _, taken, _ in others)
            for _, taken, other in others:
                if total + size <= self.max_bytes:
                    break
                if _drop(other):
                    total -= taken
            if total + size > self.max_bytes:
                return None
            file = SharedFile(_open_or_make(path))
            if not file.size():
                file.write(0, _PROLOGUE.pack(_MAGIC, count, 0))
            if file.size() < size:
                file.resize(size)
            return file

    def _write(self, copy: ShardCopy, start: int, data: memoryview, numbers: range) -> None:
        try:
            copy.write(start, data, numbers)
        finally:
            with self._lock:
                self._pending -= len(data)

    def _sizes(self) -> Iterator[tuple[float, int, Path]]:
        """When each copy was last used, what it may take, and its path."""
        with os.scandir(self.folder) as entries:
            for entry in entries:
                if entry.name.endswith(_SUFFIX):
                    with contextlib.suppress(OSError):  # dropped meanwhile
                        state = entry.stat()
                        yield state.st_mtime, state.st_size, Path(entry.path)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[bool]:
        """Keep other processes from making room at the same time; False if one of them takes too long."""
        if fcntl is None:
            yield True
            return
        with (self.folder / "lock").open("ab") as file:
            until = time.monotonic() + LOCK_S
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    if time.monotonic() > until:
                        yield False
                        return
                    time.sleep(0.005)
                except OSError:  # a file system without locks
                    break
                else:
                    break
            yield True  # closing the file gives the lock back


class ShardCopy:
    """The copy of one shard. It is made when something is first written to it, and no error of the disk is raised."""

    def __init__(self, cache: DiskCache, path: Path) -> None:
        self._cache, self._path = cache, path
        self._file: SharedFile | None = None
        self._here = bytearray()
        self._numbers: dict[int, int] = {}  # of segments, by their offsets
        self._header_bytes = self._plain_stop = self._stop = 0
        self._room = 0  # for so many bytes of the shard
        self._broken = False
        with contextlib.suppress(OSError):
            self._open()
            os.utime(path)

    def head(self) -> bytes | None:
        """The first bytes of the shard, header and index, unchecked; None if they are not here."""
        if self._file is None:
            return None
        with contextlib.suppress(OSError):
            _, count, head_bytes = _PROLOGUE.unpack(self._file.read(0, _PROLOGUE.size))
            start = _data_at(count)
            return self._file.read(start, min(start + head_bytes, self._file.size())) if head_bytes else None
        return None

    def expect(self, head: ShardHead) -> bool:
        """Say what the shard is made of, which must be known before anything is read or kept.

        False if the copy is of another shape: it has been dropped.
        """
        self._numbers = {segment.offset: number for number, segment in enumerate(head.segments)}
        self._header_bytes, self._stop = head.header_bytes, head.bytes
        exact = (segment.offset for segment in head.segments if segment.plan.part == "exact")
        self._plain_stop = next((head.header_bytes + offset for offset in exact), head.bytes)
        if len(self._here) == len(head.segments):
            return True
        self.drop()
        return False

    def holds(self, segment: Segment) -> bool:
        """Whether a segment is here."""
        number = self._numbers.get(segment.offset, len(self._here))
        return number < len(self._here) and self._here[number] == 1

    def read(self, start: int, stop: int) -> bytes:
        """Bytes [start, stop) of the shard; fewer, or others, if the copy is damaged."""
        if self._file is None:
            return b""
        with contextlib.suppress(OSError, ValueError):  # the reader may be closed by another thread
            at = _data_at(len(self._here))
            return self._file.read(at + start, at + stop)
        return b""

    def keep(self, segments: Sequence[Segment], data: memoryview) -> None:
        """Write neighbouring segments that have passed their checks, and what came with them from between; soon, and if
        there is room for them. All are checked when they are read.
        """
        if not self._broken:
            start = self._header_bytes + segments[0].offset
            self._cache.write_later(self, start, data, self._run(segments))

    def keep_head(self, data: memoryview) -> None:
        """Write the shard's head."""
        if not self._broken:
            self._cache.write_later(self, 0, data, range(0))

    def forget(self, segments: Sequence[Segment]) -> None:
        """Take segments that did not pass their checks for missing."""
        run = self._run(segments)
        self._here[run.start : run.stop] = bytes(len(run))
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.write(_PROLOGUE.size + run.start, bytes(len(run)))

    def drop(self) -> None:
        """Drop all of the copy."""
        if self._file is not None:
            self._file.close()
            self._file = None
            _drop(self._path)
        self._here = bytearray(len(self._numbers))

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _run(self, segments: Sequence[Segment]) -> range:
        """The numbers of segments in file order, those between them included."""
        return range(self._numbers[segments[0].offset], self._numbers[segments[-1].offset] + 1)

    def write(self, start: int, data: memoryview, numbers: range) -> None:
        """Write bytes of the shard, then say that these segments are here, or its head if there are none."""
        if self._broken:
            return
        try:
            if self._room < start + len(data) and not self._grow(start + len(data)):
                self._broken = True
                return
            count = len(self._here)
            assert self._file is not None
            self._file.write(_data_at(count) + start, data)
            if numbers:
                self._file.write(_PROLOGUE.size + numbers.start, b"\1" * len(numbers))
            else:
                self._file.write(0, _PROLOGUE.pack(_MAGIC, count, len(data)))
        except OSError:  # the disk is full, perhaps
            self._broken = True
            return
        self._here[numbers.start : numbers.stop] = b"\1" * len(numbers)

    def _grow(self, stop: int) -> bool:
        """Let the copy hold the bytes of the shard up to `stop`, and more at once: exact values are seldom wanted."""
        room, count = self._plain_stop if stop <= self._plain_stop else self._stop, len(self._here)
        file = self._cache.make_room(self._path, _data_at(count) + room, count)
        if file is None:
            return False
        if self._file is None:
            self._file = file
        else:
            file.close()  # the same one, or another if this copy was dropped: then what is written to it is lost
        self._room = room
        return True

    def _open(self) -> None:
        file = SharedFile(self._path.open("r+b", buffering=0))
        first = file.read(0, _PROLOGUE.size)
        if len(first) == _PROLOGUE.size:  # else somebody is making it
            magic, count, _ = _PROLOGUE.unpack(first)
            if magic == _MAGIC and count <= MAX_SEGMENTS:
                here = file.read(_PROLOGUE.size, _PROLOGUE.size + count)
                self._file, self._here = file, bytearray(here.ljust(count, b"\0"))
                return
            _drop(self._path)
        file.close()


def _data_at(count: int) -> int:
    """Where the shard begins in the copy of one with `count` segments."""
    return roundup(_PROLOGUE.size + count, 4096)


def _digest(url: str) -> str:
    return hashlib.sha256(url.encode()).hexdigest()[:32]


def _drop(path: Path) -> bool:
    """Remove a copy; whoever has it open goes on reading. Where that cannot be, it stays."""
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return False
    return True


def _open_or_make(path: Path) -> BinaryIO:
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b", buffering=0)
