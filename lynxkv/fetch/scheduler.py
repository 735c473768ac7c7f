"""Who may ask when: jobs in lanes on fsspec's event loop, so many at a time, the Anchor's before the Residual's."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import os
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, TypeVar

from fsspec.asyn import get_loop

from lynxkv.errors import StoreError
from lynxkv.fetch.options import IN_FLIGHT_BYTES, IN_FLIGHT_S

T = TypeVar("T")
# How long closing waits for what it has cancelled.
CLOSE_S = 2.0


class Lane(IntEnum):
    """No job starts while one of a lower lane waits or runs."""

    ANCHOR = 0
    RESIDUAL = 1


@dataclass(order=True)
class _Job:
    lane: Lane
    number: int
    size: int = field(compare=False)
    work: Callable[[], Coroutine[Any, Any, Any]] = field(compare=False)
    future: Future[Any] = field(compare=False)
    began: float = field(compare=False, default=0.0)


class Scheduler:
    """The jobs of one reader. What blocks them goes to `workers`, what they compute to as many threads as processors:
    whoever starts a thread waits until it runs, here the event loop.
    """

    def __init__(self, concurrency: int, *, what: str) -> None:
        self.workers = ThreadPoolExecutor(concurrency, thread_name_prefix="lynxkv-fetch")
        self._computing = ThreadPoolExecutor(
            min(concurrency, os.cpu_count() or 1), thread_name_prefix="lynxkv-fetch-check"
        )
        self._loop: asyncio.AbstractEventLoop = get_loop()
        self._process = os.getpid()
        self._concurrency, self._what = concurrency, what
        self._numbers = itertools.count()
        # Touched on the loop only.
        self._waiting: list[_Job] = []
        self._running: dict[asyncio.Task[Any], _Job] = {}
        self._bytes_per_s = 0.0
        self._tasks: set[asyncio.Task[Any]] = set()
        self.closed = False

    def submit(self, lane: Lane, work: Callable[[], Coroutine[Any, Any, T]], *, size: int = 0) -> Future[T]:
        """Run a coroutine, which brings `size` bytes, as soon as it is its turn.

        Raises:
            StoreError: the reader is closed; so does the future, if that happens meanwhile.
        """
        self.check_open()
        job = _Job(lane, next(self._numbers), size, work, Future())
        self._loop.call_soon_threadsafe(self._enqueue, job)
        return job.future

    def check_open(self) -> None:
        """Raise a StoreError if the reader is closed."""
        if self.closed:
            raise self._closed_error()
        if os.getpid() != self._process:  # the loop's thread is not in a forked child
            raise StoreError(
                f"{self._what}: the reader belongs to another process", hint="open the cache after forking"
            )

    async def compute(self, work: Callable[..., T], *arguments: Any) -> T:
        """Run a function that waits for nothing on a thread that computes, from inside a job."""
        return await asyncio.wrap_future(self.start(work, *arguments))

    async def block(self, work: Callable[..., T], *arguments: Any) -> T:
        """Run a function that may wait, for a disk or a store, on one of `workers`, from inside a job."""
        return await asyncio.wrap_future(self.workers.submit(work, *arguments))

    def start(self, work: Callable[..., T], *arguments: Any) -> Future[T]:
        """Have a function run on a thread that computes."""
        return self._computing.submit(work, *arguments)

    def give_way(self) -> None:
        """Called by a job that needs the network no more: the next one may start."""
        task = asyncio.current_task()
        job = self._running.get(task) if task is not None else None
        if task is None or job is None:
            return
        if job.size:
            together = sum(1 for other in self._running.values() if other.size)
            self._bytes_per_s = together * job.size / max(1e-6, self._loop.time() - job.began)
        del self._running[task]
        self._start()

    def close(self) -> None:
        """Cancel everything; when this returns, no request of this reader is open any more."""
        if self.closed:
            return
        self.closed = True
        done = asyncio.run_coroutine_threadsafe(self._cancel(), self._loop)
        try:
            on_loop = asyncio.get_running_loop() is self._loop
        except RuntimeError:
            on_loop = False
        if not on_loop:  # waiting there would keep the loop from cancelling
            with contextlib.suppress(TimeoutError):
                done.result(CLOSE_S)
        for pool in (self.workers, self._computing):
            pool.shutdown(wait=False, cancel_futures=True)

    def _enqueue(self, job: _Job) -> None:
        if self.closed:
            job.future.set_exception(self._closed_error())
            return
        heapq.heappush(self._waiting, job)
        self._start()

    def _start(self) -> None:
        while self._waiting and len(self._running) < self._concurrency:
            if self._running and (self._is_late(self._waiting[0].lane) or not self._has_room(self._waiting[0].size)):
                return
            job = heapq.heappop(self._waiting)
            if job.future.set_running_or_notify_cancel():
                task = self._loop.create_task(self._run(job))
                self._running[task] = job
                job.began = self._loop.time()
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    def _is_late(self, lane: Lane) -> bool:
        return min(job.lane for job in self._running.values()) < lane

    def _has_room(self, size: int) -> bool:
        """Whether so many bytes more may be on their way. All that are share the link: the more, the later come those
        that decoding goes on with.
        """
        in_flight = sum(job.size for job in self._running.values())
        return in_flight + size <= max(IN_FLIGHT_BYTES, self._bytes_per_s * IN_FLIGHT_S)

    async def _run(self, job: _Job) -> None:
        try:
            job.future.set_result(await job.work())
        except asyncio.CancelledError:
            job.future.set_exception(self._closed_error())
        except BaseException as error:
            job.future.set_exception(error)
        finally:
            self.give_way()

    async def _cancel(self) -> None:
        for job in self._waiting:
            if job.future.set_running_or_notify_cancel():
                job.future.set_exception(self._closed_error())
        self._waiting.clear()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _closed_error(self) -> StoreError:
        return StoreError(f"{self._what}: the reader is closed", hint="read inside the `with` block of lynxkv.open")
