"""Waiting for what is being fetched: whoever shares a processor with others can give way meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")
Around = Callable[[], AbstractContextManager[None]]

_around: ContextVar[Around] = ContextVar("lynxkv-waiting", default=nullcontext)


@contextmanager
def waiting_within(around: Around) -> Iterator[None]:
    """In this thread, for as long as this lasts, wait for streams within the context manager that `around` makes."""
    token = _around.set(around)
    try:
        yield
    finally:
        _around.reset(token)


def wait_for_one(futures: Iterable[Future[Any]]) -> None:
    """Wait until one of these is done."""
    futures = list(futures)
    if not any(future.done() for future in futures):
        with _around.get()():
            wait(futures, return_when=FIRST_COMPLETED)


def result_of(future: Future[T]) -> T:
    """The result of a future, waiting for it if it has none yet."""
    if future.done():
        return future.result()
    with _around.get()():
        return future.result()
