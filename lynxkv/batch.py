"""Progressive decoding of several prompts together: over one cache, over several, or both.

The rows of a batch draft, wait and verify at the same time, and accept each its own prefix of its own draft. A cache
that several rows share is fetched, decoded and refined once, and copied to the others. A row that has ended, or that
nobody wants any more, leaves: the steps after that are of those that are left.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from lynxkv import health
from lynxkv.arriving import ArrivingCache
from lynxkv.choices import MAX_NEW_TOKENS, Verify
from lynxkv.draft import Draft, Speculate, draft_tokens
from lynxkv.errors import InputError
from lynxkv.events import Drafted, Event, GenerateResult, Note, Phase, Rejected, Span, Track
from lynxkv.fetch import CacheReader, SegmentPayload
from lynxkv.identity import check_identity
from lynxkv.layout import Precision
from lynxkv.models import BatchLiveCache, BatchModel
from lynxkv.pace import Pace
from lynxkv.prompt import Prompt, place
from lynxkv.sampling import Sampling, draw
from lynxkv.text import TextStream
from lynxkv.verified import VerifiedText
from lynxkv.verify import accept, agreement


@dataclass(frozen=True, kw_only=True)
class BatchPrompt:
    """A row of a batch: an open cache, the tokens after it, and what is wanted of them.

    Attributes:
        reader: rows that name the same one share its cache.
        max_new_tokens, sampling, stop, top_logprobs: as for `generate`.
        began_at: what the row's times count from, on `time.perf_counter`; None: the opening of the cache.
        on_event: told of what happens to this row, in order; of work for several rows each is told.
        on_end: told of the text once it is finished.
        wanted: asked between steps. When it says no the row leaves, and nobody is told of a text.
    """

    reader: CacheReader
    suffix_ids: Sequence[int]
    max_new_tokens: int = MAX_NEW_TOKENS
    sampling: Sampling = field(default_factory=Sampling)
    stop: Sequence[str] = ()
    top_logprobs: int | None = None
    began_at: float | None = None
    on_event: Callable[[Event], None] = lambda event: None
    on_end: Callable[[GenerateResult], None] = lambda result: None
    wanted: Callable[[], bool] = lambda: True


@dataclass(frozen=True, kw_only=True)
class BatchResult:
    """All texts, in the order of the prompts. Seconds count from when the first cache was opened.

    Of rows that share a cache the first one's figures have its bytes; memory is divided evenly.
    """

    texts: list[GenerateResult]
    precision: Precision
    first_draft_s: float | None
    full_s: float | None
    first_verified_s: float
    total_s: float
    bytes_fetched: int
    cache_bytes: int


def generate_batch(
    prompts: Sequence[tuple[CacheReader, Sequence[int]]],
    model: BatchModel,
    *,
    max_new_tokens: int = MAX_NEW_TOKENS,
    sampling: Sampling | None = None,
    speculate: Speculate = "auto",
    verify: Verify = "full",
    stop: Sequence[str] = (),
    pace: Pace | None = None,
) -> BatchResult:
    """Answer several prompts together; each text is that of decoding on its own full cache.

    Args:
        prompts: an open cache and the tokens after it, row by row. Rows that name the same reader share its cache.
        sampling: of all rows; row i draws with the seed plus i.
        speculate, stop, pace: as for `generate`.
        verify: "full", or "none" to decode on the Anchors alone.

    Raises:
        IdentityError, InputError, FetchError, FormatError: as for `generate`; no text is returned.
    """
    first, ended = sampling or Sampling(), dict[int, GenerateResult]()
    rows = [
        BatchPrompt(
            reader=reader,
            suffix_ids=suffix_ids,
            max_new_tokens=max_new_tokens,
            sampling=replace(first, seed=first.seed + number),
            stop=stop,
            on_end=partial(ended.__setitem__, number),
        )
        for number, (reader, suffix_ids) in enumerate(prompts)
    ]
    with _opened(rows, model, speculate, verify, pace) as batch:
        batch.run()
        return batch.result([ended[number] for number in range(len(rows))])


def decode_batch(
    prompts: Sequence[BatchPrompt],
    model: BatchModel,
    *,
    speculate: Speculate = "auto",
    verify: Verify = "full",
    pace: Pace | None = None,
) -> None:
    """As `generate_batch`, for rows that each want something of their own; they are told one by one, as they end.

    Raises:
        As `generate_batch`. Rows whose text was finished before have it.
    """
    with _opened(prompts, model, speculate, verify, pace) as batch:
        batch.run()


@dataclass
class _Row:
    """One row's state."""

    wants: BatchPrompt
    prompt: Prompt
    text: VerifiedText
    stream: TextStream
    generator: torch.Generator
    began_at: float
    draft: Draft = field(default_factory=Draft)
    draft_text: list[str] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0
    notes: list[str] = field(default_factory=list)
    first_draft_s: float | None = None

    def distribution(self, logits: Tensor, new_ids: Sequence[int]) -> Tensor:
        """Of the token after the suffix and `new_ids`."""
        sampling, prompt = self.wants.sampling, self.prompt
        history = [*prompt.history, *prompt.suffix_ids, *new_ids] if sampling.needs_history else []
        return sampling.distribution(logits, history)

    def now(self) -> float:
        """Seconds on the row's own clock."""
        return time.perf_counter() - self.began_at

    def tell_of_arrival(self, event: Event) -> None:
        """Tell of an event whose times count from the opening of the cache."""
        if isinstance(event, Span):
            later_s = self.wants.reader.opened_at - self.began_at
            event = replace(event, start_s=event.start_s + later_s, stop_s=event.stop_s + later_s)
        self.wants.on_event(event)

    def note(self, text: str) -> None:
        """Tell of what is worth telling."""
        self.notes.append(text)
        self.wants.on_event(Note(text))

    def propose(self, logits: Tensor) -> list[int]:
        """Draft the token that follows from `logits` [V]."""
        q = self.distribution(logits, self.draft.token_ids)
        token = draw(q, self.generator)
        self.draft.q.append(q)
        self.draft.token_ids.append(token)
        self.draft_text.append(self.stream.push(token))
        if self.first_draft_s is None:
            self.first_draft_s = self.now()
        self.wants.on_event(Drafted(token, self.draft_text[-1]))
        return [token]


