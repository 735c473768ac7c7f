"""From what a request says to token ids."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from transformers import PreTrainedTokenizerBase

from lynxkv.integrations.hf import conversation
from lynxkv.server.problems import Refusal
from lynxkv.server.requests import Ask


class Prompts:
    """Tokenises on a thread of its own, with a tokenizer of its own: some calls change a tokenizer, and the one that
    generates is using the original.

    All methods raise a Refusal for more than `most_tokens`, and an InputError for what no prompt can be made of.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, most_tokens: int) -> None:
        self._tokenizer, self._most_tokens = copy.deepcopy(tokenizer), most_tokens
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="lynxkv-tokenise")

    async def whole(self, ask: Ask) -> list[int]:
        """The whole prompt of a request that names no cache."""
        return await self._run(lambda: self._ids(ask, None))

    async def after(self, ask: Ask, turn: str) -> list[int]:
        """What follows a cache that ends with this turn: a chat's messages, or a completion's text as it is."""
        return await self._run(lambda: self._ids(ask, turn))

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False)

    async def _run(self, work: Callable[[], list[int]]) -> list[int]:
        ids = await asyncio.get_running_loop().run_in_executor(self._thread, work)
        if len(ids) > self._most_tokens:
            raise Refusal(
                f"the prompt has {len(ids)} tokens, the most are {self._most_tokens}", code="context_length_exceeded"
            )
        return ids

    def _ids(self, ask: Ask, turn: str | None) -> list[int]:
        if ask.kind == "chat":
            messages = [(message.role, message.text) for message in ask.messages]
            return conversation(self._tokenizer, messages, turn=turn)
        if isinstance(ask.prompt, tuple):
            return list(ask.prompt)
        encoded = self._tokenizer(ask.prompt, add_special_tokens=turn is None, split_special_tokens=True)
        return list(encoded["input_ids"])
