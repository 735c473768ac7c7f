"""Work shared out to a few threads; results come in the order of what they were made from."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


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
