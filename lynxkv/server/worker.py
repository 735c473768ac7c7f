"""What waits to be run: fair among those who ask, several together where they go together, as much as memory allows.

Runs are threads that compute in turns, so that one which waits for its store holds up no other. Next comes the first
request, in turn among owners, that can start; those that go with it come along. While a run loads a cache, others that
would load it too wait for that.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from lynxkv.server.admission import Memory
from lynxkv.server.turns import Ticket, Turns

R = TypeVar("R")


class CancelledRun(Exception):
    """The run was cancelled: nobody waits for its answer any more."""


class Cancellation:
    """Whether a run shall end. It looks between its steps."""

    def __init__(self) -> None:
        self._cancelled = threading.Event()

    @property
    def cancelled(self) -> bool:
        """Whether it shall."""
        return self._cancelled.is_set()

    def cancel(self) -> None:
        """End the run at its next check."""
        self._cancelled.set()

    def check(self) -> None:
        """Raise CancelledRun if the run shall end."""
        if self.cancelled:
            raise CancelledRun


class Work(Protocol):
    """What a request wants done."""

    @property
    def together(self) -> Hashable | None:
        """Work that is equal in this can be done together; None: this is done alone. It may change while it waits."""

    @property
    def loads(self) -> Hashable | None:
        """What it has to load from a store; None: what it needs is here."""


W = TypeVar("W", bound=Work)


@dataclass(kw_only=True, eq=False)
class Job(Generic[W, R]):
    """Work that somebody waits for."""

    owner: str
    work: W
    future: Future[R] = field(default_factory=Future)
    cancellation: Cancellation = field(default_factory=Cancellation)

    @property
    def wanted(self) -> bool:
        """Whether somebody still waits for it."""
        return not self.cancellation.cancelled

    @property
    def settled(self) -> bool:
        """Whether its result is there, or what went wrong."""
        return self.future.done()

    def settle(self, work: Callable[[], R]) -> None:
        """Answer with what `work` returns or raises."""
        try:
            result = work()
        except BaseException as error:
            self.fail(error)
        else:
            self.future.set_result(result)

    def fail(self, error: BaseException) -> None:
        """Answer with an error, if there is no answer yet."""
        if not self.settled:
            self.future.set_exception(error)


class Worker(Generic[W, R]):
    """Runs what it is asked for.

    Args:
        execute: does the work of some jobs that go together, and settles them. It is given what to call once all that
            they had to load is there.
        bytes_of: what some work together may take.
        alike: whether some work is worth doing together.
        runs: so many want to compute at a time; those that wait for a store are not counted.
        rows: so many jobs go together at most.
        threads: so many run in all.
        prepare: called in each new thread.
    """

    def __init__(
        self,
        execute: Callable[[Sequence[Job[W, R]], Callable[[], None]], None],
        bytes_of: Callable[[Sequence[W]], int],
        alike: Callable[[Sequence[W]], bool],
        *,
        turns: Turns,
        memory: Memory,
        runs: int,
        rows: int,
        threads: int,
        prepare: Callable[[], Any] = lambda: None,
    ) -> None:
        self._execute, self._bytes_of, self._alike = execute, bytes_of, alike
        self._turns, self._memory = turns, memory
        self._runs, self._rows, self._threads = runs, rows, threads
        self._waiting: OrderedDict[str, list[Job[W, R]]] = OrderedDict()
        self._loading: Counter[Hashable] = Counter()
        self._running = 0
        self._lock = threading.RLock()
        self._closed = False
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="lynxkv-run", initializer=prepare)
        turns.on_fewer = memory.on_more = self._start

    async def run(self, owner: str, work: W) -> R:
        """The result of `work`, once it was its turn. Cancelling this takes it from the queue, or tells it to end."""
        job: Job[W, R] = Job(owner=owner, work=work)
        with self._lock:
            self._waiting.setdefault(owner, []).append(job)
        self._start()
        try:
            return await asyncio.wrap_future(job.future)
        except asyncio.CancelledError:
            job.cancellation.cancel()
            with self._lock:
                self._take([job] if job in self._waiting.get(owner, ()) else [])
            self._start()
            raise

    def close(self) -> None:
        """Wait for what runs; what still waits is dropped."""
        with self._lock:
            self._closed = True
            for jobs in self._waiting.values():
                for job in jobs:
                    job.future.cancel()
            self._waiting.clear()
        self._pool.shutdown()

    def _start(self) -> None:
        """Start what can be started."""
        with self._lock:
            while not self._closed and self._may_start and (jobs := self._pick()):
                self._take(jobs)
                self._running += 1
                held = self._bytes_of([job.work for job in jobs])
                self._memory.hold(held)
                loads = jobs[0].work.loads
                if loads is not None:
                    self._loading[loads] += 1
                self._pool.submit(self._serve, jobs, self._turns.ask(), loads, held)

    @property
    def _may_start(self) -> bool:
        return self._turns.wanted < self._runs and self._running < self._threads

    def _serve(self, jobs: list[Job[W, R]], ticket: Ticket, loads: Hashable | None, held: int) -> None:
        loaded = _Once(partial(self._loaded, loads))
        try:
            with self._turns.taken(ticket):
                running = [job for job in jobs if job.future.set_running_or_notify_cancel()]
                try:
                    self._execute(running, loaded)
                except BaseException as error:
                    for job in running:
                        job.fail(error)
        finally:
            with self._lock:
                self._running -= 1
            self._memory.free(held)
            loaded()

    def _loaded(self, loads: Hashable | None) -> None:
        with self._lock:
            if loads is not None:
                self._loading -= Counter([loads])
        self._start()

    def _pick(self) -> list[Job[W, R]] | None:
        """The next ones; None if there are none, or there is no memory for the one whose turn it is."""
        for job in self._in_turn():
            if job.work.loads not in self._loading:
                return self._with_company(job) if self._fits([job]) else None
        return None

    def _with_company(self, first: Job[W, R]) -> list[Job[W, R]]:
        jobs, together = [first], first.work.together
        for job in self._in_turn():
            if together is None or len(jobs) == self._rows:
                break
            if job is first or job.work.together != together:
                continue
            if self._alike([item.work for item in [*jobs, job]]) and self._fits([*jobs, job]):
                jobs.append(job)
        return jobs

    def _fits(self, jobs: list[Job[W, R]]) -> bool:
        return self._memory.fits(self._bytes_of([job.work for job in jobs]))

    def _in_turn(self) -> Iterator[Job[W, R]]:
        """All that wait: the first of each owner, then the second of each."""
        rounds = max(map(len, self._waiting.values()), default=0)
        for number in range(rounds):
            for jobs in list(self._waiting.values()):
                if number < len(jobs):
                    yield jobs[number]

    def _take(self, jobs: list[Job[W, R]]) -> None:
        """Take jobs from the queue; it is then the others' turn."""
        for job in jobs:
            own = self._waiting[job.owner]
            own.remove(job)
            self._waiting.move_to_end(job.owner)
            if not own:
                del self._waiting[job.owner]


class _Once:
    """Calls something the first time that it is called."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work, self._lock, self._done = work, threading.Lock(), False

    def __call__(self) -> None:
        with self._lock:
            first, self._done = not self._done, True
        if first:
            self._work()
