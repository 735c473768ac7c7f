"""What the worker does: answers from a cache, of one request or of several together, and answers without one."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial

from lynxkv.batch import BatchPrompt, decode_batch
from lynxkv.errors import FormatError, StoreError
from lynxkv.events import Event, GenerateResult, Verified
from lynxkv.fetch import CacheReader
from lynxkv.kv import KV
from lynxkv.pace import Pace
from lynxkv.runner import generate
from lynxkv.server.outcome import Answer
from lynxkv.server.requests import Ask
from lynxkv.server.telling import Told
from lynxkv.server.turns import SharedModel
from lynxkv.server.uncached import generate_uncached
from lynxkv.server.worker import Cancellation, Job

# Rows of several caches are as long as the longest: together they may take so much more than each for itself.
MOST_PADDING = 2


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one request wants of the model.

    Attributes:
        prompt_tokens: cached ones included.
        new_tokens: the most.
    """

    ask: Ask
    model: SharedModel
    told: Told
    prompt_tokens: int
    new_tokens: int

    @property
    def tokens(self) -> int:
        """Of prompt and answer."""
        return self.prompt_tokens + self.new_tokens

    @property
    def stored_tokens(self) -> int:
        """Of the prompt, those that come from a cache."""
        return 0

    @property
    def suffix_tokens(self) -> int:
        """Of the prompt, those that the model runs."""
        return self.prompt_tokens - self.stored_tokens

    @property
    def together(self) -> Hashable | None:
        """See `Work`."""
        return None

    @property
    def loads(self) -> Hashable | None:
        """See `Work`."""
        return None

    def answer(self, cancellation: Cancellation, loaded: Callable[[], None]) -> Answer:
        """The answer to this request alone; `loaded` is called once nothing has to be loaded any more."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class CachedRun(Run):
    """A request over an open cache.

    Attributes:
        name, url: of the cache.
        is_here: whether nothing has to be fetched from a store that may let one wait.
        on_loaded: called on the event loop, once all is loaded, if it was this request's reader that loaded it.
        pace: what earlier runs have taught, of so many requests together and of caches like this.
    """

    name: str
    url: str
    reader: CacheReader
    suffix_ids: list[int]
    is_here: Callable[[], bool]
    on_loaded: Callable[[], None]
    pace: Callable[[int], Pace]

    @property
    def stored_tokens(self) -> int:
        """Of the prompt, those that come from the cache."""
        return self.reader.extent.stop

    @property
    def content(self) -> tuple[str, str]:
        """Equal for requests over the same cache; one that was replaced between their openings is another."""
        return self.url, self.reader.anchor_head.header_sha256

    @property
    def together(self) -> Hashable | None:
        """Requests over one cache, and over all that are here already: none of those waits for the cache of another."""
        return ("here", self.model.identity.salt_sha256) if self.is_here() else self.content

    @property
    def loads(self) -> Hashable | None:
        """One request loads a cache; those that would, too, may find it here when it is done."""
        return None if self.is_here() else self.url

    def answer(self, cancellation: Cancellation, loaded: Callable[[], None]) -> Answer:
        """The answer, by progressive decoding."""

        def on_event(event: Event) -> None:
            cancellation.check()
            if isinstance(event, Verified) and not self.told.verified:
                self.told.on_loop(self.on_loaded)
                self.told.on_loop(loaded)
            self.told.emit(event)

        result = generate(
            self.reader,
            self.model,
            self.suffix_ids,
            max_new_tokens=self.new_tokens,
            sampling=self.ask.sampling,
            stop=self.ask.stop,
            pace=self.pace(1),
            top_logprobs=self.ask.top_logprobs,
            on_event=on_event,
        )
        return self.answer_of(result, together=1)

    def answer_of(self, result: GenerateResult, *, together: int) -> Answer:
        """The answer that has this text."""
        return Answer(
            result=result,
            source="cache",
            cache=self.name,
            cached_tokens=self.stored_tokens,
            prompt_tokens=self.prompt_tokens,
            together=together,
        )


@dataclass(frozen=True, kw_only=True)
class UncachedRun(Run):
    """A request whose prompt no cache holds, or the cache `failed` does not give.

    Attributes:
        keep_tokens, keep: as for `generate_uncached`.
    """

    prompt_ids: list[int]
    began_at: float
    failed: str | None
    keep_tokens: int
    keep: Callable[[KV], None]

    def answer(self, cancellation: Cancellation, loaded: Callable[[], None]) -> Answer:
        """The answer, by prefilling the prompt."""

        def on_event(event: Event) -> None:
            cancellation.check()
            self.told.emit(event)

        result = generate_uncached(
            self.model,
            self.prompt_ids,
            max_new_tokens=self.new_tokens,
            sampling=self.ask.sampling,
            stop=self.ask.stop,
            top_logprobs=self.ask.top_logprobs,
            on_event=on_event,
            began_at=self.began_at,
            keep_tokens=self.keep_tokens,
            keep=self.keep,
        )
        return Answer(
            result=result,
            source="prefill" if self.failed is None else "recompute",
            cache=self.failed,
            cached_tokens=0,
            prompt_tokens=self.prompt_tokens,
        )


RunJob = Job[Run, Answer]


def are_alike(runs: Sequence[Run]) -> bool:
    """Whether rows of these lengths are worth their padding: caches end, and prompts, at one slot for all."""
    longest = (
        max(run.stored_tokens for run in runs)
        + max(run.suffix_tokens for run in runs)
        + max(run.new_tokens for run in runs)
    )
    return len(runs) * longest <= MOST_PADDING * sum(run.tokens for run in runs)


def execute(jobs: Sequence[RunJob], loaded: Callable[[], None]) -> None:
    """Answer requests that go together, each as soon as its own text is there.

    When a batch fails, what did not fail with it goes on: the others together if somebody has left, whose reader it may
    have been, and each alone if only one of them may be to blame.
    """
    jobs = [job for job in jobs if job.wanted]
    if len(jobs) == 1:
        _alone(jobs[0], loaded)
    if len(jobs) < 2:
        return
    runs = [job.work for job in jobs if isinstance(job.work, CachedRun)]
    try:
        _together(jobs, runs, loaded)
    except Exception as error:
        for job in jobs:
            if job.work.told.verified:
                job.fail(error)
        left = [job for job in jobs if not job.settled]
        for job in left:
            job.work.told.retract("decoding with others has failed; it is done again")
        if len(wanted := [job for job in left if job.wanted]) < len(left):
            execute(wanted, loaded)
        elif isinstance(error, StoreError | FormatError) and len({run.content for run in runs}) == 1:
            for job in left:
                job.fail(error)
        else:
            for job in left:
                _alone(job, loaded)


def _alone(job: RunJob, loaded: Callable[[], None]) -> None:
    job.settle(lambda: job.work.answer(job.cancellation, loaded))


def _together(jobs: Sequence[RunJob], runs: Sequence[CachedRun], loaded: Callable[[], None]) -> None:
    # The first of those over a cache reads it for all.
    reading: dict[Hashable, CachedRun] = {}
    for run in runs:
        reading.setdefault(run.content, run)

    def on_event(run: CachedRun, event: Event) -> None:
        if isinstance(event, Verified) and not any(run.told.verified for run in runs):
            for other in reading.values():
                run.told.on_loop(other.on_loaded)
            run.told.on_loop(loaded)
        run.told.emit(event)

    def on_end(job: RunJob, run: CachedRun, result: GenerateResult) -> None:
        job.settle(lambda: run.answer_of(result, together=len(runs)))

    decode_batch(
        [
            BatchPrompt(
                reader=reading[run.content].reader,
                suffix_ids=run.suffix_ids,
                max_new_tokens=run.new_tokens,
                sampling=run.ask.sampling,
                stop=run.ask.stop,
                top_logprobs=run.ask.top_logprobs,
                began_at=run.reader.opened_at,
                on_event=partial(on_event, run),
                on_end=partial(on_end, job, run),
                wanted=lambda job=job: job.wanted,  # type: ignore[misc]
            )
            for job, run in zip(jobs, runs, strict=True)
        ],
        runs[0].model,
        pace=runs[0].pace(len(runs)),
    )
