"""Text as it grows: token by token, whole characters only, up to an end of text or a stop string."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from lynxkv.errors import InputError

ToText = Callable[[Sequence[int]], str]
Stopped = Literal["eos", "length", "stop"]
UNFINISHED = "\ufffd"


class TextStream:
    """Token ids to text increments whose sum is the text of all ids.

    A token's text can depend on the one before it (spaces) and a character can span tokens: each increment is the
    difference of two decodings that share a few ids of context, and waits for whole characters.
    """

    def __init__(self, to_text: ToText) -> None:
        self._to_text = to_text
        self._ids: list[int] = []
        self._context = 0
        self._done = 0

    def push(self, token_id: int) -> str:
        """The text that one more token completes, perhaps none yet."""
        self._ids.append(token_id)
        new = self._new_text()
        if not new or new.endswith(UNFINISHED):
            return ""
        self._context, self._done = self._done, len(self._ids)
        return new

    def flush(self) -> str:
        """What is left, unfinished characters included."""
        new = self._new_text()
        self._context, self._done = self._done, len(self._ids)
        return new

    def _new_text(self) -> str:
        before = self._to_text(self._ids[self._context : self._done])
        return self._to_text(self._ids[self._context :])[len(before) :]


class GrowingText:
    """Verified tokens and their text, until something ends it.

    `text` never contains a stop string: what might be the start of one is held back until it is clear.

    Attributes:
        token_ids: all tokens, the one that ended the text included.
        text: what has been released.
        stopped: why the text ended; None while it goes on.

    Raises:
        InputError: `stop` is not a list of texts.
    """

    def __init__(
        self, to_text: ToText, *, eos_token_ids: frozenset[int], stop: Sequence[str] = (), max_tokens: int
    ) -> None:
        self._stream = TextStream(to_text)
        self._eos_token_ids = eos_token_ids
        if isinstance(stop, str):
            raise InputError("stop is one string", hint="give a list of strings")
        if not all(isinstance(string, str) for string in stop):
            raise InputError("a stop string is not a string", hint="give the text to end before")
        if not all(stop):
            raise InputError("a stop string is empty", hint="give the text to end before, or leave it out")
        self._stop = list(stop)
        self._max_tokens = max_tokens
        self._held = ""
        self.token_ids: list[int] = []
        self.text = ""
        self.stopped: Stopped | None = None

    def add(self, token_id: int) -> str:
        """Take one token and return the text it releases."""
        assert self.stopped is None
        self.token_ids.append(token_id)
        if token_id in self._eos_token_ids:
            self.stopped = "eos"
        else:
            self._held += self._stream.push(token_id)
            if len(self.token_ids) == self._max_tokens:
                self.stopped = "length"
        if self.stopped:
            self._held += self._stream.flush()
        found = [place for place in map(self._held.find, self._stop) if place >= 0]
        if found:
            self.stopped = "stop"
            self._held = self._held[: min(found)]
        return self._release()

    def add_all(self, token_ids: Iterable[int]) -> tuple[list[int], str]:
        """Take tokens as far as the text goes on; those taken, and the text they release."""
        before, released = len(self.token_ids), ""
        for token_id in token_ids:
            if self.stopped:
                break
            released += self.add(token_id)
        return self.token_ids[before:], released

    def _release(self) -> str:
        keep = 0 if self.stopped else max((_overlap(self._held, string) for string in self._stop), default=0)
        out, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        self.text += out
        return out


def _overlap(text: str, string: str) -> int:
    """Length of the longest end of `text` that `string` starts with."""
    longest = min(len(text), len(string) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(string[:size])), 0)
