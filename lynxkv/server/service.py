"""From a request to its answer: which cache, which tokens, and a run on the worker."""

from __future__ import annotations

import asyncio
import copy
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Literal

from lynxkv.events import Event, GenerateResult
from lynxkv.fetch import CacheReader, FetchOptions, open_cache_async
from lynxkv.identity import check_identity
from lynxkv.integrations.hf import Model, conversation
from lynxkv.pace import Pace
from lynxkv.runner import generate
from lynxkv.server.admission import Places, check_memory, run_bytes
from lynxkv.server.names import cache_url
from lynxkv.server.options import ServeOptions
from lynxkv.server.problems import Refusal
from lynxkv.server.requests import Ask
from lynxkv.server.uncached import generate_uncached
from lynxkv.server.worker import Cancellation, Worker

Source = Literal["cache", "prefill"]
Emit = Callable[[Event], None]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """An answer, and where it came from.

    Attributes:
        source: "cache", or "prefill" if no cache was used.
        cache: the name of the cache.
    """

    result: GenerateResult
    source: Source
    cache: str | None
    cached_tokens: int
    prompt_tokens: int


class Service:
    """Answers requests with one model and the caches under `root`. Used on one event loop; close it in the end."""

    def __init__(self, model: Model, root: str, options: ServeOptions) -> None:
        self.model, self.root, self.options = model, root, options
        self.places = Places(options.queue, shared=False)
        self.started_s = int(time.time())
        self._worker = Worker()
        # A tokenizer is changed by some of its calls: this thread has one of its own, the worker another.
        self._tokenizer = copy.deepcopy(model.tokenizer)
        self._tokenising = ThreadPoolExecutor(1, thread_name_prefix="lynxkv-tokenise")
        # What drafts have taught, by codec.
        self._paces: defaultdict[str, Pace] = defaultdict(Pace)

    @property
    def model_name(self) -> str:
        """What the model is called in requests."""
        return self.model.identity.model_id or "model"

    def check_model(self, name: str) -> None:
        """Refuse, with 404, a model that is not served."""
        if name != self.model_name:
            raise Refusal(
                f"there is no model {name[:80]!r}",
                status=404,
                code="model_not_found",
                param="model",
                hint=f"this server has {self.model_name}",
            )

    async def answer(self, ask: Ask, owner: str, emit: Emit) -> Answer:
        """The answer to a request; `emit` is told of its run's events, on this event loop.

        Raises:
            Refusal: it cannot be answered, there are too many others, or it took too long.
            LynxError: the cache cannot be used.
        """
        with self.places.take(owner):
            try:
                async with asyncio.timeout(self.options.deadline_s):
                    return await self._answer(ask, owner, emit)
            except TimeoutError as error:
                raise Refusal(
                    f"no answer within {self.options.deadline_s:g} s", status=504, code="deadline_exceeded"
                ) from error

    async def close(self) -> None:
        """Wait for what runs, and drop what waits."""
        self.places.closed = True
        await asyncio.to_thread(self._worker.close)
        self._tokenising.shutdown(wait=False)

    async def _answer(self, ask: Ask, owner: str, emit: Emit) -> Answer:
        loop = asyncio.get_running_loop()

        def emit_here(event: Event) -> None:
            loop.call_soon_threadsafe(emit, event)

        if ask.cache is None:
            began_at = time.perf_counter()
            prompt_ids = await self._tokenise(self._prompt, ask)
            check_memory(self._run_bytes(ask, len(prompt_ids)), self.options.memory_bytes)
            return await self._worker.run(owner, partial(self._run_uncached, ask, prompt_ids, emit_here, began_at))
        options = FetchOptions(deadline_s=self.options.deadline_s)
        async with open_cache_async(cache_url(self.root, ask.cache), options=options) as reader:
            check_identity(reader.header.identity, self.model.identity)
            suffix_ids = await self._tokenise(self._suffix, ask, reader.header.identity.turn or "none")
            tokens = reader.header.tokens.stop + len(suffix_ids)
            check_memory(self._run_bytes(ask, tokens), self.options.memory_bytes)
            return await self._worker.run(owner, partial(self._run_cached, ask, reader, suffix_ids, emit_here))

    def _run_cached(
        self, ask: Ask, reader: CacheReader, suffix_ids: list[int], emit: Emit, cancellation: Cancellation
    ) -> Answer:
        result = generate(
            reader,
            self.model,
            suffix_ids,
            max_new_tokens=self._new_tokens(ask),
            sampling=ask.sampling,
            stop=ask.stop,
            pace=self._paces[reader.header.codec_name],
            on_event=_checking(emit, cancellation),
        )
        cached_tokens = reader.header.tokens.stop
        return Answer(
            result=result,
            source="cache",
            cache=ask.cache,
            cached_tokens=cached_tokens,
            prompt_tokens=cached_tokens + len(suffix_ids),
        )

    def _run_uncached(
        self, ask: Ask, prompt_ids: list[int], emit: Emit, began_at: float, cancellation: Cancellation
    ) -> Answer:
        result = generate_uncached(
            self.model,
            prompt_ids,
            max_new_tokens=self._new_tokens(ask),
            sampling=ask.sampling,
            stop=ask.stop,
            on_event=_checking(emit, cancellation),
            began_at=began_at,
        )
        return Answer(result=result, source="prefill", cache=None, cached_tokens=0, prompt_tokens=len(prompt_ids))

    def _prompt(self, ask: Ask) -> list[int]:
        """The whole prompt of a request that names no cache."""
        if ask.kind == "chat":
            return conversation(self._tokenizer, [(message.role, message.text) for message in ask.messages])
        if isinstance(ask.prompt, tuple):
            return list(ask.prompt)
        return list(self._tokenizer(ask.prompt, split_special_tokens=True)["input_ids"])

    def _suffix(self, ask: Ask, turn: str) -> list[int]:
        """What follows the cache: a chat's messages, or a completion's text as it is."""
        if ask.kind == "chat":
            return conversation(self._tokenizer, [(message.role, message.text) for message in ask.messages], turn=turn)
        if isinstance(ask.prompt, tuple):
            return list(ask.prompt)
        return list(self._tokenizer(ask.prompt, add_special_tokens=False, split_special_tokens=True)["input_ids"])

    async def _tokenise(self, work: Callable[..., list[int]], *arguments: object) -> list[int]:
        ids = await asyncio.get_running_loop().run_in_executor(self._tokenising, work, *arguments)
        if len(ids) > self.options.max_prompt_tokens:
            raise Refusal(
                f"the prompt has {len(ids)} tokens, the most are {self.options.max_prompt_tokens}",
                code="context_length_exceeded",
            )
        return ids

    def _new_tokens(self, ask: Ask) -> int:
        return ask.max_new_tokens or self.options.max_new_tokens

    def _run_bytes(self, ask: Ask, prompt_tokens: int) -> int:
        new_tokens = self._new_tokens(ask)
        if self.model.context_tokens is not None:
            new_tokens = min(new_tokens, max(0, self.model.context_tokens - prompt_tokens))
        return run_bytes(self.model, prompt_tokens + new_tokens, new_tokens)


def _checking(emit: Emit, cancellation: Cancellation) -> Emit:
    """`emit`, but a cancelled run ends there."""

    def on_event(event: Event) -> None:
        cancellation.check()
        emit(event)

    return on_event
