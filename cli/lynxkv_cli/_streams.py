"""The process's standard streams, made safe before anything is printed. Imports next to nothing.

A write to stdout that fails raises `StdoutError` once, and what follows is dropped: no second failure when Python
flushes at exit. Messages on stderr that cannot be written are dropped, for there is nobody left to tell.
"""

from __future__ import annotations

import io
import os
import select
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

STDOUT, STDERR = 1, 2


class StdoutError(Exception):
    """Data did not reach stdout."""

    def __init__(self, cause: OSError) -> None:
        super().__init__(cause.strerror or str(cause))
        self.reader_left = isinstance(cause, BrokenPipeError)


class _Descriptor(io.FileIO):
    """A standard stream's file descriptor, which fails once at most."""

    def __init__(self, number: int) -> None:
        super().__init__(number, "w", closefd=False)
        self._lost = False

    def write(self, data: ReadableBuffer, /) -> int:
        """Write some of `data`, all of it where it is dropped; returns how many bytes."""
        while not self._lost:
            try:
                written: int | None = super().write(data)
            except OSError as error:
                self._lost = True
                if self.fileno() == STDOUT:
                    raise StdoutError(error) from error
            else:
                if written is not None:
                    return written
                select.select([], [self], [])  # somebody has made it non-blocking, and it is full
        return memoryview(data).nbytes


def open_streams() -> bool:
    """Replace stdout and stderr by streams that fail as described; returns whether stdout was open at all.

    Descriptors that are closed are taken by the null device, so that no file of ours gets their numbers.
    """
    open_before = []
    for number in range(3):
        try:
            os.fstat(number)
            open_before.append(True)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: this one
            open_before.append(False)
    # A name that the locale cannot show must not end in a traceback: hence backslashes.
    sys.stdout = _stream(STDOUT, getattr(sys.stdout, "encoding", None))
    sys.stderr = _stream(STDERR, getattr(sys.stderr, "encoding", None))
    return open_before[STDOUT]


def _stream(number: int, encoding: str | None) -> io.TextIOWrapper:
    raw = _Descriptor(number)
    lines = number == STDERR or raw.isatty()
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding, errors="backslashreplace", line_buffering=lines)
