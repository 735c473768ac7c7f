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
from contextlib import closing
from functools import partial
from types import TracebackType
from typing import Literal, Self

import torch
from torch import Tensor

from lynxkv.arriving import Arriving
from lynxkv.choices import Verify
from lynxkv.decoder import CacheDecoder, check_exact_destination, check_precision
from lynxkv.draft import SUFFIX_CHUNK_TOKENS, Draft, propose
from lynxkv.errors import InputError
from lynxkv.events import (
    AnchorProgress,
    Drafted,
    Event,
    GenerateResult,
    Note,
    Phase,
    Provisional,
    Rejected,
    ResidualProgress,
    Span,
    Track,
    Verified,
)
from lynxkv.fetch import CacheReader, SegmentPayload, SegmentStream
from lynxkv.identity import check_identity
from lynxkv.layout import Precision, TensorName
from lynxkv.models import DecoderModel
from lynxkv.pace import Pace
from lynxkv.prompt import place
from lynxkv.sampling import Sampling, draw
from lynxkv.text import GrowingText, TextStream
from lynxkv.verify import Acceptance, accept

# Bounds the memory of a draft's distributions, and of the logits and distributions of its verification.
DRAFT_BYTES = 256 << 20
Speculate = Literal["auto", "off"] | int
# What the text is verified against, one after the other.
STAGES: dict[Verify, tuple[Precision, ...]] = {"none": (), "full": ("full",), "exact": ("full", "exact")}


def generate(
    reader: CacheReader,
    model: DecoderModel,
    suffix_ids: Sequence[int],
    *,
    max_new_tokens: int = 256,
    sampling: Sampling | None = None,
    speculate: Speculate = "auto",
    verify: Verify = "full",
    stop: Sequence[str] = (),
    pace: Pace | None = None,
    on_event: Callable[[Event], None] = lambda event: None,
) -> GenerateResult:
    """Answer from a cache that is still arriving; the text is that of decoding on the full or the exact cache.

    Args:
        suffix_ids: tokens after the cached prompt. Empty: the last cached token is run again, or, with `verify`
            "exact", the first token comes from the logits that the cache stores.
        sampling: greedy by default.
        speculate: "auto" drafts while the Residual is in flight, as long as one more token is worth its cost; a number
            drafts that many, in each stage; "off" waits for the target cache and then decodes.
        verify: the target. "exact" is the original cache: text that passed the full one is provisional until then.
            "none" decodes on the anchor alone: the Residual is not fetched and the text is marked so.
        stop: strings that end the verified text.
        pace: what earlier runs with this model and codec have taught, for "auto"; this run adds to it.
        on_event: told of everything that happens, in order.

    Raises:
        IdentityError: the cache belongs to another model.
        InputError: an option is out of range, the context is too short, hidden token ids would be needed, or cache or
            model do not hold exact values to verify against.
        FetchError, FormatError: the cache cannot be fetched or is damaged; no text is returned.
    """
    if isinstance(stop, str):
        raise InputError("stop is one string", hint="give a list of strings")
    if verify not in STAGES:
        raise InputError(f"verify is {verify!r}", hint=f"use one of {', '.join(STAGES)}")
    with _Run(
        reader, model, suffix_ids, max_new_tokens, sampling or Sampling(), speculate, verify, stop, pace, on_event
    ) as run:
        run.take_first_from_logits()
        if not run.text.stopped:
            run.decode_anchor()
            for precision in run.stages:
                if run.decoder.complete(precision):
                    continue
                run.draft_while_refining(precision)
                run.refine_rest(precision)
                if not run.target_reached:
                    run.verify_provisionally()
            run.decoder.release()
            run.verify_draft()
            run.decode_on()
        return run.result()


