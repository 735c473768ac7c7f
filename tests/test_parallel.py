"""Work shared out to threads: in order, bounded, and failing as it would without threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from lynxkv.parallel import map_ordered, threads, torch_alone


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_results_come_in_order(threads: int) -> None:
    assert list(map_ordered(lambda number: number**2, range(50), threads=threads)) == [n**2 for n in range(50)]


def test_works_run_at_the_same_time() -> None:
    barrier = threading.Barrier(3, timeout=10)
    assert len(list(map_ordered(lambda _: barrier.wait(), range(6), threads=3))) == 6


@pytest.mark.parametrize("threads", [1, 3])
def test_few_items_are_held(threads: int) -> None:
    taken = 0

    def items() -> Iterator[int]:
        nonlocal taken
        for number in range(100):
            taken += 1
            yield number

    for number in map_ordered(lambda number: number, items(), threads=threads):
        assert taken - number <= 2 * threads


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize(("broken", "ends"), [(3, None), (3, 5), (None, 5)])
def test_the_first_error_is_raised(threads: int, broken: int | None, ends: int | None) -> None:
    """Whether a work or the source of items fails first, and however far others have got."""
    done = []

    def items() -> Iterator[int]:
        for number in range(20):
            if number == ends:
                raise KeyError(number)
            yield number

    def work(number: int) -> int:
        if number in (broken, 7):
            raise ValueError(number)
        done.append(number)
        return number

    kind: type[Exception] = KeyError if broken is None else ValueError
    first = min(number for number in (broken, ends) if number is not None)
    with pytest.raises(kind) as caught:
        list(map_ordered(work, items(), threads=threads))
    assert caught.value.args == (first,)
    assert set(range(first)) <= set(done)


def test_giving_up_stops_the_work() -> None:
    done: list[int] = []
    results = map_ordered(done.append, range(1000), threads=2)
    next(results)
    results.close()  # type: ignore[attr-defined]
    assert len(done) <= 4


def test_torch_works_alone_where_others_share() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with torch_alone(), torch_alone():
            found = list(map_ordered(lambda _: (torch.get_num_threads(), threads()), range(4), threads=threads()))
            assert (torch.get_num_threads(), threads(), found) == (1, 3, [(1, 3)] * 4)
        assert (torch.get_num_threads(), threads()) == (3, 3)
    finally:
        torch.set_num_threads(before)


def test_torch_has_its_threads_again_whoever_ends_first() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    inside, leave = threading.Event(), threading.Event()
    found: list[int] = []

    def other() -> None:
        with torch_alone():
            inside.set()
            leave.wait(10)
        found.append(torch.get_num_threads())

    try:
        worker = threading.Thread(target=other)
        with torch_alone():
            worker.start()
            inside.wait(10)
        leave.set()
        worker.join()
        assert (found, torch.get_num_threads(), threads()) == ([3], 3, 3)
    finally:
        torch.set_num_threads(before)


def test_an_interrupt_of_the_calling_thread_waits_for_nobody() -> None:
    """Not even where earlier works go on, or the source of items has nothing yet."""
    caller, entered, leave = threading.get_ident(), threading.Event(), threading.Event()

    def work(number: int) -> int:
        if threading.get_ident() == caller:
            entered.wait(10)
            raise KeyboardInterrupt
        entered.set()
        leave.wait(10)
        return number

    threading.Timer(0.2, leave.set).start()
    with pytest.raises(KeyboardInterrupt):
        list(map_ordered(work, range(6), threads=2))


def test_a_machine_that_gives_no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        list(map_ordered(lambda number: number, range(6), threads=3))