class _Batch:
    """The state of a run. Row i of the cache is that of `rows[i]`, whichever are left."""

    def __init__(
        self,
        rows: list[_Row],
        model: BatchModel,
        cache: BatchLiveCache,
        arriving: dict[CacheReader, ArrivingCache],
        *,
        target: Precision,
        speculate: Speculate,
        pace: Pace,
    ) -> None:
        self.rows, self.model, self.cache, self.arriving = rows, model, cache, arriving
        self.target, self.auto, self.pace = target, speculate == "auto", pace
        # Of each draft token there are the logits of its verification, and both distributions.
        self.limit = draft_tokens(speculate, 3 * 4 * model.vocab_tokens * len(rows))
        self.count, self.cache_bytes = len(rows), cache.nbytes
        self.peak_parts: dict[str, int] = {}
        self.uncounted = set(arriving)
        self.began_at = min(reader.opened_at for reader in arriving)

    def run(self) -> None:
        """The run, top to bottom."""
        if self.target == "full" and self.has_residual:
            self.draft()
        self.verify()
        self.decode_on()

    @property
    def has_residual(self) -> bool:
        """Whether there is anything to draft before."""
        return any(arriving.has("full") for arriving in self.arriving.values())

    def draft(self) -> None:
        """Propose a token a row and step, refining between steps with what has arrived."""
        # All Anchors before any Residual.
        self._tell(Phase("anchor"))
        for arriving in self.arriving.values():
            arriving.wait_for("anchor")
        for arriving in self.arriving.values():
            arriving.start_residual()
        self._tell(Phase("draft"))
        pending: list[Sequence[int]] = [row.prompt.suffix_ids for row in self.rows]
        while any(pending) and self._goes_on(max(map(len, pending))):
            logits = self._step("draft", pending)
            pending = [
                row.propose(logits[number, 0]) if self._drafts(row) else [] for number, row in enumerate(self.rows)
            ]
        if self.auto and not any(row.draft.token_ids for row in self.rows):
            reason = health.why_none(self.pace, "full")
            for row in self.rows:
                row.note(reason)

    def verify(self) -> None:
        """One pass over all suffixes and drafts on the target caches; what passes stands, row by row."""
        if not all(arriving.complete(self.target) for arriving in self.arriving.values()):
            self._tell(Phase("refine" if self.target == "full" and self.has_residual else "anchor"))
        for arriving in self.arriving.values():
            arriving.wait_for(self.target)
        self.cache.rollback(self.cache.stored)
        self._let_go()
        if not self.rows:
            return
        self._tell(Phase("verify" if any(row.draft.token_ids for row in self.rows) else "decode"))
        longest = max(len(row.draft.token_ids) for row in self.rows)
        logits = self._step(
            "verify", [[*row.prompt.suffix_ids, *row.draft.token_ids] for row in self.rows], rows=longest + 1
        )
        fared = []
        for number, row in enumerate(self.rows):
            ids = row.draft.token_ids
            own = logits[number, longest - len(ids) :]
            outcome = accept(ids, row.draft.q, partial(_target_of, row, own), row.generator)
            self.cache.forget_last(number, len(ids) - outcome.accepted)
            targets = (_target_of(row, own, count) for count in range(len(ids)))
            fared.append(health.Fared(len(ids), outcome.accepted, agreement(row.draft.q, targets)))
            row.text.stand(ids[: outcome.accepted], own)
            row.drafted, row.accepted = len(ids), len(row.text.token_ids)
            if row.accepted < row.drafted:
                row.wants.on_event(Rejected(ids[row.accepted :], "".join(row.draft_text[row.accepted :])))
            row.text.stand([outcome.next_token], own[outcome.accepted :])
            row.draft = Draft()
        for row, note in zip(self.rows, health.learn(self.pace, "full", fared), strict=True):
            if note is not None:
                row.note(note)
        self._let_go()

    def decode_on(self) -> None:
        """Plain decoding, a token a row and step, until all texts have ended."""
        if self.rows:
            self._tell(Phase("decode"))
        while self.rows:
            logits = self._step("plain", [row.text.token_ids[-1:] for row in self.rows])
            for number, row in enumerate(self.rows):
                p = row.distribution(logits[number, 0], row.text.token_ids)
                row.text.stand([draw(p, row.generator)], logits[number])
            self._let_go()

    def measure(self, *, logits: int = 0) -> None:
        """Keep the parts of the largest sum of bytes that the run has taken."""
        parts = {
            "cache": self.cache_bytes,
            "codes": sum(arriving.bytes_codes for arriving in self.arriving.values()),
            "in_flight": sum(arriving.bytes_in_flight for arriving in self.arriving.values()),
            "logits": logits + sum(row.draft.nbytes for row in self.rows),
        }
        if sum(parts.values()) > sum(self.peak_parts.values()):
            self.peak_parts = parts

    def result(self, texts: list[GenerateResult]) -> BatchResult:
        """What `generate_batch` returns."""
        complete = [
            reader.opened_at + arriving.complete_s["full"] - self.began_at
            for reader, arriving in self.arriving.items()
            if "full" in arriving.complete_s
        ]
        drafts = [text.first_draft_s for text in texts if text.first_draft_s is not None]
        return BatchResult(
            texts=texts,
            precision="anchor" if self.target == "anchor" and self.has_residual else "full",
            first_draft_s=min(drafts, default=None),
            full_s=max(complete, default=None),
            first_verified_s=min(text.first_verified_s for text in texts),
            total_s=time.perf_counter() - self.began_at,
            bytes_fetched=sum(arriving.bytes_total for arriving in self.arriving.values()),
            cache_bytes=self.cache_bytes,
        )

    def _drafts(self, row: _Row) -> bool:
        """Whether one more token of a row's is wanted."""
        limit = min(self.limit, row.prompt.room_tokens)
        ended = len(row.draft.token_ids) >= limit or row.draft.ended(self.model.eos_token_ids)
        return not ended and row.wants.wanted()

    def _goes_on(self, pending: int) -> bool:
        """Refine with what has arrived, and say whether one more token a row is wanted."""
        for arriving in self.arriving.values():
            arriving.take_ready()
        if not self.auto:
            return self.limit > 0
        missing = [arriving for arriving in self.arriving.values() if not arriving.complete("full")]
        return bool(missing) and self.pace.pays(
            "full",
            drafted=max(len(row.draft.token_ids) for row in self.rows),
            pending=pending,
            suffix=max(len(row.prompt.suffix_ids) for row in self.rows),
            left_s=max(arriving.left_s("full")[0] for arriving in missing),
        )

    def _step(self, track: Track, token_ids: Sequence[Sequence[int]], *, rows: int = 1) -> Tensor:
        began = time.perf_counter()
        logits = self.model.batch_step(self.cache, token_ids, rows=rows)
        ended = time.perf_counter()
        self.pace.stepped(max(map(len, token_ids)), ended - began)
        self.measure(logits=logits.nbytes)
        for row, ids in zip(self.rows, token_ids, strict=True):
            if ids:
                row.wants.on_event(Span(track, began - row.began_at, ended - row.began_at, len(ids)))
        return logits

    def _tell(self, event: Event) -> None:
        for row in self.rows:
            row.wants.on_event(event)

    def _let_go(self) -> None:
        """Take leave of rows that have ended, and of those that nobody wants."""
        for number in reversed(range(len(self.rows))):
            row = self.rows[number]
            if row.text.stopped:
                row.wants.on_end(self._text_of(row))
            if row.text.stopped or not row.wants.wanted():
                self.cache.drop_row(number)
                self.rows[number] = self.rows[-1]
                self.rows.pop()

    def _text_of(self, row: _Row) -> GenerateResult:
        assert row.text.stopped is not None
        assert row.text.first_s is not None
        reader = row.wants.reader
        arriving, later_s = self.arriving[reader], reader.opened_at - row.began_at
        complete_s = {stage: seconds + later_s for stage, seconds in arriving.complete_s.items()}
        parts = {name: count // self.count for name, count in self.peak_parts.items()}
        counts = reader in self.uncounted
        self.uncounted.discard(reader)
        return GenerateResult(
            text=row.text.text,
            token_ids=row.text.token_ids,
            precision="anchor" if self.target == "anchor" and arriving.has("full") else "full",
            drafted=row.drafted,
            accepted=row.accepted,
            anchor_s=complete_s.get("anchor"),
            first_draft_s=row.first_draft_s,
            full_s=complete_s.get("full"),
            first_verified_s=row.text.first_s,
            total_s=row.now(),
            bytes_anchor=reader.bytes_anchor if counts else 0,
            bytes_residual=reader.bytes_residual if counts and "full" in complete_s else 0,
            peak_bytes=sum(parts.values()),
            peak_parts=parts,
            stopped=row.text.stopped,
            notes=row.notes,
        )


def _target_of(row: _Row, logits: Tensor, count: int) -> Tensor:
    return row.distribution(logits[count], row.draft.token_ids[:count])


@contextmanager
def _opened(
    prompts: Sequence[BatchPrompt], model: BatchModel, speculate: Speculate, verify: Verify, pace: Pace | None
) -> Iterator[_Batch]:
    """Check everything, make room, and start to fetch."""
    if not prompts:
        raise InputError("there are no prompts", hint="give at least one")
    if verify not in ("none", "full"):
        raise InputError(
            f"verify is {verify!r}: batches are verified against full caches", hint="use full or none, or generate"
        )
    rows = [_placed(wants, model) for wants in prompts]
    longest = max(len(row.prompt.suffix_ids) for row in rows)
    room = max(row.prompt.room_tokens for row in rows)
    # Tokens that did not pass keep their slots.
    cache = model.new_batch_cache([wants.reader.extent.layers for wants in prompts], longest + 2 * room)
    sharing: dict[CacheReader, list[int]] = {}
    for number, row in enumerate(rows):
        cache.forget_stored(number, row.prompt.base)
        sharing.setdefault(row.wants.reader, []).append(number)
    target: Precision = "anchor" if verify == "none" else "full"

    def arrived(own: Sequence[_Row], event: Event) -> None:
        batch.measure()
        for row in own:
            row.tell_of_arrival(event)

    with ExitStack() as stack:
        arriving = {
            reader: stack.enter_context(
                closing(
                    ArrivingCache(
                        reader,
                        cache.row(own[0]),
                        target,
                        straight=speculate == "off",
                        hold=True,
                        on_written=partial(_copy, cache, own, reader),
                        on_event=partial(arrived, [rows[number] for number in own]),
                    )
                )
            )
            for reader, own in sharing.items()
        }
        batch = _Batch(rows, model, cache, arriving, target=target, speculate=speculate, pace=pace or Pace())
        for item in arriving.values():
            item.start()
        yield batch


def _placed(wants: BatchPrompt, model: BatchModel) -> _Row:
    """A row whose wishes have been checked."""
    check_identity(wants.reader.extent.identity, model.identity)
    prompt = place(
        wants.reader,
        model,
        wants.suffix_ids,
        max_new_tokens=wants.max_new_tokens,
        needs_history=wants.sampling.needs_history,
        use_logits=False,
    )
    began_at = wants.reader.opened_at if wants.began_at is None else wants.began_at
    return _Row(
        wants=wants,
        prompt=prompt,
        text=VerifiedText(
            model.to_text,
            eos_token_ids=model.eos_token_ids,
            stop=wants.stop,
            max_tokens=prompt.room_tokens,
            now=lambda: time.perf_counter() - began_at,
            on_event=wants.on_event,
            top_logprobs=wants.top_logprobs,
        ),
        stream=TextStream(model.to_text),
        generator=wants.sampling.generator(model.device),
        began_at=began_at,
    )


def _copy(cache: BatchLiveCache, rows: Sequence[int], reader: CacheReader, payloads: Sequence[SegmentPayload]) -> None:
    """Give what was just decoded for the first of `rows` to the others."""
    if len(rows) == 1:
        return
    extent = reader.extent  # of a chain that is still being written it has grown
    for payload in payloads:
        ref, part = payload.segment.plan.tensor, payload.segment.plan.part
        if ref is None or part in ("mean", "order"):
            continue
        span = extent.spans[payload.span]
        start, stop = 0, span.loaded_sinks(ref)
        if part != "sink":
            plan = payload.segment.coded[1]
            start = ref.sinks + plan.first_token
            stop = start + span.loaded_tokens(ref, plan)
        offset = extent.offset(payload.span, ref.layer)
        cache.copy_stored(rows[0], rows[1:], ref.layer, ref.name, slice(offset + start, offset + stop))
