"""The text that stands, as it grows: told, timed, and with log probabilities where they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from lynxkv.events import Event, Verified
from lynxkv.sampling import logprobs
from lynxkv.text import GrowingText, ToText


class VerifiedText(GrowingText):
    """A growing text that tells of what has been added to it.

    Args:
        now: seconds on the clock that results are timed by.
        on_event: is told of verified tokens, with the log probabilities of `top_logprobs` others, if that is not None.

    Attributes:
        first_s: when its first token stood; None before that.

    Raises:
        InputError: `stop` is not a list of texts.
    """

    def __init__(
        self,
        to_text: ToText,
        *,
        eos_token_ids: frozenset[int],
        stop: Sequence[str],
        max_tokens: int,
        now: Callable[[], float],
        on_event: Callable[[Event], None],
        top_logprobs: int | None,
    ) -> None:
        super().__init__(to_text, eos_token_ids=eos_token_ids, stop=stop, max_tokens=max_tokens)
        self._now, self._on_event, self._top_logprobs = now, on_event, top_logprobs
        self.first_s: float | None = None

    def stand(self, token_ids: Sequence[int], logits: Tensor) -> None:
        """Add tokens, as far as the text goes on. `logits` [n, V]: of the positions before them."""
        stood, released = self.add_all(token_ids)
        if not stood:
            return
        if self.first_s is None:
            self.first_s = self._now()
        top = self._top_logprobs
        told = None if top is None else [logprobs(logits[i], token, top) for i, token in enumerate(stood)]
        self._on_event(Verified(stood, released, told))
