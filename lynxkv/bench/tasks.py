"""Tasks with a right answer: what a stored cache still knows, scored by the text that is generated on it.

A pass key, or a fact that no model can know, is planted in a real document at several depths; the cache of the document
is stored, decoded, and asked. An answer counts if it holds the planted words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from lynxkv.bench.documents import Document
from lynxkv.bench.measure import continue_greedily, empty_cache, live_cache, rounded
from lynxkv.bench.stored import Method
from lynxkv.errors import InputError
from lynxkv.integrations.hf import LynxCache, Model
from lynxkv.integrations.hf.templates import open_turn, suffix
from lynxkv.layout import Precision
from lynxkv.models import prefill

Kind = Literal["passkey", "fact"]
Progress = Callable[[str, int, int], None]

ANSWER_TOKENS = 24
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
ORIGINAL = "original"


@dataclass(frozen=True, kw_only=True)
class Needle:
    """A sentence to plant, what is asked about it, and the words that an answer must hold."""

    kind: Kind
    sentence: str
    question: str
    answer: str


NEEDLES = (
    Needle(
        kind="passkey",
        sentence="The pass key is 48213. Remember it: 48213 is the pass key.",
        question="What is the pass key? Answer with the number only.",
        answer="48213",
    ),
    Needle(
        kind="passkey",
        sentence="The pass key is 90517. Remember it: 90517 is the pass key.",
        question="What is the pass key? Answer with the number only.",
        answer="90517",
    ),
    Needle(
        kind="fact",
        sentence="The lighthouse of Cape Varn was built by Mara Quill in 1871.",
        question="Who built the lighthouse of Cape Varn?",
        answer="Mara Quill",
    ),
    Needle(
        kind="fact",
        sentence="The favourite dish of the village of Ostrel is pickled turnip soup.",
        question="What is the favourite dish of the village of Ostrel?",
        answer="turnip",
    ),
)


@dataclass(frozen=True, kw_only=True)
class TaskRow:
    """How many questions of one kind were answered rightly from one cache at one precision and length.

    `codec` is "original" for the model's own cache, which says how many of them the model can answer at all; `kept`
    counts the right ones among those that the original answers rightly too.
    """

    codec: str
    precision: Precision
    kind: Kind
    tokens: int
    right: int
    kept: int
    asked: int


@dataclass(frozen=True, kw_only=True)
class _Case:
    needle: Needle
    tokens: int
    token_ids: list[int]


def bench_tasks(
    model: Model,
    methods: Sequence[Method],
    documents: Sequence[Document],
    *,
    tokens: Sequence[int] = (1024,),
    needles: Sequence[Needle] = NEEDLES,
    depths: Sequence[float] = DEPTHS,
    progress: Progress = lambda stage, done, total: None,
) -> list[TaskRow]:
    """Plant every needle at every depth, the documents in turn, and ask the original and each stored cache.

    Raises:
        InputError: a document is shorter than the tokens asked for, or they do not fit the model's context.
    """
    cases = list(_cases(model, documents, tokens, needles, depths))
    scores: dict[tuple[str, Precision, Kind, int], list[tuple[bool, bool]]] = {}
    for done, case in enumerate(cases):
        progress("tasks", done, len(cases))
        for (codec, precision), right in _answers(model, methods, case).items():
            scores.setdefault((codec, precision, case.needle.kind, case.tokens), []).append(right)
    progress("tasks", len(cases), len(cases))
    return [
        TaskRow(
            codec=codec,
            precision=precision,
            kind=kind,
            tokens=count,
            right=sum(right for right, _ in found),
            kept=sum(right and original for right, original in found),
            asked=len(found),
        )
        for (codec, precision, kind, count), found in scores.items()
    ]


def plant(text: str, sentence: str, depth: float) -> str:
    """The text with the sentence as a paragraph of its own at the first line end behind `depth` of it."""
    at = text.find("\n", int(depth * len(text)))
    at = len(text) if at < 0 else at
    return f"{text[:at]}\n\n{sentence}\n\n{text[at:].lstrip()}"


def _cases(
    model: Model,
    documents: Sequence[Document],
    tokens: Sequence[int],
    needles: Sequence[Needle],
    depths: Sequence[float],
) -> Iterator[_Case]:
    room = max(len(suffix(model.tokenizer, needle.question)) for needle in needles) + ANSWER_TOKENS
    for count in tokens:
        if model.context_tokens is not None and count + room > model.context_tokens:
            raise InputError(
                f"{count} cached tokens and {room} more are over the model's context of {model.context_tokens}",
                hint="ask for fewer tokens",
            )
        for number, needle in enumerate(needles):
            for place, depth in enumerate(depths):
                document = documents[(number + place) % len(documents)]
                yield _Case(needle=needle, tokens=count, token_ids=_planted(model, document, needle, count, depth))


def _planted(model: Model, document: Document, needle: Needle, tokens: int, depth: float) -> list[int]:
    """The first `tokens` tokens of the document with the needle in it."""
    ids = open_turn(model.tokenizer, document.text)
    if len(ids) < tokens:
        raise InputError(
            f"{document.name} has {len(ids)} tokens, {tokens} are needed",
            hint="give a longer document or ask for fewer tokens",
        )
    # As much text as the tokens hold, about: the needle's place is a share of it.
    share = document.text[: int(len(document.text) * tokens / len(ids))]
    return open_turn(model.tokenizer, plant(share, needle.sentence, depth))[:tokens]


def _answers(model: Model, methods: Sequence[Method], case: _Case) -> dict[tuple[str, Precision], tuple[bool, bool]]:
    """By codec and precision whether the answer is right, and whether the original's is."""
    original = rounded(prefill(model, case.token_ids))
    ids = suffix(model.tokenizer, case.needle.question)
    room = len(ids) + ANSWER_TOKENS
    first = _right(model, live_cache(model, original, room), ids, case)
    found: dict[tuple[str, Precision], tuple[bool, bool]] = {(ORIGINAL, "full"): (first, first)}
    for method in methods:
        cache = empty_cache(model, original, room)
        with method.store(original) as stored:
            for precision in stored.decode(cache):
                found[method.label, precision] = (_right(model, cache, ids, case), first)
    return found


def _right(model: Model, cache: LynxCache, ids: list[int], case: _Case) -> bool:
    tokens = cache.tokens
    answer = model.to_text(continue_greedily(model, cache, ids, ANSWER_TOKENS))
    cache.rollback(tokens)
    return case.needle.answer.lower() in answer.lower()


__all__ = ["ANSWER_TOKENS", "DEPTHS", "NEEDLES", "Needle", "TaskRow", "bench_tasks", "plant"]
