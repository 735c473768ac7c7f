"""Progressive decoding of several prompts together: over one cache, over several, or both.

The rows of a batch draft, wait and verify at the same time, and accept each its own prefix of its own draft. A cache
that several rows share is fetched, decoded and refined once, and copied to the others.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from lynxkv.arriving import ArrivingCache
from lynxkv.choices import Verify
from lynxkv.draft import Draft, Speculate, draft_tokens
from lynxkv.errors import InputError
from lynxkv.fetch import CacheReader, SegmentPayload
from lynxkv.identity import check_identity
from lynxkv.layout import Extent, Precision
from lynxkv.models import BatchLiveCache, BatchModel
from lynxkv.pace import Pace
from lynxkv.prompt import Prompt, place
from lynxkv.sampling import Sampling, draw
from lynxkv.text import GrowingText, Stopped
from lynxkv.verify import accept


@dataclass(frozen=True, kw_only=True)
class BatchText:
    """The finished text of one row; see `GenerateResult`."""

    text: str
    token_ids: list[int]
    drafted: int
    accepted: int
    stopped: Stopped


@dataclass(frozen=True, kw_only=True)
class BatchResult:
    """All texts, in the order of the prompts. Seconds count from when the first cache was opened."""

    texts: list[BatchText]
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
    max_new_tokens: int = 256,
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
        UnsupportedModelError: the model has sliding-window layers.
        IdentityError, InputError, FetchError, FormatError: as for `generate`; no text is returned.
    """
    if not prompts:
        raise InputError("there are no prompts", hint="give at least one")
    if verify not in ("none", "full"):
        raise InputError(
            f"verify is {verify!r}: batches are verified against full caches", hint="use full or none, or generate"
        )
    with _opened(prompts, model, max_new_tokens, sampling or Sampling(), speculate, verify, stop, pace) as batch:
        if verify == "full" and batch.has_residual:
            batch.draft()
        batch.verify()
        batch.decode_on()
        return batch.result()


@dataclass
class _Row:
    """One prompt's state."""

    prompt: Prompt
    text: GrowingText
    sampling: Sampling
    generator: torch.Generator
    draft: Draft = field(default_factory=Draft)
    drafted: int = 0
    accepted: int = 0

    def distribution(self, logits: Tensor, new_ids: Sequence[int]) -> Tensor:
        """Of the token after the suffix and `new_ids`."""
        history = [*self.prompt.history, *self.prompt.suffix_ids, *new_ids] if self.sampling.needs_history else []
        return self.sampling.distribution(logits, history)


