"""Memory that bytes arrive in."""

from __future__ import annotations

import contextlib
import mmap
import sys

import numpy as np

from lynxkv.fetch.options import RANGE_BYTES

# Memory of so many bytes is the system's, and goes back to it when it is freed. glibc would keep twice as much as the
# largest piece that was ever freed, in each of its arenas.
MAPPED_BYTES = 1 << 20
_HUGE_PAGE_BYTES = 2 << 20


def new_memory(size: int) -> memoryview:
    """Memory for so many bytes, which is not taken before something is put into it."""
    if size < MAPPED_BYTES or sys.platform == "win32":
        return np.empty(size, np.uint8).data
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # a kernel without large pages
            pages.madvise(mmap.MADV_HUGEPAGE)  # small ones take a tenth of a load's processor time
    return memoryview(pages)


class Blocks:
    """Memory for the ranges of one reader, used again as soon as nothing refers to what was in it.

    New pages take longer to come than bytes to be copied into them. What is free is never more than what is in use, and
    what is in use is more than half filled.
    """

    def __init__(self) -> None:
        # No lock: memory is given back wherever the last reference goes, within `take` too. Each step is one of the
        # interpreter's, a set in place of a count is for that, and two that meet keep less than they could.
        self._free: list[memoryview] = []
        self._used: set[int] = set()

    def take(self, size: int) -> memoryview:
        """Memory for so many bytes, with anything in it."""
        if not RANGE_BYTES // 2 < size <= RANGE_BYTES:
            return new_memory(size)
        try:
            block = self._free.pop()
        except IndexError:
            block = _block()
        return np.asarray(_Loan(block, self._used, self._free)).data[:size]


class _Loan:
    """A block in use, which numpy's array protocol keeps for as long as an array or a view shows its memory."""

    def __init__(self, block: memoryview, used: set[int], free: list[memoryview]) -> None:
        self._block, self._used, self._free = block, used, free
        used.add(id(self))
        self.__array_interface__ = np.frombuffer(block, np.uint8).__array_interface__

    def __del__(self) -> None:
        self._used.discard(id(self))
        self._free.append(self._block)
        del self._free[len(self._used) :]


def _block() -> memoryview:
    """A new block, that starts where large pages do."""
    memory = new_memory(RANGE_BYTES + _HUGE_PAGE_BYTES)
    address: int = np.frombuffer(memory, np.uint8).ctypes.data
    start = -address % _HUGE_PAGE_BYTES
    return memory[start : start + RANGE_BYTES]
