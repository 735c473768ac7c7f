"""Answers on their way to a client that may leave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from lynxkv.events import Event
from lynxkv.server.answers import LAST_EVENT, as_event
from lynxkv.server.keys import Caller
from lynxkv.server.outcome import Answer
from lynxkv.server.problems import Refusal
from lynxkv.server.requests import Ask
from lynxkv.server.service import Service

T = TypeVar("T")
# A client that takes nothing for so long is gone, whatever its connection says.
SEND_S = 60.0


class ClientGoneError(Exception):
    """The client has closed its connection."""


async def until_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns; it is cancelled, and has ended, when the client leaves. The body must have been read.

    Raises:
        ClientGoneError: the client left first.
    """
    working, leaving = asyncio.create_task(work), asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Running:
    """An answer in the making, as lines of an event stream.

    `settled` is told of the answer, `refused` of what went wrong after the first lines.
    """

    def __init__(
        self,
        service: Service,
        ask: Ask,
        caller: Caller,
        *,
        settled: Callable[[Answer], None],
        refused: Callable[[Exception], Refusal],
    ) -> None:
        self._settled, self._refused = settled, refused
        self._ask, self._form = ask, service.form(ask)
        self._events: asyncio.Queue[Event | None] = asyncio.Queue()
        self._task = asyncio.create_task(service.answer(ask, caller, self._events.put_nowait))
        self._task.add_done_callback(lambda task: self._events.put_nowait(None))

    async def first(self) -> bytes:
        """The first lines.

        Raises:
            LynxError: there is no answer, and nothing has been sent.
        """
        line = await self._next() or await self._end()
        start = self._form.start()
        return (as_event(start) if start else b"") + line

    async def rest(self) -> AsyncIterator[bytes]:
        """All further lines; an error is the last."""
        while (line := await self._next()) is not None:
            yield line
        if not self._ended:
            try:
                yield await self._end()
            except Exception as error:
                yield as_event(self._refused(error).body)

    async def stop(self) -> None:
        """End the run, if it goes on."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    _ended = False

    async def _next(self) -> bytes | None:
        """The next line, None at the end of events."""
        while not self._ended and (event := await self._events.get()) is not None:
            chunk = self._form.event(event, draft=self._ask.draft)
            if chunk is not None:
                return as_event(chunk)
        return None

    async def _end(self) -> bytes:
        self._ended = True
        answer: Answer = await self._task
        self._settled(answer)
        lines = as_event(self._form.end(answer))
        if self._ask.include_usage:
            lines += as_event(self._form.usage(answer))
        return lines + LAST_EVENT


async def _in_time(send: Send, message: Message) -> None:
    async with asyncio.timeout(SEND_S):
        await send(message)


class EventStream(Response):
    """A running answer as server-sent events."""

    media_type = "text/event-stream"

    def __init__(self, first: bytes, running: Running) -> None:
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._first, self._running = first, running

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it, until it ends or the client leaves."""
        try:
            await until_gone(receive, self._send(partial(_in_time, send)))
        except (ClientGoneError, TimeoutError):
            pass
        finally:
            await self._running.stop()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        async for line in self._running.rest():
            await send({"type": "http.response.body", "body": line, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
