"""What a run reports while it goes on, and what it returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lynxkv.layout import Precision
from lynxkv.text import Stopped

PhaseName = Literal["anchor", "draft", "refine", "verify", "decode"]


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
    """Bytes of the Residual refined into the cache so far."""

    bytes: int
    total: int


@dataclass(frozen=True)
class Drafted:
    """A token was proposed. Nothing stands yet: verification may replace it."""

    token_id: int
    text: str


@dataclass(frozen=True)
class Verified:
    """These tokens stand. `text` is what they release; it may lag while a stop string is possible."""

    token_ids: list[int]
    text: str


@dataclass(frozen=True)
class Rejected:
    """The rest of the draft, which does not stand."""

    token_ids: list[int]
    text: str


Event = Phase | AnchorProgress | ResidualProgress | Drafted | Verified | Rejected


@dataclass(frozen=True, kw_only=True)
class GenerateResult:
    """A finished text. Times are seconds since the cache was opened; bytes are what was fetched or held.

    Attributes:
        text: the verified text, without what ended it.
        token_ids: its tokens, the one that ended it included.
        precision: of the cache that the text follows; "anchor" only if verification was turned off.
        drafted: tokens proposed.
        accepted: those of them that stood.
        anchor_s: the whole Anchor was in the cache.
        first_draft_s: first proposed token; None without a draft.
        full_s: the whole Residual was in the cache; None if it was not fetched.
        first_verified_s: first token that stands.
        peak_bytes: the largest sum of `peak_parts`, model weights left out.
        peak_parts: that sum by part: cache, codes (kept for refining), in_flight (fetched, not decoded), logits.
        stopped: "eos", "stop" (a stop string) or "length".
    """

    text: str
    token_ids: list[int]
    precision: Precision
    drafted: int
    accepted: int
    anchor_s: float
    first_draft_s: float | None
    full_s: float | None
    first_verified_s: float
    total_s: float
    bytes_anchor: int
    bytes_residual: int
    peak_bytes: int
    peak_parts: dict[str, int]
    stopped: Stopped
