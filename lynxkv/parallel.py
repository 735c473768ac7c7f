"""Work shared out to a few threads; results come in the order of what they were made from."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

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


class _Task(Generic[T, R]):
    """One item, and what became of it."""

    __slots__ = ("ended", "error", "item", "result")

    def __init__(self, item: T) -> None:
        self.item = item
        self.ended = False
        self.error: BaseException | None = None

    def run(self, work: Callable[[T], R]) -> None:
        try:
            self.result: R = work(self.item)
        except BaseException as error:
            self.error = error
        self.ended = True

    def outcome(self) -> R:
        if self.error is not None:
            raise self.error
        return self.result


def map_ordered(work: Callable[[T], R], items: Iterable[T], *, threads: int) -> Iterator[R]:
    """`map(work, items)` on up to `threads` threads, with at most twice as many items taken and not handed out.

    The calling thread is one of them: it takes the items, one after the other, and works where others have enough to
    do. One that only handed out would take the processor from a worker for every item. What is raised is what would be
    without threads: the error that comes first in the order of the items, be it from `work` or from `items`. No work
    goes on after that.
    """
    if threads == 1:
        yield from map(work, items)
        return
    todo: SimpleQueue[_Task[T, R] | None] = SimpleQueue()
    news: SimpleQueue[None] = SimpleQueue()

    def help_out() -> None:
        while (task := todo.get()) is not None:
            task.run(work)
            del task  # with what it holds, while this waits for the next
            news.put(None)

    helpers: list[threading.Thread] = []
    waiting: deque[_Task[T, R]] = deque()
    source, more, failure = iter(items), True, None
    try:
        while more or waiting:
            if waiting and waiting[0].ended:
                yield waiting.popleft().outcome()
            elif more and len(waiting) < 2 * threads:
                try:
                    task = _Task[T, R](next(source))
                except StopIteration:
                    more = False
                    continue
                except Exception as error:  # raised below, once earlier items had their turn to fail
                    more, failure = False, error
                    continue
                waiting.append(task)
                todo.put(task)
                if len(helpers) < min(threads, len(waiting)) - 1:
                    helper = threading.Thread(target=help_out, name="lynxkv-work", daemon=True)
                    helper.start()
                    helpers.append(helper)
            else:
                try:
                    own = todo.get_nowait()
                except Empty:
                    news.get()
                    continue
                assert own is not None
                own.run(work)
                if own.error is not None and not isinstance(own.error, Exception):
                    raise own.error  # an interrupt of this thread waits for nobody's turn
                del own
        if failure is not None:
            raise failure
    finally:
        with contextlib.suppress(Empty):
            while True:
                todo.get_nowait()
        for _ in helpers:
            todo.put(None)
        for helper in helpers:
            helper.join()


def _forget() -> None:
    """In a forked child nobody shares, and the lock may have been held."""
    global _lock, _sharing
    _lock, _sharing = threading.Lock(), 0


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_forget)
