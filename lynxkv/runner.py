"""Progressive decoding, as in the README's figure:

fetch    |--- Anchor ---|------- Residual -------|
model                   |-- draft on the anchor --| verify |-- decode on the full cache --
                          (refined in place)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Literal

from lynxkv.decoder import CacheDecoder
from lynxkv.draft import Draft, propose
from lynxkv.errors import InputError
from lynxkv.events import (
    AnchorProgress,
    Drafted,
    Event,
    GenerateResult,
    Phase,
    Rejected,
    ResidualProgress,
    Verified,
)
from lynxkv.fetch import CacheReader, SegmentPayload, SegmentStream
from lynxkv.identity import check_identity
from lynxkv.models import DecoderModel, check_prompt
from lynxkv.sampling import Sampling, draw
from lynxkv.text import GrowingText, TextStream
from lynxkv.verify import accept

# With per-token acceptance a the accepted length saturates near a / (1 - a): more than this is rarely verified.
AUTO_DRAFT_TOKENS = 64
Speculate = Literal["auto", "off"] | int


def generate(
    reader: CacheReader,
    model: DecoderModel,
    suffix_ids: Sequence[int],
    *,
    max_new_tokens: int = 256,
    sampling: Sampling | None = None,
    speculate: Speculate = "auto",
    verify: Literal["full", "none"] = "full",
    stop: Sequence[str] = (),
    on_event: Callable[[Event], None] = lambda event: None,
) -> GenerateResult:
    """Answer from a cache that is still arriving; the text is that of decoding on the full cache.

    Args:
        suffix_ids: tokens after the cached prompt. Empty: the last cached token is run again.
        sampling: greedy by default.
        speculate: "auto" drafts until the Residual has arrived, 64 tokens at most; a number drafts that many; "off"
            waits for the full cache and then decodes.
        verify: "none" decodes on the anchor alone: the Residual is not fetched and the text is marked so.
        stop: strings that end the verified text.
        on_event: told of everything that happens, in order.

    Raises:
        IdentityError: the cache belongs to another model.
        InputError: an option is out of range, the context is too short, or hidden token ids would be needed.
        FetchError, FormatError: the cache cannot be fetched or is damaged; no text is returned.
    """
    if verify not in ("full", "none"):
        raise InputError(f"verify is {verify!r}", hint="use full or none")
    run = _Run(reader, model, list(suffix_ids), max_new_tokens, sampling or Sampling(), speculate, stop, on_event)
    run.decode_anchor()
    if verify == "full" and reader.header.residual is not None:
        with closing(reader.start_residual()) as residual:
            run.draft_while_refining(residual)
            run.refine_rest(residual)
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
        suffix_ids: list[int],
        max_new_tokens: int,
        sampling: Sampling,
        speculate: Speculate,
        stop: Sequence[str],
        on_event: Callable[[Event], None],
    ) -> None:
        header = reader.header
        check_identity(header.identity, model.identity)
        if header.tokens.start:
            raise InputError(f"the cache starts at position {header.tokens.start}", hint="give one that starts at 0")
        self.reader, self.model, self.sampling, self.on_event = reader, model, sampling, on_event
        self.auto = speculate == "auto"
        # Positions before `base` stay as fetched; the model runs those from it on.
        self.base = header.tokens.stop
        self.suffix_ids = suffix_ids
        self.history = self._cached_ids() if sampling.needs_history or not suffix_ids else []
        if not suffix_ids:
            self.base -= 1
            self.suffix_ids = self.history[-1:]
            self.history = self.history[:-1]
        check_prompt(model, self.suffix_ids)
        room = self._room(max_new_tokens)
        self.max_draft_tokens = min(_draft_tokens(speculate), room)
        self.text = GrowingText(model.to_text, eos_token_ids=model.eos_token_ids, stop=stop, max_tokens=room)
        self.cache = model.new_cache(
            header.tokens.stop,
            len(self.suffix_ids) + room,
            layers=header.layers,
            # Draft and verification both run before a sliding layer may move.
            rollback_tokens=2 * (len(self.suffix_ids) + self.max_draft_tokens + 1),
        )
        self.decoder = CacheDecoder(header, self.cache)
        self.generator = sampling.generator(model.device)
        self.draft = Draft()
        self.draft_text: list[str] = []
        self.accepted = 0
        self.bytes_residual = 0
        self.peak_parts: dict[str, int] = {}
        self.anchor_s = 0.0
        self.first_draft_s: float | None = None
        self.full_s: float | None = None
        self.first_verified_s: float | None = None

    def decode_anchor(self) -> None:
        """Fetch the Anchor into the cache."""
        self.on_event(Phase("anchor"))
        total = self.reader.bytes_anchor
        with closing(self.reader.stream_anchor()) as anchor:
            for payload in anchor:
                self.decoder.anchor(payload)
                self._measure(in_flight=anchor.bytes_in_flight + payload.raw.nbytes)
                self.on_event(AnchorProgress(anchor.bytes_done, total))
        self.on_event(AnchorProgress(total, total))
        assert self.decoder.complete_anchor
        self.anchor_s = self._now()

    def draft_while_refining(self, residual: SegmentStream) -> None:
        """Propose tokens on the cache as it is, refining it between model steps with what has arrived."""

        def go_on() -> bool:
            self._refine(residual, residual.ready())
            return not (self.auto and residual.done)

        if not self.max_draft_tokens:
            return
        self.on_event(Phase("draft"))
        stream = TextStream(self.model.to_text)
        for token in propose(
            self.model,
            self.cache,
            self.suffix_ids,
            self.draft,
            history=self._history([]),
            sampling=self.sampling,
            generator=self.generator,
            max_tokens=self.max_draft_tokens,
            go_on=go_on,
        ):
            if self.first_draft_s is None:
                self.first_draft_s = self._now()
            self._measure(in_flight=residual.bytes_in_flight, logits=self.draft.q[-1].nbytes)
            self.draft_text.append(stream.push(token))
            self.on_event(Drafted(token, self.draft_text[-1]))

    def refine_rest(self, residual: SegmentStream) -> None:
        """Wait for the rest of the Residual."""
        if not residual.done:
            self.on_event(Phase("refine"))
        for payload in residual:
            self._refine(residual, [payload])
        assert self.decoder.complete_full
        self.full_s = self._now()
        self.bytes_residual = self.reader.bytes_residual
        self.on_event(ResidualProgress(self.bytes_residual, self.bytes_residual))

    def verify_draft(self) -> None:
        """One pass over suffix and draft on the cache as it now is; what the draft left in it is overwritten.

        Without a draft this is the first step of plain decoding.
        """
        drafted = self.draft.token_ids
        self.on_event(Phase("verify" if drafted else "decode"))
        self.cache.rollback(self.base)
        logits = self.model.step(self.cache, [*self.suffix_ids, *drafted], rows=len(drafted) + 1)
        self._measure(logits=logits.nbytes)
        outcome = accept(
            drafted,
            self.draft.q,
            lambda count: self.sampling.distribution(logits[count], self._history(drafted[:count])),
            self.generator,
        )
        self.cache.rollback(self.base + len(self.suffix_ids) + outcome.accepted)
        self._stand(drafted[: outcome.accepted])
        self.accepted = len(self.text.token_ids)
        if self.accepted < len(drafted):
            self.on_event(Rejected(drafted[self.accepted :], "".join(self.draft_text[self.accepted :])))
        if not self.text.stopped:
            self._stand([outcome.next_token])
        self.draft = Draft()

    def decode_on(self) -> None:
        """Plain decoding, one token at a time."""
        if not self.text.stopped and self.max_draft_tokens:
            self.on_event(Phase("decode"))
        while not self.text.stopped:
            logits = self.model.step(self.cache, self.text.token_ids[-1:])
            p = self.sampling.distribution(logits[0], self._history(self.text.token_ids))
            self._stand([draw(p, self.generator)])

    def result(self) -> GenerateResult:
        """What `generate` returns."""
        assert self.text.stopped is not None
        assert self.first_verified_s is not None
        header = self.reader.header
        return GenerateResult(
            text=self.text.text,
            token_ids=self.text.token_ids,
            precision="full" if header.residual is None or self.full_s is not None else "anchor",
            drafted=len(self.draft_text),
            accepted=self.accepted,
            anchor_s=self.anchor_s,
            first_draft_s=self.first_draft_s,
            full_s=self.full_s,
            first_verified_s=self.first_verified_s,
            total_s=self._now(),
            bytes_anchor=self.reader.bytes_anchor,
            bytes_residual=self.bytes_residual,
            peak_bytes=sum(self.peak_parts.values()),
            peak_parts=self.peak_parts,
            stopped=self.text.stopped,
        )

    def _refine(self, residual: SegmentStream, payloads: Sequence[SegmentPayload]) -> None:
        for payload in payloads:
            self.decoder.refine(payload)
            self._measure(in_flight=residual.bytes_in_flight + payload.raw.nbytes)
            self.on_event(ResidualProgress(residual.bytes_done, self.reader.bytes_residual))

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

    def _cached_ids(self) -> list[int]:
        ids = self.reader.token_ids()
        if ids is None:
            raise InputError(
                "the cache does not store its token ids, which an empty suffix and a repetition penalty need",
                hint="give a suffix and no repetition penalty, or encode the cache with its token ids",
            )
        return [int(token) for token in ids]

    def _room(self, max_new_tokens: int) -> int:
        """New tokens that fit the model's context, `max_new_tokens` at most."""
        if max_new_tokens < 1:
            raise InputError(f"max_new_tokens is {max_new_tokens}", hint="ask for at least one token")
        limit = self.model.context_tokens
        if limit is None:
            return max_new_tokens
        room = limit - self.base - len(self.suffix_ids)
        if room < 1:
            raise InputError(
                f"{self.base} cached tokens and a suffix of {len(self.suffix_ids)} leave no room in the model's "
                f"context of {limit}",
                hint="shorten the suffix or encode a shorter prompt",
            )
        return min(max_new_tokens, room)

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


def _draft_tokens(speculate: object) -> int:
    """The longest draft that an option allows."""
    if speculate == "auto":
        return AUTO_DRAFT_TOKENS
    if speculate == "off":
        return 0
    if not isinstance(speculate, int) or speculate < 1:
        raise InputError(f"speculate is {speculate!r}", hint="use auto, off, or a number of tokens")
    return speculate
