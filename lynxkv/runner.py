"""Progressive decoding, as in the README's figure:

fetch    |--- Anchor ---|------- Residual -------|
model          | suffix |-- draft on the anchor --| verify |-- decode on the full cache --
                          (refined in place)

When the target is the original cache, this happens twice: what passed the full cache is the draft of a second stage.

fetch    |--- Anchor ---|------- Residual -------|--------- exact section ---------|
model                   |-- draft on the anchor --| verify |-- draft on the full --| verify |-- decode --
                                                         (provisional text)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from lynxkv import health
from lynxkv.arriving import ArrivingCache
from lynxkv.choices import MAX_NEW_TOKENS, Verify
from lynxkv.decoder import check_exact_destination, check_precision
from lynxkv.draft import SUFFIX_CHUNK_TOKENS, Draft, Speculate, draft_tokens, propose
from lynxkv.errors import CacheNotFoundError, FetchError, InputError
from lynxkv.events import (
    Drafted,
    Event,
    GenerateResult,
    Note,
    Phase,
    Provisional,
    Rejected,
    Span,
    Track,
)
from lynxkv.fetch import CacheReader
from lynxkv.identity import check_identity
from lynxkv.layout import Precision, TensorName
from lynxkv.models import DecoderModel
from lynxkv.pace import Pace
from lynxkv.prompt import place
from lynxkv.sampling import Sampling, draw
from lynxkv.text import TextStream
from lynxkv.verified import VerifiedText
from lynxkv.verify import Acceptance, accept, agreement

# What a draft is verified against, one after the other; the last is the target.
TARGETS: dict[Verify, tuple[Precision, ...]] = {"none": (), "full": ("full",), "exact": ("full", "exact")}


def generate(
    reader: CacheReader,
    model: DecoderModel,
    suffix_ids: Sequence[int],
    *,
    max_new_tokens: int = MAX_NEW_TOKENS,
    sampling: Sampling | None = None,
    speculate: Speculate = "auto",
    verify: Verify = "full",
    stop: Sequence[str] = (),
    pace: Pace | None = None,
    top_logprobs: int | None = None,
    on_event: Callable[[Event], None] = lambda event: None,
) -> GenerateResult:
    """Answer from a cache that is still arriving; the text is that of decoding on the full or the exact cache.

    Args:
        suffix_ids: tokens after the cached prompt. Empty: the last cached token is run again, or, with `verify`
            "exact", the first token comes from the logits that the cache stores.
        sampling: greedy by default.
        speculate: "auto" drafts while the Residual is in flight, as long as one more token is worth its cost; a number
            drafts that many, in each stage, or what fits in `DRAFT_BYTES`; "off" waits for the target cache and then
            decodes.
        verify: the target. "exact" is the original cache: text that passed the full one is provisional until then.
            "none" decodes on the anchor alone: the Residual is not fetched and the text is marked so.
        stop: strings that end the verified text.
        pace: what earlier runs with this model and codec have taught, for "auto"; this run adds to it.
        top_logprobs: have `Verified` events tell the log probabilities of their tokens, and of so many likeliest ones.
        on_event: told of everything that happens, in order.

    Raises:
        IdentityError: the cache belongs to another model.
        InputError: an option is out of range, the context is too short, hidden token ids would be needed, or cache or
            model do not hold exact values to verify against.
        FetchError, FormatError: the cache cannot be fetched or is damaged; no text is returned. If the reader's
            options allow for a missing Residual, the text is decoded on the Anchor alone and marked so.
    """
    if verify not in TARGETS:
        raise InputError(f"verify is {verify!r}", hint=f"use one of {', '.join(TARGETS)}")
    with _Run(
        reader,
        model,
        suffix_ids,
        max_new_tokens,
        sampling or Sampling(),
        speculate,
        verify,
        stop,
        pace,
        top_logprobs,
        on_event,
    ) as run:
        try:
            return run.finish()
        except (CacheNotFoundError, FetchError):
            if reader.residual_problem is None or reader.options.if_residual_unavailable == "error":
                raise
            if run.text.token_ids:  # the original's first token, from its logits
                raise
            run.drop_draft()
    # What has been refined by now would make the cache a mixture.
    note = f"the Residual is not to be had, so the text is that of the Anchor alone: {reader.residual_problem}"
    on_event(Note(note))
    alone = generate(
        reader,
        model,
        suffix_ids,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        speculate=speculate,
        verify="none",
        stop=stop,
        pace=pace,
        top_logprobs=top_logprobs,
        on_event=on_event,
    )
    return replace(alone, notes=[note, *alone.notes])


class _Run:
    """The state of one run; `finish` calls the methods in order."""

    def __init__(
        self,
        reader: CacheReader,
        model: DecoderModel,
        suffix_ids: Sequence[int],
        max_new_tokens: int,
        sampling: Sampling,
        speculate: Speculate,
        verify: Verify,
        stop: Sequence[str],
        pace: Pace | None,
        top_logprobs: int | None,
        on_event: Callable[[Event], None],
    ) -> None:
        extent = reader.extent
        check_identity(extent.identity, model.identity)
        check_precision(extent, "exact" if verify == "exact" else "full")
        self.reader, self.model, self.sampling, self.on_event = reader, model, sampling, on_event
        self.target: Precision = (TARGETS[verify] or ("anchor",))[-1]
        self.speculates = speculate != "off"
        self.auto, self.pace = speculate == "auto", pace or Pace()
        prompt = place(
            reader,
            model,
            suffix_ids,
            max_new_tokens=max_new_tokens,
            needs_history=sampling.needs_history,
            use_logits=verify == "exact",
        )
        self.base, self.suffix_ids, self.history = prompt.base, prompt.suffix_ids, prompt.history
        # New tokens that need no KV: one, where the logits that the cache stores give it.
        self.given_tokens = 0 if prompt.suffix_ids else 1
        self.max_draft_tokens = prompt.room_tokens - self.given_tokens
        # Of each draft token there are the logits of its verification, and both distributions.
        self.stage_tokens = draft_tokens(speculate, 3 * 4 * model.vocab_tokens)
        self.text = VerifiedText(
            model.to_text,
            eos_token_ids=model.eos_token_ids,
            stop=stop,
            max_tokens=prompt.room_tokens,
            now=self._now,
            on_event=on_event,
            top_logprobs=top_logprobs,
        )
        self.cache = model.new_cache(
            extent.stop,
            len(self.suffix_ids) + prompt.room_tokens,
            layers=extent.layers,
            # Draft and verification both run before a sliding layer may move.
            rollback_tokens=2 * (len(self.suffix_ids) + self._longest_draft() + 1),
        )
        if verify == "exact":
            check_exact_destination(extent.dtype, self.cache.target(0, next(iter(extent.layers[0].tensors))).dtype)
        self.arriving = ArrivingCache(
            reader,
            self.cache,
            self.target,
            straight=speculate == "off",
            swap=self._swap_last,
            on_event=self._report,
        )
        drafts = self.stage_tokens and self.max_draft_tokens
        self.draft_stages = [stage for stage in TARGETS[verify] if drafts and self.arriving.has(stage)]
        # What a draft starts from: the suffix, or what is left of it, and logits if nothing is.
        self.pending_ids: Sequence[int] = self.suffix_ids
        self.pending_logits: Tensor | None = None
        self.generator = sampling.generator(model.device)
        self.draft = Draft()
        self.draft_stream = TextStream(model.to_text)
        self.draft_text: list[str] = []
        # Tokens that each verification looked at, and those it let pass.
        self.outcomes: list[tuple[int, int]] = []
        self.notes: list[str] = []
        self.bytes_given = 0
        self.aside: dict[tuple[int, TensorName], Tensor] = {}
        self.peak_parts: dict[str, int] = {}
        self.first_draft_s: float | None = None
        self.first_provisional_s: float | None = None

    def finish(self) -> GenerateResult:
        """The run, top to bottom."""
        self.take_first_from_logits()
        if not self.text.stopped:
            for precision in self.draft_stages:
                if self.arriving.complete(precision):
                    continue
                self.draft_while_refining(precision)
                if precision != self.target and not self.arriving.complete(self.target):
                    self.verify_provisionally(precision)
            self.verify_draft()
            self.decode_on()
        return self.result()

    def take_first_from_logits(self) -> None:
        """The original's next token, if the prompt ends with the cache: no KV is needed to tell it."""
        if not self.given_tokens:
            return
        stored = self.reader.logits()
        assert stored is not None
        self.bytes_given = self.reader.anchor_head.header_bytes + stored.nbytes
        logits = torch.from_numpy(stored.copy()).to(self.model.device)
        self._measure(logits=logits.nbytes)
        token = draw(self.sampling.distribution(logits, self._history([])), self.generator)
        self.text.stand([token], logits[None])
        self.suffix_ids = self.pending_ids = [token]
        self.draft_stream = self._new_stream()

    def draft_while_refining(self, precision: Precision) -> None:
        """Propose tokens on the cache as it is, refining it between model steps with what has arrived."""
        limit = min(self.max_draft_tokens, len(self.draft.token_ids) + self.stage_tokens)
        if len(self.draft.token_ids) >= limit or self.draft.ended(self.model.eos_token_ids):
            return
        if not self.arriving.complete("anchor"):
            self._decode_anchor(precision)
        self.on_event(Phase("draft"))
        before = len(self.draft.token_ids)
        for token in propose(
            partial(self._step, "draft"),
            self.draft.token_ids[-1:] or self.pending_ids,
            self.draft,
            logits=self.pending_logits,
            eos_token_ids=self.model.eos_token_ids,
            history=self._history([]),
            sampling=self.sampling,
            generator=self.generator,
            max_tokens=limit,
            go_on=partial(self._draft_goes_on, precision),
        ):
            if self.first_draft_s is None and not self.outcomes:
                self.first_draft_s = self._now()
            self._measure(logits=self.draft.q[-1].nbytes)
            self.draft_text.append(self.draft_stream.push(token))
            self.on_event(Drafted(token, self.draft_text[-1]))
        if self.auto and len(self.draft.token_ids) == before:
            self._note(health.why_none(self.pace, precision))

    def drop_draft(self) -> None:
        """Take back what has been proposed: nothing will verify it."""
        if self.draft.token_ids:
            self.on_event(Rejected(list(self.draft.token_ids), "".join(self.draft_text)))

    def verify_provisionally(self, precision: Precision) -> None:
        """What passes this precision, correction included, becomes the draft that the target verifies.

        Its distributions are those of this pass: whatever it was drawn from before, it now follows them.
        """
        drafted = self.draft.token_ids
        outcome, p, logits = self._pass_over_draft(precision)
        passed = drafted[: outcome.accepted]
        self._learn(precision, outcome.accepted, p, logits)
        if outcome.accepted < len(drafted) or not self.draft.ended(self.model.eos_token_ids):
            passed = [*passed, outcome.next_token][: self.max_draft_tokens]
        self._count(len(drafted), outcome.accepted)
        self.draft = Draft(passed, p[: len(passed)])
        self.draft_stream = self._new_stream()
        self.draft_text = [self.draft_stream.push(token) for token in passed]
        self.first_provisional_s = self._now()
        self.on_event(Provisional(list(passed), "".join(self.draft_text)))

    def verify_draft(self) -> None:
        """What passes the target stands. Without a draft this is the first step of plain decoding."""
        drafted, before = self.draft.token_ids, len(self.text.token_ids)
        outcome, p, logits = self._pass_over_draft(self.target)
        self.text.stand(drafted[: outcome.accepted], logits)
        self._learn(self.target, outcome.accepted, p, logits)
        self._count(len(drafted), len(self.text.token_ids) - before)
        if not self.text.stopped:
            self.text.stand([outcome.next_token], logits[outcome.accepted :])
        self.draft = Draft()

    def decode_on(self) -> None:
        """Plain decoding, one token at a time."""
        if not self.text.stopped and self.outcomes[-1][0]:
            self.on_event(Phase("decode"))
        while not self.text.stopped:
            logits = self._step("plain", self.text.token_ids[-1:])
            p = self.sampling.distribution(logits[0], self._history(self.text.token_ids[self.given_tokens :]))
            self.text.stand([draw(p, self.generator)], logits)

    def result(self) -> GenerateResult:
        """What `generate` returns."""
        assert self.text.stopped is not None
        assert self.text.first_s is not None
        complete_s = self.arriving.complete_s
        (drafted, accepted), (provisional, accepted_exact) = [*self.outcomes, (0, 0), (0, 0)][:2]
        return GenerateResult(
            text=self.text.text,
            token_ids=self.text.token_ids,
            precision=self._precision(),
            drafted=drafted,
            accepted=accepted,
            provisional=provisional,
            accepted_exact=accepted_exact,
            anchor_s=complete_s.get("anchor"),
            first_draft_s=self.first_draft_s,
            full_s=complete_s.get("full"),
            first_provisional_s=self.first_provisional_s,
            exact_s=complete_s.get("exact"),
            first_verified_s=self.text.first_s,
            total_s=self._now(),
            bytes_anchor=self.reader.bytes_anchor if "anchor" in complete_s else self.bytes_given,
            bytes_residual=self.reader.bytes_residual if "full" in complete_s else 0,
            bytes_exact=self.reader.bytes_exact if "exact" in complete_s else 0,
            peak_bytes=sum(self.peak_parts.values()),
            peak_parts=self.peak_parts,
            stopped=self.text.stopped,
            notes=self.notes,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cache.on_layer = None
        self.arriving.close()

    def _decode_anchor(self, target: Precision) -> None:
        """Fetch the Anchor; the suffix runs on each layer as it arrives, if a draft pays at the speed of the first."""
        self.on_event(Phase("anchor"))
        self.arriving.wait_for_layer("anchor", 0)
        if self._can_wait_by_layer and (not self.auto or self._pays(target, len(self.pending_ids))):
            chunk = self.pending_ids[:SUFFIX_CHUNK_TOKENS]
            self.pending_logits = self._step("draft", chunk, on="anchor")
            self.pending_ids = self.pending_ids[len(chunk) :]
        self.arriving.wait_for("anchor")

    def _draft_goes_on(self, precision: Precision, pending: int) -> bool:
        """Refine with what has arrived, and say whether one more proposal, `pending` tokens away, is wanted."""
        self.arriving.take_ready()
        return not self.auto or (not self.arriving.complete(precision) and self._pays(precision, pending))

    def _pays(self, target: Precision, pending: int) -> bool:
        """Whether one more proposal, `pending` tokens away, is worth its cost."""
        left_s, tail_s = self.arriving.left_s(target)
        return self.pace.pays(
            target,
            drafted=len(self.draft.token_ids),
            pending=pending,
            suffix=len(self.suffix_ids),
            left_s=left_s,
            tail_s=tail_s if self._can_wait_by_layer else 0.0,
        )

    @property
    def _can_wait_by_layer(self) -> bool:
        """Whether a step may run while its cache arrives: not if it writes to cached positions."""
        return self.base == self.reader.extent.stop

    def _step(self, track: Track, token_ids: Sequence[int], *, rows: int = 1, on: Precision | None = None) -> Tensor:
        """Run `token_ids` after what the cache holds, each layer once it has the precision `on`; f32 [rows, V]."""
        began, waited_s = self._now(), self.arriving.waited_s
        if on is not None:
            self.cache.on_layer = partial(self.arriving.wait_for_layer, on)
        logits = self.model.step(self.cache, token_ids, rows=rows)
        self.cache.on_layer = None
        seconds = self._now() - began - (self.arriving.waited_s - waited_s)
        self.pace.stepped(len(token_ids), seconds)
        self.on_event(Span(track, self._now() - seconds, self._now(), len(token_ids)))
        return logits

    def _learn(self, target: Precision, accepted: int, p: Sequence[Tensor], logits: Tensor) -> None:
        """Keep how a draft has fared against `target`, and say so if it was badly.

        `p`, `logits`: as `_pass_over_draft` returned them.
        """
        token_ids = self.draft.token_ids
        drafted = len(token_ids)
        unasked = (self._target(logits, token_ids[:count]) for count in range(accepted + 1, drafted))
        agreed = agreement(self.draft.q, [*p[:drafted], *unasked])
        for note in health.learn(self.pace, target, [health.Fared(drafted, accepted, agreed)]):
            if note is not None:
                self._note(note)

    def _note(self, text: str) -> None:
        self.notes.append(text)
        self.on_event(Note(text))

    def _pass_over_draft(self, precision: Precision) -> tuple[Acceptance, list[Tensor], Tensor]:
        """One pass over suffix and draft on the cache at this precision; what the draft left in it is overwritten.

        It runs behind what is still to arrive. Returns what the acceptance rule says; p [V] for each accepted token and
        the one after them; and the logits [n + 1, V] of the positions before all n draft tokens and after them.
        """
        drafted = self.draft.token_ids
        if not self.arriving.complete(precision):
            self.on_event(Phase("refine" if self.arriving.complete("anchor") else "anchor"))
        if not (self.speculates and self._can_wait_by_layer):
            self.arriving.wait_for(precision)
        self.on_event(Phase("verify" if drafted else "decode"))
        self.cache.rollback(self.base)
        logits = self._step("verify", [*self.suffix_ids, *drafted], rows=len(drafted) + 1, on=precision)
        self.arriving.wait_for(precision)
        self._measure(logits=logits.nbytes)
        rows: list[Tensor] = []

        def p(count: int) -> Tensor:
            rows.append(self._target(logits, drafted[:count]))
            return rows[-1]

        outcome = accept(drafted, self.draft.q, p, self.generator)
        self._measure(logits=logits.nbytes + sum(row.nbytes for row in rows))
        self.cache.rollback(self.base + len(self.suffix_ids) + outcome.accepted)
        return outcome, rows, logits

    def _target(self, logits: Tensor, token_ids: Sequence[int]) -> Tensor:
        """The distribution after these draft tokens, from the logits of a pass over all of them."""
        return self.sampling.distribution(logits[len(token_ids)], self._history(token_ids))

    def _count(self, drafted: int, accepted: int) -> None:
        """Keep the figures of a verification, and report what did not pass."""
        self.outcomes.append((drafted, accepted))
        if accepted < drafted:
            self.on_event(Rejected(self.draft.token_ids[accepted:], "".join(self.draft_text[accepted:])))

    def _swap_last(self) -> None:
        """Stored values of cached positions that the model runs again, against what it wrote there.

        Exact values are found from full ones, so that these must be there when they are corrected.
        """
        if self.base == self.reader.extent.stop:
            return
        for number, layer in enumerate(self.reader.extent.layers):
            for name in layer.tensors:
                place = self.cache.target(number, name)[:, self.base - layer.start :]
                written = place.clone()
                place.copy_(self.aside.get((number, name), written))
                self.aside[number, name] = written

    def _precision(self) -> Precision:
        """Of the cache that the text follows."""
        if self.target == "anchor" and not self.arriving.has("full"):
            return "full"
        return self.target

    def _new_stream(self) -> TextStream:
        """Text that goes on after what stands."""
        stream = TextStream(self.model.to_text)
        for token in self.text.token_ids:
            stream.push(token)
        return stream

    def _longest_draft(self) -> int:
        """Tokens a draft can reach: each stage adds its own and the correction of the one before."""
        return min(self.max_draft_tokens, 2 * (self.stage_tokens + 1))

    def _history(self, new_ids: Sequence[int]) -> list[int]:
        """Ids of all tokens before the next one; not put together where sampling does not look at them."""
        return [*self.history, *self.suffix_ids, *new_ids] if self.sampling.needs_history else []

    def _report(self, event: Event) -> None:
        """What the arriving cache tells, passed on."""
        self._measure()
        self.on_event(event)

    def _measure(self, *, logits: int = 0) -> None:
        parts = {
            "cache": self.cache.nbytes,
            "codes": self.arriving.bytes_codes,
            "in_flight": self.arriving.bytes_in_flight,
            "logits": logits + self.draft.nbytes,
        }
        if sum(parts.values()) > sum(self.peak_parts.values()):
            self.peak_parts = parts

    def _now(self) -> float:
        return time.perf_counter() - self.reader.opened_at
