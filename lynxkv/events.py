"""What a run reports while it goes on, and what it returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from lynxkv.layout import Precision
from lynxkv.text import Stopped

PhaseName = Literal["anchor", "draft", "refine", "verify", "decode"]
Track = Literal["fetch", "decode", "draft", "refine", "verify", "plain"]


@dataclass(frozen=True)
class Phase:
    """A stage begins."""

    name: PhaseName


@dataclass(frozen=True)
class AnchorProgress:
    """Bytes of the Anchor decoded so far."""

    bytes: int
    total: int


@dataclass(frozen=True)
class ResidualProgress:
    """Bytes of the Residual refined into the cache so far; its exact section counts where it is fetched."""

    bytes: int
    total: int


@dataclass(frozen=True)
class Drafted:
    """A token was proposed. Nothing stands yet: verification may replace it."""

    token_id: int
    text: str


@dataclass(frozen=True)
class TokenLogprobs:
    """What the model gave a token that stands: natural logarithms of probabilities, before any sampling option.

    Attributes:
        top: ids and values of the likeliest tokens, the likeliest first.
    """

    token_id: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass(frozen=True)
class Verified:
    """These tokens stand. `text` is what they release; it may lag while a stop string is possible.

    `logprobs` has an entry for each of them, where they were asked for.
    """

    token_ids: list[int]
    text: str
    logprobs: list[TokenLogprobs] | None = None


@dataclass(frozen=True)
class Provisional:
    """These tokens passed the full cache, in the place of the draft; the exact one may still replace them."""

    token_ids: list[int]
    text: str


@dataclass(frozen=True)
class Rejected:
    """The rest of the draft, which does not stand."""

    token_ids: list[int]
    text: str


@dataclass(frozen=True)
class Span:
    """Work that has been done: seconds since the cache was opened, and its amount.

    Tracks: fetch (bytes of the Anchor, then of the Residual, until the last is in the cache), decode and refine (bytes
    of segments put into the cache), draft, verify and plain (tokens a model step ran). Time that a step waited for the
    cache it runs on is left out.
    """

    track: Track
    start_s: float
    stop_s: float
    amount: int


@dataclass(frozen=True)
class Note:
    """Something worth telling: speculation that did not pay, a draft that fared badly."""

    text: str


Event = Phase | AnchorProgress | ResidualProgress | Drafted | Provisional | Verified | Rejected | Span | Note


@dataclass(frozen=True, kw_only=True)
class GenerateResult:
    """A finished text. Times are seconds since the cache was opened; bytes are what was fetched or held.

    Attributes:
        text: the verified text, without what ended it.
        token_ids: its tokens, the one that ended it included.
        precision: of the cache that the text follows; "anchor" only if verification was turned off.
        drafted: tokens proposed on the Anchor.
        accepted: those of them that passed the verification that followed.
        provisional: tokens that passed the full cache, or were proposed on it, and waited for the exact one.
        accepted_exact: those of them that stood.
        anchor_s: the whole Anchor was in the cache; None if stored logits gave the whole text.
        first_draft_s: first token proposed on the Anchor; None without a draft.
        full_s: every value had full precision; None if no Residual was fetched.
        first_provisional_s: first token that passed the full cache and waited; None if none did.
        exact_s: every value had its original bits; None if no exact section was fetched.
        first_verified_s: first token that stands.
        bytes_anchor, bytes_residual, bytes_exact: fetched of each.
        peak_bytes: the largest sum of `peak_parts`, model weights left out.
        peak_parts: that sum by part: cache, codes (kept for refining), in_flight (fetched, not decoded), logits.
        stopped: "eos", "stop" (a stop string) or "length".
        notes: what was worth telling, in sentences.
    """

    text: str
    token_ids: list[int]
    precision: Precision
    drafted: int = 0
    accepted: int = 0
    provisional: int = 0
    accepted_exact: int = 0
    anchor_s: float | None = None
    first_draft_s: float | None = None
    full_s: float | None = None
    first_provisional_s: float | None = None
    exact_s: float | None = None
    first_verified_s: float
    total_s: float
    bytes_anchor: int = 0
    bytes_residual: int = 0
    bytes_exact: int = 0
    peak_bytes: int
    peak_parts: dict[str, int]
    stopped: Stopped
    notes: list[str] = field(default_factory=list)