class _Batch:
    """The state of a run. `generate_batch` calls the methods in order."""

    def __init__(
        self,
        rows: list[_Row],
        model: BatchModel,
        cache: BatchLiveCache,
        arriving: list[ArrivingCache],
        readers: list[CacheReader],
        *,
        target: Precision,
        speculate: Speculate,
        pace: Pace,
    ) -> None:
        self.rows, self.model, self.cache, self.arriving, self.readers = rows, model, cache, arriving, readers
        self.target, self.auto, self.pace = target, speculate == "auto", pace
        # Of each draft token there are the logits of its verification, and both distributions.
        most = draft_tokens(speculate, 3 * 4 * model.vocab_tokens * len(rows))
        self.limit = min(most, *(row.prompt.room_tokens for row in rows))
        self.first_draft_s: float | None = None
        self.first_verified_s: float | None = None

    @property
    def has_residual(self) -> bool:
        """Whether there is anything to draft before."""
        return any(arriving.has("full") for arriving in self.arriving)

    def draft(self) -> None:
        """Propose a token a row and step, refining between steps with what has arrived."""
        # All Anchors before any Residual.
        for arriving in self.arriving:
            arriving.wait_for("anchor")
        for arriving in self.arriving:
            arriving.start_residual()
        pending = [row.prompt.suffix_ids for row in self.rows]
        while any(pending) and self._goes_on(max(map(len, pending))):
            logits = self._step(pending)
            for number, row in enumerate(self.rows):
                pending[number] = []
                if len(row.draft.token_ids) == self.limit or row.draft.ended(self.model.eos_token_ids):
                    continue
                q = row.distribution(logits[number, 0], row.draft.token_ids)
                row.draft.q.append(q)
                row.draft.token_ids.append(draw(q, row.generator))
                pending[number] = row.draft.token_ids[-1:]
            if self.first_draft_s is None:
                self.first_draft_s = self._now()

    def verify(self) -> None:
        """One pass over all suffixes and drafts on the target caches; what passes stands, row by row."""
        for arriving in self.arriving:
            arriving.wait_for(self.target)
        self.cache.rollback(self.cache.stored)
        longest = max(len(row.draft.token_ids) for row in self.rows)
        logits = self._step([[*row.prompt.suffix_ids, *row.draft.token_ids] for row in self.rows], longest + 1)
        for number, row in enumerate(self.rows):
            ids = row.draft.token_ids
            own = logits[number, longest - len(ids) :]
            outcome = accept(ids, row.draft.q, partial(self._target_of, row, own), row.generator)
            self.cache.forget_last(number, len(ids) - outcome.accepted)
            self.pace.verified("full", len(ids), outcome.accepted)
            row.drafted, row.draft = len(ids), Draft()
            self._stand(row, ids[: outcome.accepted])
            row.accepted = len(row.text.token_ids)
            self._stand(row, [outcome.next_token])

    def decode_on(self) -> None:
        """Plain decoding, a token a row and step, until all texts have ended."""
        while not all(row.text.stopped for row in self.rows):
            logits = self._step([[] if row.text.stopped else row.text.token_ids[-1:] for row in self.rows])
            for number, row in enumerate(self.rows):
                if not row.text.stopped:
                    p = row.distribution(logits[number, 0], row.text.token_ids)
                    self._stand(row, [draw(p, row.generator)])

    def result(self) -> BatchResult:
        """What `generate_batch` returns."""
        assert self.first_verified_s is not None
        complete = [arriving.complete_s.get("full") for arriving in self.arriving]
        texts = []
        for row in self.rows:
            assert row.text.stopped is not None
            texts.append(
                BatchText(
                    text=row.text.text,
                    token_ids=row.text.token_ids,
                    drafted=row.drafted,
                    accepted=row.accepted,
                    stopped=row.text.stopped,
                )
            )
        return BatchResult(
            texts=texts,
            precision="anchor" if self.target == "anchor" and self.has_residual else "full",
            first_draft_s=self.first_draft_s,
            full_s=max((seconds for seconds in complete if seconds is not None), default=None),
            first_verified_s=self.first_verified_s,
            total_s=self._now(),
            bytes_fetched=sum(arriving.bytes_total for arriving in self.arriving),
            cache_bytes=self.cache.nbytes,
        )

    def _goes_on(self, pending: int) -> bool:
        """Refine with what has arrived, and say whether one more token a row is wanted."""
        for arriving in self.arriving:
            arriving.take_ready()
        if not self.auto:
            return True
        missing = [arriving for arriving in self.arriving if not arriving.complete("full")]
        return bool(missing) and self.pace.pays(
            "full",
            drafted=max(len(row.draft.token_ids) for row in self.rows),
            pending=pending,
            suffix=max(len(row.prompt.suffix_ids) for row in self.rows),
            left_s=max(arriving.left_s("full")[0] for arriving in missing),
        )

    def _step(self, token_ids: Sequence[Sequence[int]], rows: int = 1) -> Tensor:
        began = time.perf_counter()
        logits = self.model.batch_step(self.cache, token_ids, rows=rows)
        self.pace.stepped(max(map(len, token_ids)), time.perf_counter() - began)
        return logits

    def _target_of(self, row: _Row, logits: Tensor, count: int) -> Tensor:
        return row.distribution(logits[count], row.draft.token_ids[:count])

    def _stand(self, row: _Row, token_ids: Sequence[int]) -> None:
        for token in token_ids:
            if row.text.stopped:
                return
            row.text.add(token)
            if self.first_verified_s is None:
                self.first_verified_s = self._now()

    def _now(self) -> float:
        return time.perf_counter() - min(reader.opened_at for reader in self.readers)


@contextmanager
def _opened(
    prompts: Sequence[tuple[CacheReader, Sequence[int]]],
    model: BatchModel,
    max_new_tokens: int,
    sampling: Sampling,
    speculate: Speculate,
    verify: Verify,
    stop: Sequence[str],
    pace: Pace | None,
) -> Iterator[_Batch]:
    """Check everything, make room, and start to fetch."""
    placed: list[Prompt] = []
    for reader, suffix_ids in prompts:
        check_identity(reader.extent.identity, model.identity)
        placed.append(
            place(
                reader,
                model,
                suffix_ids,
                max_new_tokens=max_new_tokens,
                needs_history=sampling.needs_history,
                use_logits=False,
            )
        )
    rows = [
        _Row(
            prompt=prompt,
            text=GrowingText(
                model.to_text, eos_token_ids=model.eos_token_ids, stop=stop, max_tokens=prompt.room_tokens
            ),
            sampling=sampling,
            generator=torch.Generator(model.device).manual_seed(sampling.seed + number),
        )
        for number, prompt in enumerate(placed)
    ]
    longest = max(len(prompt.suffix_ids) for prompt in placed)
    room = max(prompt.room_tokens for prompt in placed)
    # Tokens that did not pass keep their slots.
    cache = model.new_batch_cache([reader.extent.layers for reader, _ in prompts], longest + 2 * room)
    for number, prompt in enumerate(placed):
        cache.forget_stored(number, prompt.base)
    sharing: dict[CacheReader, list[int]] = {}
    for number, (reader, _) in enumerate(prompts):
        sharing.setdefault(reader, []).append(number)
    target: Precision = "anchor" if verify == "none" else "full"
    with ExitStack() as stack:
        arriving = [
            stack.enter_context(
                closing(
                    ArrivingCache(
                        reader,
                        cache.row(own[0]),
                        target,
                        straight=speculate == "off",
                        hold=True,
                        on_written=partial(_copy, cache, own, reader.extent),
                    )
                )
            )
            for reader, own in sharing.items()
        ]
        for item in arriving:
            item.start()
        yield _Batch(
            rows, model, cache, arriving, list(sharing), target=target, speculate=speculate, pace=pace or Pace()
        )


def _copy(cache: BatchLiveCache, rows: Sequence[int], extent: Extent, payloads: Sequence[SegmentPayload]) -> None:
    """Give what was just decoded for the first of `rows` to the others."""
    if len(rows) == 1:
        return
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
