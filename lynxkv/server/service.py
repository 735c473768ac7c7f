"""From a request to its answer: which cache, which tokens, and a run on the worker."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import torch

from lynxkv.errors import FormatError, IdentityError, LynxError, StoreError
from lynxkv.fetch import CacheReader, FetchOptions
from lynxkv.identity import check_identity
from lynxkv.integrations.hf import Model
from lynxkv.layout import CacheHeader, Identity
from lynxkv.pace import Pace
from lynxkv.server.admission import Memory, Places, Sizes
from lynxkv.server.answers import Form
from lynxkv.server.catalog import Catalog, Entry, begins
from lynxkv.server.hot import HotCaches
from lynxkv.server.keys import Caller, Keys
from lynxkv.server.logprobs import Logprobs
from lynxkv.server.metrics import Metrics
from lynxkv.server.names import cache_url
from lynxkv.server.opening import Openings
from lynxkv.server.options import ServeOptions
from lynxkv.server.outcome import Answer
from lynxkv.server.problems import Refusal, refusal_of
from lynxkv.server.prompts import Prompts
from lynxkv.server.publishing import Publisher, whole_blocks
from lynxkv.server.requests import Ask
from lynxkv.server.runs import CachedRun, Run, UncachedRun, are_alike, execute
from lynxkv.server.telling import Emit, Told
from lynxkv.server.tokens import TokenBytes
from lynxkv.server.turns import SharedModel
from lynxkv.server.worker import Worker
from lynxkv.store import Link

LOG = logging.getLogger("lynxkv.server")
READERS = 8


class _ReplacedError(Exception):
    """What is stored is no longer the cache that was listed."""


class Service:
    """Answers requests with one model and the caches under `root`, over a simulated `link` if there is one.

    Used on one event loop: `start` it there, `close` it in the end.
    """

    def __init__(
        self, model: Model, root: str, options: ServeOptions, keys: Keys | None = None, link: Link | None = None
    ) -> None:
        self.model, self.options, self.keys = SharedModel.of(model), options, keys or Keys()
        self._link = link
        self.started_s = int(time.time())
        self.metrics = Metrics()
        self.catalog = Catalog(root)
        self.places = Places(options.queue, shared=self.keys.wanted)
        self.listed = False
        self._reading = ThreadPoolExecutor(READERS, thread_name_prefix="lynxkv-read")
        self.hot = HotCaches(options.hot_bytes, self._reading)
        self._openings = Openings(2 * options.queue)
        self.memory, self._sizes = Memory(options.memory_bytes), Sizes(model)
        self._publisher = Publisher(self.catalog, self.memory, self.metrics.published)
        self._worker: Worker[Run, Answer] = Worker(
            execute,
            self._bytes_of,
            are_alike,
            turns=self.model.turns,
            memory=self.memory,
            runs=options.runs,
            rows=options.batch,
            threads=options.queue,
            # Threads that start while another computes on one of its own would stay with one.
            prepare=partial(torch.set_num_threads, torch.get_num_threads()),
        )
        self.token_bytes = TokenBytes(model.tokenizer)
        self._prompts = Prompts(model.tokenizer, options.max_prompt_tokens)
        self._refreshing: asyncio.Task[None] | None = None
        # What drafts have taught, by codec with its parameters and by requests that go together.
        self._paces: defaultdict[tuple[str, int], Pace] = defaultdict(Pace)
        self._watch()

    @property
    def model_name(self) -> str:
        """What the model is called in requests."""
        return self.model.identity.model_id or "model"

    @property
    def ready(self) -> bool:
        """Whether requests are taken, and caches are found if the store can be listed."""
        return self.listed and not self.places.closed

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

    def caches(self, caller: Caller) -> list[Entry]:
        """The caches that a caller may use with this model."""
        return [entry for entry in self.catalog.entries if self._identity_for(entry.identity, caller) is not None]

    async def answer(self, ask: Ask, caller: Caller, emit: Emit) -> Answer:
        """The answer to a request; `emit` is told of its run's events, on this event loop.

        Raises:
            Refusal: it cannot be answered, there are too many others, or it took too long.
            LynxError: the cache cannot be used.
        """
        told = Told(emit, asyncio.get_running_loop())
        with self.places.take(caller.name):
            try:
                async with asyncio.timeout(self.options.deadline_s):
                    answer = await self._answer(ask, caller, told)
            except TimeoutError as error:
                raise Refusal(
                    f"no answer within {self.options.deadline_s:g} s", status=504, code="deadline_exceeded"
                ) from error
        self.metrics.answer(answer)
        return answer if ask.top_logprobs is None else replace(answer, logprobs=told.logprobs)

    def form(self, ask: Ask) -> Form:
        """The form of the answer to a request."""
        return Form(kind=ask.kind, model=ask.model, logprobs=Logprobs(ask.kind, self.token_bytes))

    async def start(self) -> None:
        """Start to list the store, again and again."""
        self._refreshing = asyncio.create_task(self._refresh_always())

    async def refresh(self) -> None:
        """List the store now."""
        try:
            for url in await asyncio.to_thread(self.catalog.refresh):
                self.hot.drop(url)
        except LynxError as error:
            LOG.warning("the store cannot be listed: %s", error.message)
        self.listed = True

    async def close(self) -> None:
        """Wait for what runs, and drop what waits."""
        self.places.closed = True
        if self._refreshing is not None:
            self._refreshing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._refreshing
        await asyncio.to_thread(self._worker.close)
        await asyncio.to_thread(self._publisher.close)
        self._openings.close()
        self._prompts.close()
        self._reading.shutdown(wait=False)

    async def _answer(self, ask: Ask, caller: Caller, told: Told) -> Answer:
        began_at = time.perf_counter()
        if ask.cache is not None:
            url = self._url_of(ask.cache, caller)
            return await self._from_cache(ask, caller, ask.cache, url, None, told, began_at)
        prompt_ids = await self._prompts.whole(ask)
        while entry := self.catalog.longest_prefix(prompt_ids, caller.identities(self.model.identity)):
            try:
                return await self._from_cache(ask, caller, entry.name, entry.url, prompt_ids, told, began_at)
            except _ReplacedError:
                self.hot.drop(entry.url)
                self.catalog.doubt(entry)
        return await self._uncached(ask, caller, prompt_ids, told, began_at)

    def _url_of(self, name: str, caller: Caller) -> str:
        """Where the cache is that a request names.

        Where there are keys, only what is listed is there: asking the store would take another time for what is there
        and is not the caller's.
        """
        url = cache_url(self.catalog.root, name)
        if self.keys.wanted:
            entry = self.catalog.find(name)
            if entry is None or entry.identity.salt_sha256 not in (None, caller.salt_sha256):
                raise Refusal(f"there is no cache {name}", status=404, code="cache_not_found", param="lynx.cache")
        return url

    async def _from_cache(
        self, ask: Ask, caller: Caller, name: str, url: str, prompt_ids: list[int] | None, told: Told, began_at: float
    ) -> Answer:
        """The answer from a cache that is named, or whose tokens are the first of `prompt_ids`.

        Raises:
            _ReplacedError: of the latter, they are not, or it is of another model.
        """
        policy = ask.on_failure or (self.options.on_failure if prompt_ids is None else "recompute")
        reading = self.hot.reading()
        link = None if self.hot.has(url) else self._link
        options = FetchOptions(
            deadline_s=self.options.deadline_s,
            transport=reading,
            concurrency=self.options.concurrency,
            residual_url=self.options.residual_url,
            cache_dir=self.options.cache_dir,
            cache_max_bytes=self.options.cache_max_bytes,
        )
        try:
            async with self._openings.open(url, link=link, options=options) as reader:
                if prompt_ids is not None and not self._suits(reader.header, prompt_ids, caller):
                    raise _ReplacedError
                model = self._model_for(reader.header.identity, caller)
                tokens = reader.extent.stop
                if prompt_ids is None:
                    # A cache that does not say how it ends is taken to end as this model's do.
                    turn = reader.header.identity.turn or self.model.identity.turn or "none"
                    suffix_ids = await self._prompts.after(ask, turn)
                else:
                    suffix_ids = prompt_ids[tokens:]
                prompt_tokens = tokens + len(suffix_ids)
                codec = f"{reader.header.codec_name}{sorted(reader.header.codec_params.items())}"
                run = CachedRun(
                    ask=ask,
                    model=model,
                    told=told,
                    prompt_tokens=prompt_tokens,
                    new_tokens=self._new_tokens(ask, prompt_tokens),
                    name=name,
                    url=url,
                    reader=reader,
                    suffix_ids=suffix_ids,
                    is_here=reading.is_here,
                    on_loaded=reading.keep,
                    pace=lambda together: self._paces[codec, together],
                )
                try:
                    return await self._run(caller, run)
                except (StoreError, FormatError):
                    if prompt_ids is None and policy == "recompute":
                        prompt_ids = await _ids_of(reader, suffix_ids)
                    raise
        except (StoreError, FormatError) as error:
            reading.drop()
            failure = refusal_of(error)
            self.metrics.load_failure(failure.code or "")
            if policy == "error" or prompt_ids is None or told.verified:
                raise
            told.retract(f"the cache cannot be loaded ({error.message}); the prompt is computed anew")
            answer = await self._uncached(ask, caller, prompt_ids, told, began_at, failed=name)
            return replace(answer, load_failure=failure.code)

    async def _uncached(
        self, ask: Ask, caller: Caller, prompt_ids: list[int], told: Told, began_at: float, failed: str | None = None
    ) -> Answer:
        """The answer to a prompt that no cache holds, or the cache `failed` does not give."""
        publishes = self.options.publish and failed is None
        identity = caller.identities(self.model.identity)[0]
        run = UncachedRun(
            ask=ask,
            model=self.model,
            told=told,
            prompt_tokens=len(prompt_ids),
            new_tokens=self._new_tokens(ask, len(prompt_ids)),
            prompt_ids=prompt_ids,
            began_at=began_at,
            failed=failed,
            keep_tokens=whole_blocks(len(prompt_ids)) if publishes else 0,
            keep=lambda kv: self._publisher.offer(kv, identity),
        )
        return await self._run(caller, run)

    async def _run(self, caller: Caller, run: Run) -> Answer:
        """The answer of a run, if there can be memory for it."""
        self.memory.check(self._bytes_of([run]))
        return await self._worker.run(caller.name, run)

    def _identity_for(self, cache: Identity, caller: Caller) -> Identity | None:
        """The model's identity as the caller's or as everybody's, whichever the cache has; None if it has another."""
        for identity in caller.identities(self.model.identity):
            with contextlib.suppress(IdentityError):
                check_identity(cache, identity)
                return identity
        return None

    def _suits(self, header: CacheHeader, prompt_ids: list[int], caller: Caller) -> bool:
        """Whether a cache, now that it is open, is one that its listing made it out to be."""
        return begins(header, prompt_ids) and self._identity_for(header.identity, caller) is not None

    def _model_for(self, cache: Identity, caller: Caller) -> SharedModel:
        identity = self._identity_for(cache, caller)
        if identity is None:
            check_identity(cache, self.model.identity)  # says what differs
        return replace(self.model, identity=identity or self.model.identity)

    def _new_tokens(self, ask: Ask, prompt_tokens: int) -> int:
        """The most tokens of an answer; at least one, so that a run can say what is wrong with a prompt."""
        new_tokens = ask.max_new_tokens or self.options.max_new_tokens
        if self.model.context_tokens is not None:
            new_tokens = min(new_tokens, max(1, self.model.context_tokens - prompt_tokens))
        return new_tokens

    def _bytes_of(self, runs: Sequence[Run]) -> int:
        """An upper estimate of what runs hold that go together."""
        cached = [run for run in runs if isinstance(run, CachedRun)]
        caches = {run.content: run.stored_tokens for run in cached}
        return self._sizes.run_bytes(
            [run.stored_tokens for run in runs],
            [run.suffix_tokens for run in runs],
            max(run.new_tokens for run in runs),
            # Without codes there is a prompt, in whose chunks heads that share keys and values each have a layer's.
            caches=list(caches.values()) or [max(run.tokens for run in runs)],
            opened=sum(len(run.reader.spans) for run in cached),
            # The first of those over a cache reads it for all.
            written=sum({run.content: self._written_bytes(run) for run in cached}.values()),
        )

    def _written_bytes(self, run: CachedRun) -> int:
        """What may be written down of a cache while it is loaded, to be kept."""
        if run.is_here():
            return 0
        stored = (span.bytes_anchor + span.bytes_residual for span in run.reader.spans)
        return sum(min(self.options.hot_bytes, size) for size in stored)

    async def _refresh_always(self) -> None:
        while True:
            await self.refresh()
            await asyncio.sleep(self.options.refresh_s)

    def _watch(self) -> None:
        watch = self.metrics.watch
        watch("lynxkv_requests_in_place", "Requests that run or wait", lambda: self.places.taken)
        watch("lynxkv_places", "Requests that may run and wait", lambda: self.options.queue)
        watch("lynxkv_memory_bytes", "Bytes that runs may hold", lambda: self.options.memory_bytes)
        watch("lynxkv_memory_held_bytes", "Bytes that runs hold, by upper estimates", lambda: self.memory.held)
        watch("lynxkv_hot_bytes", "Bytes of caches kept in memory", lambda: self.hot.bytes)
        watch("lynxkv_hot_hits", "Caches that were opened from memory", lambda: self.hot.hits)
        watch("lynxkv_hot_misses", "Caches that were opened from the store", lambda: self.hot.misses)
        watch("lynxkv_publishing_bytes", "Bytes that are being encoded", lambda: self._publisher.held_bytes)
        watch("lynxkv_catalog_caches", "Caches that are known", lambda: len(self.catalog.entries))
        watch("lynxkv_catalog_age_seconds", "Since the store was listed", lambda: self.catalog.age_s or float("nan"))


async def _ids_of(reader: CacheReader, suffix_ids: list[int]) -> list[int] | None:
    """The tokens of a cache and its suffix; None if the cache does not tell its own."""
    try:
        ids = await asyncio.to_thread(reader.token_ids)
    except LynxError:
        return None
    return None if ids is None else [*map(int, ids), *suffix_ids]
