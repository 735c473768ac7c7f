"""Runs beside one another: one computes at a time, and gives way before a model step and while it waits for a store."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lynxkv.fetch.waiting import waiting_within
from lynxkv.integrations.hf import BatchCache, Model


class Ticket:
    """Somebody's place in the row of those who want to compute."""


class Turns:
    """Who computes: the first of those who want to, in the order in which they asked.

    Attributes:
        on_fewer: called, by any thread, when fewer want to than before.
    """

    def __init__(self) -> None:
        self._row: deque[Ticket] = deque()
        self._moved = threading.Condition()
        self._own = threading.local()
        self.on_fewer: Callable[[], None] = lambda: None

    @property
    def wanted(self) -> int:
        """How many want to compute, the one that does included."""
        return len(self._row)

    def ask(self) -> Ticket:
        """A place at the end of the row, to be taken with `taken`."""
        ticket = Ticket()
        with self._moved:
            self._row.append(ticket)
        return ticket

    @contextmanager
    def taken(self, ticket: Ticket) -> Iterator[None]:
        """Compute within this, as long as nothing has to be waited for."""
        self._own.runs = True
        self._wait(ticket)
        try:
            with waiting_within(self._aside):
                yield
        finally:
            self._own.runs = False
            self._leave()
            self.on_fewer()

    def pass_on(self) -> None:
        """Let those who wait have a step each, if this thread has the turn."""
        if getattr(self._own, "runs", False) and len(self._row) > 1:
            ticket = self.ask()
            self._leave()
            self._wait(ticket)

    @contextmanager
    def _aside(self) -> Iterator[None]:
        self._leave()
        self.on_fewer()
        try:
            yield
        finally:
            self._wait(self.ask())

    def _wait(self, ticket: Ticket) -> None:
        with self._moved:
            self._moved.wait_for(lambda: self._row[0] is ticket)

    def _leave(self) -> None:
        with self._moved:
            self._row.popleft()
            self._moved.notify_all()


@dataclass(frozen=True, kw_only=True)
class SharedModel(Model):
    """A model whose steps take turns."""

    turns: Turns = field(default_factory=Turns)

    @classmethod
    def of(cls, model: Model) -> SharedModel:
        """The same model, shared."""
        return cls(**vars(model))

    def step(self, cache: Any, token_ids: Sequence[int], *, rows: int = 1) -> Tensor:
        """As `Model.step`, when it is this run's turn."""
        self.turns.pass_on()
        return super().step(cache, token_ids, rows=rows)

    def batch_step(self, cache: BatchCache, token_ids: Sequence[Sequence[int]], *, rows: int = 1) -> Tensor:
        """As `Model.batch_step`, when it is this run's turn."""
        self.turns.pass_on()
        return super().batch_step(cache, token_ids, rows=rows)
