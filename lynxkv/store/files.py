"""Plain files of this machine, read and written at offsets, by several threads at once."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path
from typing import BinaryIO

from lynxkv.errors import FetchError

_PREAD = hasattr(os, "pread")


class SharedFile:
    """An open file without a position of its own. Owns `file`, which is unbuffered."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        # Of the position, where a system can only read and write at one.
        self._lock = threading.Lock()

    def size(self) -> int:
        """Size of the file in bytes."""
        return os.fstat(self._file.fileno()).st_size

    def read(self, start: int, stop: int) -> bytes:
        """Bytes [start, stop), fewer only where the file ends: a system may return less than it has."""
        parts, at = [self._read_some(start, stop - start)], start
        while parts[-1] and (at := at + len(parts[-1])) < stop:
            parts.append(self._read_some(at, stop - at))
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def write(self, start: int, data: bytes | bytearray | memoryview) -> None:
        """Write all of `data` from byte `start` on."""
        view = memoryview(data)
        while view:
            written = self._write_some(start, view)
            start, view = start + written, view[written:]

    def resize(self, size: int) -> None:
        """Make the file `size` bytes long; what is added is zero."""
        self._file.truncate(size)

    def close(self) -> None:
        """Close the file; nobody may be using it."""
        self._file.close()

    def _read_some(self, start: int, size: int) -> bytes:
        if _PREAD:
            return os.pread(self._file.fileno(), size, start)
        with self._lock:
            self._file.seek(start)
            return self._file.read(size)

    def _write_some(self, start: int, view: memoryview) -> int:
        if _PREAD:
            return os.pwrite(self._file.fileno(), view, start)
        with self._lock:
            self._file.seek(start)
            return self._file.write(view)


def open_plain(path: Path) -> SharedFile:
    """Open a file to be read; nothing that would block, or has no end, passes for one.

    Raises:
        FetchError: it is a pipe, a socket or a device.
        OSError: it cannot be opened.
    """
    file: BinaryIO = open(path, "rb", buffering=0, opener=_open_at_once)  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise FetchError(f"{path} is not a plain file", hint="a cache is a folder of two plain files")
    return SharedFile(file)


def _open_at_once(path: str, flags: int) -> int:
    """Without waiting for somebody to write into a pipe."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
