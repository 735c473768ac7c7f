"""How drafts fare, and what is said of it: a warning where one came out badly, a reason where there is none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lynxkv.layout import Precision
from lynxkv.pace import Pace

ADVICE = "the Anchor is coarse for this text; `lynxkv encode --codec quality` makes a finer one"


class Fared(NamedTuple):
    """What became of a draft: tokens proposed, those that the rule let pass, and `verify.agreement`."""

    drafted: int
    accepted: int
    agreed: float


def learn(pace: Pace, target: Precision, drafts: Sequence[Fared]) -> list[str | None]:
    """Teach `pace` how drafts of one window have fared against `target`, and return what to tell of each that came out
    badly. All are judged by what was known before any of them.
    """
    notes = [
        f"only {draft.accepted} of {draft.drafted} draft tokens passed: {ADVICE}"
        if target == "full" and pace.is_poor(target, draft.drafted, draft.agreed)
        else None
        for draft in drafts
    ]
    for draft in drafts:
        pace.verified(target, draft.drafted, draft.agreed)
    return notes


def why_none(pace: Pace, target: Precision) -> str:
    """Why nothing was drafted before `target`; where earlier drafts are why, they count for less from then on."""
    hopeless = pace.is_hopeless(target)
    if hopeless:
        pace.waited(target)
    if hopeless and target == "full":
        return f"no draft: hardly a token of earlier ones passed, so the full cache is waited for: {ADVICE}"
    return f"no draft: the {target} cache is there before a draft would pay"
