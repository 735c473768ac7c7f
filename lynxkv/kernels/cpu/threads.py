"""A small pool of our own: numba's threading layers abort on concurrent callers, or want a runtime of their own."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

from lynxkv.parallel import threads

# Below this a second thread costs more to wake (about 50 us) than it saves at about 1 ns an element.
MIN_ELEMENTS = 1 << 17

_lock = threading.Lock()
_pool: ThreadPoolExecutor | None = None
_callers = 0


def run_split(work: Callable[[int, int], None], total: int, *, unit: int, elements: int) -> None:
    """Call `work(start, stop)` over [0, total) in parts that start at multiples of `unit`, on several threads.

    As many parts as there are threads, shared among the callers that are here at the same time. `work` must release
    the interpreter lock and touch nothing that another part touches.
    """
    global _callers
    with _lock:
        _callers += 1
        count = max(1, threads() // _callers)
    try:
        units = -(-total // unit)
        parts = max(1, min(count, units, elements // MIN_ELEMENTS))
        edges = [min(total, units * i // parts * unit) for i in range(parts)] + [total]
        if parts == 1:
            work(0, total)
            return
        futures: list[Future[None]] = []
        try:
            futures += [_executor().submit(work, edges[i], edges[i + 1]) for i in range(1, parts)]
            work(edges[0], edges[1])
        finally:
            wait(futures)  # whatever happened here, nobody may still write when the caller goes on
        for future in futures:
            future.result()
    finally:
        with _lock:
            _callers -= 1


def _executor() -> ThreadPoolExecutor:
    global _pool
    with _lock:
        if _pool is None:
            _pool = ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="lynxkv-kernels")
        return _pool


def _forget() -> None:
    """In a forked child the threads are gone, and the lock may have been held."""
    global _pool, _lock, _callers
    _pool, _lock, _callers = None, threading.Lock(), 0


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_forget)
