"""Work shared out to a few threads; results come in the order of what they were made from."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

T = TypeVar("T")
R = TypeVar("R")

_lock = threading.Lock()
_sharing = 0
_threads_before = 1


def threads() -> int:
    """Threads that work may be shared out to: as many as torch has, or had before `torch_alone`."""
    with _lock:
        return _threads_before if _sharing else torch.get_num_threads()


@contextmanager
def torch_alone() -> Iterator[None]:
    """Within it torch computes on one thread, in the calling thread and in those it starts.

    Where works share the processors already, teams of torch's for every one of them wait for each other, and the more
    so the less the machine has to spare: on a busy one encoding took ten times as long.
    """
    global _sharing, _threads_before
    with _lock:
        if not _sharing:
            _threads_before = torch.get_num_threads()
        _sharing += 1
    torch.set_num_threads(1)
    try:
        yield
    finally:
        with _lock:
            _sharing -= 1
        torch.set_num_threads(_threads_before)


def map_ordered(work: Callable[[T], R], items: Iterable[T], *, threads: int) -> Iterator[R]:
    """`map(work, items)` on up to `threads` threads, with at most twice as many items taken and not handed out.

    Items are taken by the calling thread, one after the other. What is raised is what would be without threads: the
    error that comes first in the order of the items, be it from `work` or from `items`. No work goes on after that.
    """
    if threads == 1:
        yield from map(work, items)
        return
    source = iter(items)
    waiting: deque[Future[R]] = deque()
    pool = ThreadPoolExecutor(threads, thread_name_prefix="lynxkv-work")
    try:
        failure: Exception | None = None
        while True:
            try:
                item = next(source)
            except StopIteration:
                break
            except Exception as error:  # raised below, once earlier items had their turn to fail
                failure = error
                break
            waiting.append(pool.submit(work, item))
            if len(waiting) == 2 * threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
        if failure is not None:
            raise failure
    finally:
        pool.shutdown(cancel_futures=True)


def _forget() -> None:
    """In a forked child nobody shares, and the lock may have been held."""
    global _lock, _sharing
    _lock, _sharing = threading.Lock(), 0


os.register_at_fork(after_in_child=_forget)
