"""What a client is told of a run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from lynxkv.events import Drafted, Event, Note, Rejected, TokenLogprobs, Verified

Emit = Callable[[Event], None]


class Told:
    """Passes events of a run on to an event loop, from any thread, and knows what they said.

    Attributes:
        verified: whether any text stands.
        logprobs: of the tokens that stand.
    """

    def __init__(self, emit: Emit, loop: asyncio.AbstractEventLoop) -> None:
        self._emit, self._loop = emit, loop
        self._drafted: list[Drafted] = []
        self.verified = False
        self.logprobs: list[TokenLogprobs] = []

    def emit(self, event: Event) -> None:
        """Tell of an event."""
        if isinstance(event, Drafted):
            self._drafted.append(event)
        elif isinstance(event, Verified):
            self.verified, self._drafted = True, []
            self.logprobs.extend(event.logprobs or ())
        self.on_loop(lambda: self._emit(event))

    def on_loop(self, work: Callable[[], None]) -> None:
        """Do something on the event loop, after what has been told."""
        self._loop.call_soon_threadsafe(work)

    def retract(self, why: str) -> None:
        """Take back all drafts, and say why."""
        if self._drafted:
            ids, texts = [event.token_id for event in self._drafted], [event.text for event in self._drafted]
            self.emit(Rejected(ids, "".join(texts)))
        self._drafted = []
        self.emit(Note(why))
