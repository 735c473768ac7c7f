"""One thread that generates, and the queue before it: bounded, and fair among those who ask."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


class CancelledRun(Exception):
    """The run was cancelled: nobody waits for its answer any more."""


class Cancellation:
    """Whether a run shall end. It looks between its steps."""

    def __init__(self) -> None:
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        """End the run at its next check."""
        self._cancelled.set()

    def check(self) -> None:
        """Raise CancelledRun if the run shall end."""
        if self._cancelled.is_set():
            raise CancelledRun


@dataclass(frozen=True, kw_only=True)
class _Job:
    work: Callable[[], Any]
    future: Future[Any]


class Worker:
    """Runs one thing at a time, in turn among owners, each owner's in the order of asking."""

    def __init__(self, name: str = "lynxkv-generate") -> None:
        self._waiting: OrderedDict[str, deque[_Job]] = OrderedDict()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    async def run(self, owner: str, work: Callable[[Cancellation], T]) -> T:
        """What `work` returns, once it was its turn. Cancelling this takes it from the queue, or tells it to end."""
        cancellation = Cancellation()
        future: Future[T] = Future()
        self._add(owner, _Job(work=lambda: work(cancellation), future=future))
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            cancellation.cancel()
            raise

    def close(self) -> None:
        """End the thread, once what it runs has ended; what still waits is dropped."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _add(self, owner: str, job: _Job) -> None:
        with self._changed:
            self._waiting.setdefault(owner, deque()).append(job)
            self._changed.notify()

    def _serve(self) -> None:
        while (job := self._next()) is not None:
            if not job.future.set_running_or_notify_cancel():
                continue
            try:
                result = job.work()
            except BaseException as error:
                job.future.set_exception(error)
            else:
                job.future.set_result(result)

    def _next(self) -> _Job | None:
        with self._changed:
            while not self._waiting and not self._closed:
                self._changed.wait()
            if self._closed:
                for jobs in self._waiting.values():
                    for job in jobs:
                        job.future.cancel()
                return None
            owner, jobs = self._waiting.popitem(last=False)
            job = jobs.popleft()
            if jobs:
                self._waiting[owner] = jobs  # at the end: it is the others' turn
            return job