class _Run:
    """The state of one run. `generate` calls the methods in order."""

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
        on_event: Callable[[Event], None],
    ) -> None:
        self.started_at = time.perf_counter()
        header = reader.header
        check_identity(header.identity, model.identity)
        check_precision(header, "exact" if verify == "exact" else "full")
        self.reader, self.model, self.sampling, self.on_event = reader, model, sampling, on_event
        self.verify: Verify = verify
        # Without a draft there is nothing to verify on the way to the target.
        self.stages = STAGES[verify][-1:] if speculate == "off" else STAGES[verify]
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
        self.stage_tokens = _draft_tokens(speculate, DRAFT_BYTES // (3 * 4 * model.vocab_tokens))
        self.text = GrowingText(
            model.to_text, eos_token_ids=model.eos_token_ids, stop=stop, max_tokens=prompt.room_tokens
        )
        self.cache = model.new_cache(
            header.tokens.stop,
            len(self.suffix_ids) + prompt.room_tokens,
            layers=header.layers,
            # Draft and verification both run before a sliding layer may move.
            rollback_tokens=2 * (len(self.suffix_ids) + self._longest_draft() + 1),
        )
        if verify == "exact":
            check_exact_destination(header, self.cache.target(0, next(iter(header.layers[0].tensors))).dtype)
        self.decoder = CacheDecoder(header, self.cache)
        self.residual: SegmentStream | None = None
        self.residual_started_s = 0.0
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
        self.aside: dict[tuple[int, TensorName], Tensor] = {}
        self.bytes_anchor = 0
        self.peak_parts: dict[str, int] = {}
        self.complete_s: dict[Precision, float] = {}
        self.first_draft_s: float | None = None
        self.first_provisional_s: float | None = None
        self.first_verified_s: float | None = None

    @property
    def target_reached(self) -> bool:
        """Whether the cache holds what the text is to be verified against."""
        return self.decoder.complete(self.stages[-1])

    def take_first_from_logits(self) -> None:
        """The original's next token, if the prompt ends with the cache: no KV is needed to tell it."""
        if not self.given_tokens:
            return
        stored = self.reader.logits()
        assert stored is not None
        self.bytes_anchor = self.reader.anchor_head.header_bytes + stored.nbytes
        logits = torch.from_numpy(stored.copy()).to(self.model.device)
        self._measure(logits=logits.nbytes)
        token = draw(self.sampling.distribution(logits, self._history([])), self.generator)
        self._stand([token])
        self.suffix_ids = self.pending_ids = [token]
        self.draft_stream = self._new_stream()

    def decode_anchor(self) -> None:
        """Fetch the Anchor into the cache; the suffix runs on each layer as it arrives, if a draft is to follow."""
        self.on_event(Phase("anchor"))
        with closing(self.reader.stream_anchor()) as stream:
            anchor = Arriving(self.reader.anchor_head.segments, stream, self._take_anchor)
            anchor.wait_for_layer(0)
            if self._suffix_starts_early(stream):
                self.cache.on_layer = anchor.wait_for_layer
                chunk = self.pending_ids[:SUFFIX_CHUNK_TOKENS]
                self.pending_logits = self._step("draft", chunk, waited=lambda: anchor.waited_s)
                self.pending_ids = self.pending_ids[len(chunk) :]
                self.cache.on_layer = None
            anchor.wait_for_all()
        assert self.decoder.complete_anchor
        self.bytes_anchor = self.reader.bytes_anchor
        self.on_event(AnchorProgress(self.bytes_anchor, self.bytes_anchor))
        self._swap_last()

    def draft_while_refining(self, precision: Precision) -> None:
        """Propose tokens on the cache as it is, refining it between model steps with what has arrived."""
        limit = min(self.max_draft_tokens, len(self.draft.token_ids) + self.stage_tokens)
        if len(self.draft.token_ids) >= limit or self.draft.ended(self.model.eos_token_ids):
            return
        assert self.residual is not None
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
            self._measure(in_flight=self.residual.bytes_in_flight, logits=self.draft.q[-1].nbytes)
            self.draft_text.append(self.draft_stream.push(token))
            self.on_event(Drafted(token, self.draft_text[-1]))
        if self.auto and len(self.draft.token_ids) == before:
            self._note(f"no draft: the {precision} cache is there before a draft would pay")

    def refine_rest(self, precision: Precision) -> None:
        """Wait until the cache has this precision."""
        assert self.residual is not None
        if not self.decoder.complete(precision):
            self.on_event(Phase("refine"))
        while not (self.decoder.complete(precision) or self.residual.done):
            self._refine(self.residual.wait())
        assert self.decoder.complete(precision)
        if self.target_reached:
            self.on_event(ResidualProgress(self._residual_total, self._residual_total))
            self._span("fetch", self.residual_started_s, self._residual_total)

    def verify_provisionally(self) -> None:
        """What passes the cache as it now is, correction included, becomes the draft that the target verifies.

        Its distributions are those of this pass: whatever it was drawn from before, it now follows them.
        """
        drafted = self.draft.token_ids
        outcome, p = self._pass_over_draft()
        passed = drafted[: outcome.accepted]
        self._learn("full", len(drafted), outcome.accepted)
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
        outcome, _ = self._pass_over_draft()
        self._stand(drafted[: outcome.accepted])
        if self.stages:
            self._learn(self.stages[-1], len(drafted), outcome.accepted)
        self._count(len(drafted), len(self.text.token_ids) - before)
        if not self.text.stopped:
            self._stand([outcome.next_token])
        self.draft = Draft()

    def decode_on(self) -> None:
        """Plain decoding, one token at a time."""
        if not self.text.stopped and self.outcomes[-1][0]:
            self.on_event(Phase("decode"))
        while not self.text.stopped:
            logits = self._step("plain", self.text.token_ids[-1:])
            p = self.sampling.distribution(logits[0], self._history(self.text.token_ids[self.given_tokens :]))
            self._stand([draw(p, self.generator)])

    def result(self) -> GenerateResult:
        """What `generate` returns."""
        assert self.text.stopped is not None
        assert self.first_verified_s is not None
        (drafted, accepted), (provisional, accepted_exact) = [*self.outcomes, (0, 0), (0, 0)][:2]
        return GenerateResult(
            text=self.text.text,
            token_ids=self.text.token_ids,
            precision=self._precision(),
            drafted=drafted,
            accepted=accepted,
            provisional=provisional,
            accepted_exact=accepted_exact,
            anchor_s=self.complete_s.get("anchor"),
            first_draft_s=self.first_draft_s,
            full_s=self.complete_s.get("full"),
            first_provisional_s=self.first_provisional_s,
            exact_s=self.complete_s.get("exact"),
            first_verified_s=self.first_verified_s,
            total_s=self._now(),
            bytes_anchor=self.bytes_anchor,
            bytes_residual=self.reader.bytes_residual if "full" in self.complete_s else 0,
            bytes_exact=self.reader.bytes_exact if "exact" in self.complete_s else 0,
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
        if self.residual is not None:
            self.residual.close()

    def _take_anchor(self, stream: SegmentStream, payload: SegmentPayload) -> None:
        """Decode one segment. The Residual is asked for as soon as all of the Anchor has arrived."""
        if stream.done and self.residual is None and self.stages and self.reader.header.residual is not None:
            self.residual = self.reader.start_residual(exact=self.verify == "exact")
            self.residual_started_s = self._now()
        began = self._now()
        self.decoder.anchor(payload)
        self._span("decode", began, payload.segment.stored_bytes)
        self._measure(in_flight=stream.bytes_in_flight + payload.raw.nbytes)
        self.on_event(AnchorProgress(stream.bytes_done, self.reader.bytes_anchor))
        if self.decoder.complete_anchor and "anchor" not in self.complete_s:
            self.complete_s["anchor"] = self._now()
            self._span("fetch", 0.0, self.reader.bytes_anchor)

    def _suffix_starts_early(self, anchor: SegmentStream) -> bool:
        """Whether the suffix is to run while the Anchor arrives: a draft follows, and no cached position runs again.

        With the first layer of the Anchor there, the link's speed is known.
        """
        if not (self.stages and self.stage_tokens and self.max_draft_tokens):
            return False
        if self.base < self.reader.header.tokens.stop or self.decoder.complete(self.stages[0]):
            return False
        return not self.auto or self._pays(self.stages[0], len(self.pending_ids), anchor.bytes_done)

    def _draft_goes_on(self, precision: Precision, pending: int) -> bool:
        """Refine with what has arrived, and say whether one more proposal, `pending` tokens away, is wanted."""
        assert self.residual is not None
        self._refine(self.residual.ready())
        if not self.auto:
            return True
        done = self.reader.bytes_anchor + self.residual.bytes_done
        return not self.decoder.complete(precision) and self._pays(precision, pending, done)

    def _pays(self, precision: Precision, pending: int, done_bytes: int) -> bool:
        """Whether one more proposal is worth its cost; `done_bytes` of the cache have arrived."""
        total = self.reader.bytes_anchor + self.reader.bytes_residual
        if precision == "exact":
            total += self.reader.bytes_exact
        left_s = max(0, total - done_bytes) / max(1, done_bytes) * (time.perf_counter() - self.started_at)
        return self.pace.pays(precision, drafted=len(self.draft.token_ids), pending=pending, left_s=left_s)

    def _step(
        self,
        track: Track,
        token_ids: Sequence[int],
        *,
        rows: int = 1,
        waited: Callable[[], float] = lambda: 0.0,
    ) -> Tensor:
        """Run `token_ids` after what the cache holds; logits f32 [rows, V]. `waited` is what the cache took of it."""
        began, before = self._now(), waited()
        logits = self.model.step(self.cache, token_ids, rows=rows)
        seconds = self._now() - began - (waited() - before)
        self.pace.stepped(len(token_ids), seconds)
        self.on_event(Span(track, self._now() - seconds, self._now(), len(token_ids)))
        return logits

    def _learn(self, target: Precision, drafted: int, accepted: int) -> None:
        """Keep how a draft has fared against `target`, and say so if it was badly."""
        if self.pace.is_poor(target, drafted, accepted):
            self._note(
                f"only {accepted} of {drafted} draft tokens passed the {target} cache: its Anchor is coarse for this "
                "text; `lynxkv encode --codec quality` makes a finer one"
            )
        self.pace.verified(target, drafted, accepted)

    def _note(self, text: str) -> None:
        self.notes.append(text)
        self.on_event(Note(text))

    def _span(self, track: Track, began_s: float, amount: int) -> None:
        self.on_event(Span(track, began_s, self._now(), amount))

    def _pass_over_draft(self) -> tuple[Acceptance, list[Tensor]]:
        """One pass over suffix and draft on the cache as it now is; what the draft left in it is overwritten.

        Returns what the acceptance rule says, and p [V] for each accepted token and the one after them.
        """
        drafted = self.draft.token_ids
        self.on_event(Phase("verify" if drafted else "decode"))
        self.cache.rollback(self.base)
        logits = self._step("verify", [*self.suffix_ids, *drafted], rows=len(drafted) + 1)
        self._measure(logits=logits.nbytes)
        rows: list[Tensor] = []

        def p(count: int) -> Tensor:
            rows.append(self.sampling.distribution(logits[count], self._history(drafted[:count])))
            return rows[-1]

        outcome = accept(drafted, self.draft.q, p, self.generator)
        self._measure(logits=logits.nbytes + sum(row.nbytes for row in rows))
        self.cache.rollback(self.base + len(self.suffix_ids) + outcome.accepted)
        return outcome, rows

    def _count(self, drafted: int, accepted: int) -> None:
        """Keep the figures of a verification, and report what did not pass."""
        self.outcomes.append((drafted, accepted))
        if accepted < drafted:
            self.on_event(Rejected(self.draft.token_ids[accepted:], "".join(self.draft_text[accepted:])))

    def _refine(self, payloads: Sequence[SegmentPayload]) -> None:
        if not payloads:
            return
        assert self.residual is not None
        self._swap_last()
        for payload in payloads:
            began = self._now()
            self.decoder.refine(payload)
            self._span("refine", began, payload.segment.stored_bytes)
            self._measure(in_flight=self.residual.bytes_in_flight + payload.raw.nbytes)
            self.on_event(ResidualProgress(self.residual.bytes_done, self._residual_total))
        self._swap_last()
        for precision in STAGES[self.verify]:
            if self.decoder.complete(precision):
                self.complete_s.setdefault(precision, self._now())

    def _swap_last(self) -> None:
        """Stored values of cached positions that the model runs again, against what it wrote there.

        Exact values are found from full ones, so that these must be there when they are corrected.
        """
        if self.base == self.reader.header.tokens.stop:
            return
        for number, layer in enumerate(self.reader.header.layers):
            for name in layer.tensors:
                place = self.cache.target(number, name)[:, self.base - layer.start :]
                written = place.clone()
                place.copy_(self.aside.get((number, name), written))
                self.aside[number, name] = written

    @property
    def _residual_total(self) -> int:
        return self.reader.bytes_residual + (self.reader.bytes_exact if self.verify == "exact" else 0)

    def _precision(self) -> Precision:
        """Of the cache that the text follows."""
        if self.verify == "exact":
            return "exact"
        return "full" if self.decoder.complete_full else "anchor"

    def _new_stream(self) -> TextStream:
        """Text that goes on after what stands."""
        stream = TextStream(self.model.to_text)
        for token in self.text.token_ids:
            stream.push(token)
        return stream

    def _longest_draft(self) -> int:
        """Tokens a draft can reach: each stage adds its own and the correction of the one before."""
        return min(self.max_draft_tokens, len(self.stages) * (self.stage_tokens + 1))

    def _stand(self, token_ids: Sequence[int]) -> None:
        """Add tokens to the verified text, as far as it goes on."""
        before, released = len(self.text.token_ids), ""
        for token in token_ids:
            if self.text.stopped:
                break
            released += self.text.add(token)
        stood = self.text.token_ids[before:]
        if stood:
            if self.first_verified_s is None:
                self.first_verified_s = self._now()
            self.on_event(Verified(stood, released))

    def _history(self, new_ids: Sequence[int]) -> list[int]:
        """Ids of all tokens before the next one; not put together where sampling does not look at them."""
        return [*self.history, *self.suffix_ids, *new_ids] if self.sampling.needs_history else []

    def _measure(self, *, in_flight: int = 0, logits: int = 0) -> None:
        parts = {
            "cache": self.cache.nbytes,
            "codes": self.decoder.resident_bytes,
            "in_flight": in_flight,
            "logits": logits + self.draft.nbytes,
        }
        if sum(parts.values()) > sum(self.peak_parts.values()):
            self.peak_parts = parts

    def _now(self) -> float:
        return time.perf_counter() - self.reader.opened_at


def _draft_tokens(speculate: object, most: int) -> int:
    """The most tokens that an option lets a stage propose."""
    if speculate == "auto":
        return most
    if speculate == "off":
        return 0
    if not isinstance(speculate, int) or speculate < 1:
        raise InputError(f"speculate is {speculate!r}", hint="use auto, off, or a number of tokens")
    return speculate
