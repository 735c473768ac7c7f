"""What runs next, and what goes with it; and runs that compute in turns."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import pytest

from lynxkv.fetch.waiting import result_of
from lynxkv.server.admission import Memory
from lynxkv.server.turns import Turns
from lynxkv.server.worker import Cancellation, CancelledRun, Job, Worker
from tests.server.conftest import eventually


@dataclass(eq=False)
class Task:
    """Work whose result is its name."""

    name: str
    together: str | None = None
    loads: str | None = None
    size: int = 1
    run: Callable[[Cancellation], Any] = field(default=lambda cancellation: None)


@dataclass
class Office:
    """A worker and what it did: the names of those that were run together, in order."""

    worker: Worker[Task, str]
    turns: Turns
    memory: Memory
    done: list[str]
    loaded: dict[str, Callable[[], None]]

    def ask(self, task: Task) -> asyncio.Future[str]:
        """A task of the owner that its name starts with."""
        return asyncio.ensure_future(self.worker.run(task.name[0], task))


def office(*, runs: int = 1, rows: int = 3, memory: int = 100, threads: int = 8) -> Office:
    done: list[str] = []
    loaded: dict[str, Callable[[], None]] = {}
    turns, bytes_held = Turns(), Memory(memory)

    def execute(jobs: Sequence[Job[Task, str]], when_loaded: Callable[[], None]) -> None:
        done.append("+".join(job.work.name for job in jobs))
        for job in jobs:
            loaded[job.work.name] = when_loaded
            job.settle(lambda job=job: job.work.run(job.cancellation) or job.work.name)  # type: ignore[misc]

    worker: Worker[Task, str] = Worker(
        execute,
        lambda tasks: sum(task.size for task in tasks),
        lambda tasks: len({task.size for task in tasks}) == 1,
        turns=turns,
        memory=bytes_held,
        runs=runs,
        rows=rows,
        threads=threads,
    )
    return Office(worker, turns, bytes_held, done, loaded)


def scene(play: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30):
            await play()

    asyncio.run(bounded())


class Held:
    """Work that goes on until it is let go."""

    def __init__(self) -> None:
        self.started, self.go = threading.Event(), threading.Event()

    def __call__(self, cancellation: Cancellation) -> None:
        self.started.set()
        assert self.go.wait(30)


async def beside(held: Held, place: Office, tasks: Sequence[Task], *, size: int = 1) -> list[str]:
    """The results of tasks that were asked for, in this order, while something else ran."""
    first = place.ask(Task("z", run=held, size=size))
    assert await asyncio.to_thread(held.started.wait, 30)
    asked = [place.ask(task) for task in tasks]
    await asyncio.sleep(0)  # all are in the queue
    held.go.set()
    results = await asyncio.gather(first, *asked)
    await asyncio.to_thread(place.worker.close)
    assert place.memory.held == 0
    assert place.turns.wanted == 0
    return results[1:]


def test_owners_take_turns() -> None:
    async def play() -> None:
        place = office()
        names = ["a1", "a2", "a3", "b1", "c1", "b2"]
        assert await beside(Held(), place, [Task(name) for name in names]) == names
        assert place.done == ["z", "a1", "b1", "c1", "a2", "b2", "a3"]

    scene(play)


def test_what_goes_together_comes_along() -> None:
    async def play() -> None:
        place = office(rows=3)
        tasks = [
            Task("a1", "x"), Task("a2", "x"), Task("a3", "y"), Task("b1", "x"), Task("b2"), Task("c1", "x"),
            Task("c2", "x", size=2),
        ]  # fmt: skip
        assert await beside(Held(), place, tasks) == [task.name for task in tasks]
        # The first of each owner, up to three; then those who have waited longest; another size is not worth it.
        assert place.done == ["z", "a1+b1+c1", "a2", "b2", "c2", "a3"]

    scene(play)


def test_no_more_than_memory_holds() -> None:
    async def play() -> None:
        place = office(memory=5, runs=4)
        tasks = [
            Task("a1", "x", size=2),
            Task("a2", "x", size=2),
            Task("a3", "x", size=2),
            Task("b1", size=5),
            Task("c1"),
        ]
        assert await beside(Held(), place, tasks, size=5) == [task.name for task in tasks]
        # There is room for two of 2, and nobody overtakes the one of 5 meanwhile.
        assert place.done[:3] == ["z", "a1+a2", "b1"]
        assert sorted(place.done[3:]) == ["a3", "c1"]

    scene(play)


def test_others_wait_for_who_loads_the_same() -> None:
    async def play() -> None:
        place, store = office(), Future[str]()
        first = place.ask(Task("a1", "u", loads="u", run=lambda cancellation: result_of(store)))
        await asyncio.to_thread(eventually, lambda: place.done == ["a1"])
        waiting = [place.ask(Task(name, "u", loads="u")) for name in ("a2", "b1")]
        assert await place.ask(Task("a3", "v", loads="v")) == "a3"  # another's load is not in its way
        assert place.done == ["a1", "a3"]
        place.loaded["a1"]()
        assert await asyncio.gather(*waiting) == ["a2", "b1"]
        assert place.done == ["a1", "a3", "b1+a2"]
        store.set_result("late")
        assert await first == "late"
        place.worker.close()

    scene(play)


def test_who_waits_for_a_store_gives_way() -> None:
    async def play() -> None:
        place, store = office(runs=1), Future[str]()
        hangs = place.ask(Task("a1", run=lambda cancellation: result_of(store)))
        await asyncio.to_thread(eventually, lambda: place.done == ["a1"] and place.turns.wanted == 0)
        assert await place.ask(Task("b1")) == "b1"
        store.set_result("late")
        assert await hangs == "late"
        place.worker.close()

    scene(play)


def test_runs_compute_in_turns() -> None:
    turns, steps = Turns(), list[str]()

    def run(name: str) -> None:
        with turns.taken(turns.ask()):
            if not steps:
                eventually(lambda: turns.wanted == 2)
            for _ in range(3):
                steps.append(name)
                turns.pass_on()

    threads = [threading.Thread(target=run, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert "".join(steps) in ("ababab", "bababa")
    assert turns.wanted == 0
    turns.pass_on()  # who has no turn has none to pass on


def test_cancelling_takes_from_the_queue_or_ends_the_run() -> None:
    async def play() -> None:
        place, started, ended = office(), threading.Event(), threading.Event()
        never: list[int] = []

        def run(cancellation: Cancellation) -> None:
            started.set()
            try:
                while True:
                    cancellation.check()
                    time.sleep(0.001)
            except CancelledRun:
                ended.set()
                raise

        runs_now, waits = place.ask(Task("a", run=run)), place.ask(Task("a", run=lambda cancellation: never.append(1)))
        await asyncio.to_thread(started.wait, 30)
        waits.cancel()
        runs_now.cancel()
        for task in (runs_now, waits):
            with pytest.raises(asyncio.CancelledError):
                await task
        assert await asyncio.to_thread(ended.wait, 30)
        assert await place.ask(Task("b")) == "b"
        place.worker.close()
        assert never == []

    scene(play)


def test_what_fails_fails_alone() -> None:
    def broken(cancellation: Cancellation) -> None:
        raise OSError("broken")

    async def play() -> None:
        place = office(memory=1)
        first, second = place.ask(Task("a", run=broken)), place.ask(Task("b"))
        with pytest.raises(OSError, match="broken"):
            await first
        assert await second == "b"
        place.worker.close()

    scene(play)
