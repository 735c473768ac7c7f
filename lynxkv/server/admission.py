"""What may enter: how many requests at a time, and runs of what size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from lynxkv.draft import DRAFT_BYTES
from lynxkv.fetch.options import WINDOW_BYTES
from lynxkv.models import DecoderModel
from lynxkv.server.problems import Refusal

RETRY_AFTER_S = 1


class Places:
    """Places of a bounded queue. Among several owners, none may take more than half of them.

    Used on one event loop, so that nothing needs a lock.
    """

    def __init__(self, places: int, *, shared: bool) -> None:
        self._places = places
        self._most = max(1, places // 2) if shared else places
        self._taken: Counter[str] = Counter()
        self.closed = False

    @property
    def taken(self) -> int:
        """Requests that run or wait."""
        return self._taken.total()

    @contextmanager
    def take(self, owner: str) -> Iterator[None]:
        """A place for one request.

        Raises:
            Refusal: there is none, or the server is stopping.
        """
        if self.closed:
            raise _busy("the server is stopping")
        if self.taken >= self._places or self._taken[owner] >= self._most:
            raise _busy("too many requests wait already")
        self._taken[owner] += 1
        try:
            yield
        finally:
            self._taken[owner] -= 1
            self._taken += Counter()  # forgets owners without requests


def run_bytes(model: DecoderModel, tokens: int, new_tokens: int) -> int:
    """An upper estimate of what a run holds beside the weights: live cache, anchor codes, what is in flight, logits.

    Args:
        tokens: of cache, prompt and answer together.
    """
    token_bytes = model.new_cache(0, 1, rollback_tokens=1).nbytes
    logits = min(DRAFT_BYTES, 3 * 4 * model.vocab_tokens * new_tokens)
    # Codes take a byte an element, which is no more than the element itself does.
    return 2 * token_bytes * tokens + WINDOW_BYTES + logits


def check_memory(needed: int, held: int, limit: int) -> None:
    """Refuse a run that does not fit beside the bytes that are `held`, or would not fit at any time."""
    if needed > limit:
        raise Refusal(
            f"prompt and answer would take {needed >> 20} MiB of the {limit >> 20} MiB that a run may use",
            code="context_length_exceeded",
            hint="use a shorter prompt, or ask for fewer tokens",
        )
    if needed + held > limit:
        raise _busy("too little memory is free")


def _busy(message: str) -> Refusal:
    return Refusal(message, status=503, code="overloaded", retry_after_s=RETRY_AFTER_S)
