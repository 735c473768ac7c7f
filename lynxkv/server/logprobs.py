"""Log probabilities, as OpenAI's API tells them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lynxkv.events import TokenLogprobs
from lynxkv.server.requests import Kind

# JSON has no infinity: what a model rules out has this instead, as in OpenAI's API.
LEAST = -9999.0


class Logprobs:
    """Tells those of one answer, whole or piece by piece."""

    def __init__(self, kind: Kind, token_bytes: Callable[[int], bytes]) -> None:
        self._kind, self._bytes = kind, token_bytes
        self._characters = 0

    def told(self, items: Sequence[TokenLogprobs] | None) -> dict[str, Any] | None:
        """Those of the next tokens of the answer; None if they were not asked for."""
        if items is None:
            return None
        return {"content": list(map(self._of_chat, items))} if self._kind == "chat" else self._of_completion(items)

    def _of_chat(self, item: TokenLogprobs) -> dict[str, Any]:
        top = [self._entry(token_id, logprob) for token_id, logprob in item.top]
        return {**self._entry(item.token_id, item.logprob), "top_logprobs": top}

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = self._bytes(token_id)
        return {"token": data.decode(errors="replace"), "logprob": max(logprob, LEAST), "bytes": list(data)}

    def _of_completion(self, items: Sequence[TokenLogprobs]) -> dict[str, Any]:
        tokens = [self._name(item.token_id) for item in items]
        offsets = []
        for item in items:
            offsets.append(self._characters)
            self._characters += len(self._bytes(item.token_id).decode(errors="ignore"))
        return {
            "tokens": tokens,
            "token_logprobs": [max(item.logprob, LEAST) for item in items],
            # The token itself is among them, even if it is less likely.
            "top_logprobs": [
                {
                    self._name(token_id): max(value, LEAST)
                    for token_id, value in [*item.top, (item.token_id, item.logprob)]
                }
                for item in items
            ],
            "text_offset": offsets,
        }

    def _name(self, token_id: int) -> str:
        """A token's text; of a part of a character its bytes, so that names differ."""
        data = self._bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
