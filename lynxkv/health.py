"""How drafts fare, and what is said of it: a warning where one came out badly, a reason where there is none."""

from __future__ import annotations

from lynxkv.layout import Precision
from lynxkv.pace import Pace

ADVICE = "the Anchor is coarse for this text; `lynxkv encode --codec quality` makes a finer one"


def learn(pace: Pace, target: Precision, *, drafted: int, accepted: int, agreed: float) -> str | None:
    """Teach `pace` how a draft has fared against `target`, and return what to tell if it was badly.

    Args:
        accepted: what the rule let pass.
        agreed: `verify.agreement`.
    """
    poor = target == "full" and pace.is_poor(target, drafted, agreed)
    pace.verified(target, drafted, agreed)
    return f"only {accepted} of {drafted} draft tokens passed: {ADVICE}" if poor else None


def why_none(pace: Pace, target: Precision) -> str:
    """Why nothing was drafted before `target`."""
    if target == "full" and pace.is_hopeless(target):
        return f"no draft: hardly a token of earlier ones passed, so the full cache is waited for: {ADVICE}"
    return f"no draft: the {target} cache is there before a draft would pay"
