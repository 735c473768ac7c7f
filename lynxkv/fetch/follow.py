"""A chain whose writer is still at work (SPEC 9.5): its next span is looked for until it is there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future

from lynxkv.errors import BindingError, CacheNotFoundError, WriterStoppedError
from lynxkv.fetch.chain import check_continues, open_parent
from lynxkv.fetch.scheduler import Lane, Scheduler
from lynxkv.fetch.span import SpanReader
from lynxkv.format.document import span_name
from lynxkv.layout import PartOf, SpanRef
from lynxkv.store import Store

# Between two looks; twice as long each time.
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0

Opens = Callable[[str, int], SpanReader]
"""Asks for the cache at a URL, as the span of this number."""
Drops = Callable[[SpanReader], None]
"""Forgets one that is not there."""


class Following:
    """Looks for the spans of the chain that will end with the cache of `store`, from when it is made.

    Attributes:
        spans: those found so far, opened and checked.
        stop: where the chain will stop; known with the first span.
        complete: whether the last one has been found.
    """

    def __init__(self, store: Store, opens: Opens, drops: Drops, scheduler: Scheduler, patience_s: float) -> None:
        self._store, self._opens, self._drops = store, opens, drops
        self._scheduler, self._patience_s = scheduler, patience_s
        self.spans: list[SpanReader] = []
        self.stop = 0
        self.complete = False
        self._number = 0
        self._batches: list[Future[list[SpanReader] | None]] = [Future()]
        self._job = scheduler.submit(Lane.ANCHOR, self._watch)
        self._job.add_done_callback(self._end)

    def batch(self, number: int) -> Future[list[SpanReader] | None]:
        """Spans that are found together, in order; None after the last ones.

        Fails with a `WriterStoppedError` if nothing new was there for too long, a `BindingError` if what is there is
        part of another chain, and as opening does.
        """
        return self._batches[number]

    def wait(self) -> None:
        """Wait until the chain is complete; raises as `batch`."""
        self._job.result()

    async def _watch(self) -> None:
        self._scheduler.give_way()  # others may ask while this one waits
        while not self.complete:
            found = await self._next()
            new = [*await self._missing_before(found), found]
            self._check(found)
            self.spans += new
            self.complete = self._is_last(found)
            self._batches.append(Future())
            self._batches[-2].set_result(new)

    def _end(self, job: Future[None]) -> None:
        """Tell those who wait for what will not come."""
        error = job.exception()
        if error is None:
            self._batches[-1].set_result(None)
        else:
            self._batches[-1].set_exception(error)

    async def _next(self) -> SpanReader:
        """The next span, or the last one; waits until one of them is there."""
        loop = asyncio.get_running_loop()
        began, pause = loop.time(), FIRST_PAUSE_S
        while True:
            for name in (span_name(self._store.name, self._number), self._store.name):
                span = await self._scheduler.block(self._opens, self._store.sibling(name), len(self.spans))
                try:
                    await span.open()
                except CacheNotFoundError:
                    self._drops(span)
                    continue
                return span
            if loop.time() - began > self._patience_s:
                raise self._stopped()
            await asyncio.sleep(min(pause, max(0.0, began + self._patience_s - loop.time())))
            pause = min(2 * pause, LONGEST_PAUSE_S)

    async def _missing_before(self, found: SpanReader) -> list[SpanReader]:
        """The spans that a new one continues and that are not known: of other prompts, or written just now."""
        refs = found.header.parent.spans if found.header.parent is not None else ()
        known = tuple(map(ref_of, self.spans))
        if refs[: len(known)] != known:
            raise BindingError(
                f"{found.url}: does not continue what was there before",
                hint="another writer has begun anew: start again",
            )
        new = []
        for number, ref in enumerate(refs[len(known) :], len(known)):
            new.append(await self._scheduler.block(self._opens, self._store.sibling(ref.name), number))
        await asyncio.gather(*(open_parent(span, found.header, span.number) for span in new))
        for span, ref in zip(new, refs[len(known) :], strict=True):
            span.cut(ref.stop)
        taken = {ref.name for ref in refs} | {found.store.name}
        while span_name(self._store.name, self._number) in taken:
            self._number += 1
        found.number = len(known) + len(new)
        return new

    def _check(self, found: SpanReader) -> None:
        """Refuse a span of another chain, or one that cannot be put behind the others."""
        header = found.header
        part_of = header.part_of
        if self._is_last(found):
            part_of = PartOf(name=self._store.name, stop=header.tokens.stop)
        stop = self.stop or (part_of.stop if part_of is not None else 0)
        if part_of != PartOf(name=self._store.name, stop=stop):
            raise BindingError(f"{found.url}: is part of another chain than {self._store.name}")
        for before in self.spans:
            check_continues(before, header)
        self.stop = stop

    def _is_last(self, span: SpanReader) -> bool:
        return span.store.name == self._store.name

    def _stopped(self) -> WriterStoppedError:
        if not self.spans:
            return WriterStoppedError(
                f"{self._store.url}: nobody has begun to write it within {self._patience_s:g} s",
                hint="start lynxkv encode --span-tokens, or allow more time",
            )
        last = self.spans[-1]
        return WriterStoppedError(
            f"{self._store.url}: nothing new was written for {self._patience_s:g} s after position {last.part.stop} of "
            f"{self.stop}",
            hint=f"the writer has stopped: run it again, or use {last.store.name}, which is whole",
        )


def ref_of(span: SpanReader) -> SpanRef:
    """How others name a span."""
    return SpanRef(name=span.store.name, header_sha256=span.anchor_head.header_sha256, stop=span.part.stop)
