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
    """Jobs of a lane start in the order they were submitted in, urgent ones first: a job may wait for those that were
    submitted before it, and for no others.
    """

    lane: Lane
    in_turn: bool
    number: int
    size: int = field(compare=False)
    work: Callable[[], Coroutine[Any, Any, Any]] = field(compare=False)
    future: Future[Any] = field(compare=False)


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
        # How many bytes may be on their way, and how many have come since when; see `IN_FLIGHT_BYTES`.
        self._most, self._came, self._since = IN_FLIGHT_BYTES, 0, 0.0
        self._tasks: set[asyncio.Task[Any]] = set()
        self.closed = False

    def submit(
        self, lane: Lane, work: Callable[[], Coroutine[Any, Any, T]], *, size: int = 0, urgent: bool = False
    ) -> Future[T]:
        """Run a coroutine as soon as it is its turn.

        Args:
            size: bytes that it asks for itself, where they are enough to count.
            urgent: before others of its lane, as little as it brings. It may wait for no other job.

        Raises:
            StoreError: the reader is closed; so does the future, if that happens meanwhile.
        """
        self.check_open()
        job = _Job(lane, not urgent, next(self._numbers), size, work, Future())
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
        if task is not None and self._running.pop(task, None) is not None:
            self._start()

    def arrived(self, count: int) -> None:
        """Called on the loop when so many bytes have come in."""
        self._came += count
        if self._came < self._most:
            return
        now = self._loop.time()
        if now - self._since <= IN_FLIGHT_S:
            self._most *= 2
            self._start()
        self._came, self._since = 0, now

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
            first = self._waiting[0]
            in_flight = sum(job.size for job in self._running.values())
            if self._running and min(job.lane for job in self._running.values()) < first.lane:
                return
            if first.size and in_flight and in_flight + first.size > self._most:
                return
            if not in_flight:
                self._came, self._since = 0, self._loop.time()
            job = heapq.heappop(self._waiting)
            if job.future.set_running_or_notify_cancel():
                task = self._loop.create_task(self._run(job))
                self._running[task] = job
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

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
