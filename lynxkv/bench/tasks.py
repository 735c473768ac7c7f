"""Tasks with a right answer: what a stored cache still knows, scored by the text that is generated on it.

A pass key, or a fact that no model can know, is planted in a real document at several depths; the cache of the document
is stored, decoded, and asked. An answer counts if it holds the planted words.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from lynxkv._version import __version__
from lynxkv.bench.codec import elements
from lynxkv.bench.documents import Document
from lynxkv.bench.measure import continue_greedily, empty_cache, live_cache, rounded
from lynxkv.bench.state import StateFile
from lynxkv.bench.stored import Method
from lynxkv.errors import InputError
from lynxkv.integrations.hf import Model
from lynxkv.integrations.hf.queries import replaced_attention
from lynxkv.integrations.hf.templates import open_turn, suffix
from lynxkv.kv import KV
from lynxkv.layout import DTYPE_BYTES, Precision
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
    counts the right ones among those that the original answers rightly too; `bits` an element are fetched
    for an answer, in the mean.
    """

    codec: str
    precision: Precision
    kind: Kind
    tokens: int
    right: int
    kept: int
    asked: int
    bits: float


@dataclass(frozen=True, kw_only=True)
class _Case:
    document: Document
    needle: Needle
    tokens: int
    token_ids: list[int]

    def key(self, model: Model, label: str, settings: Any) -> str:
        """Digest of all that an answer depends on."""
        parts: list[Any] = [__version__, model.identity.fingerprint, str(model.hf.dtype), self.document.sha256]
        parts += [asdict(self.needle), self.token_ids, ANSWER_TOKENS, label, settings]
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Whether the answer from a cache at one precision was right, and the bits an element fetched for it."""

    precision: Precision
    right: bool
    bits: float


@dataclass(frozen=True, kw_only=True)
class Answers:
    """Those of one method to one question, by precision."""

    answers: list[Answer]


def _answers(value: dict[str, Any]) -> Answers:
    return Answers(answers=[Answer(**answer) for answer in value["answers"]])


def bench_tasks(
    model: Model,
    methods: Sequence[Method],
    documents: Sequence[Document],
    *,
    tokens: Sequence[int] = (1024,),
    needles: Sequence[Needle] = NEEDLES,
    depths: Sequence[float] = DEPTHS,
    state: Path | None = None,
    progress: Progress = lambda stage, done, total: None,
) -> list[TaskRow]:
    """Plant every needle at every depth, the documents in turn, and ask the original and each stored cache.

    Args:
        state: a file of finished answers; those in it are not asked for again.

    Raises:
        InputError: a document is shorter than the tokens asked for, or they do not fit the model's context.
    """
    cases = list(_cases(model, documents, tokens, needles, depths))
    file = StateFile(state, _answers)
    found: dict[tuple[str, Precision, Kind, int], list[tuple[Answer, bool]]] = {}
    for done, case in enumerate(cases):
        progress("tasks", done, len(cases))
        by_codec = _ask(model, methods, case, file)
        original = by_codec[ORIGINAL].answers[0].right
        for codec, answers in by_codec.items():
            for answer in answers.answers:
                key = (codec, answer.precision, case.needle.kind, case.tokens)
                found.setdefault(key, []).append((answer, original))
    progress("tasks", len(cases), len(cases))
    return [
        TaskRow(
            codec=codec,
            precision=precision,
            kind=kind,
            tokens=count,
            right=sum(answer.right for answer, _ in given),
            kept=sum(answer.right and original for answer, original in given),
            asked=len(given),
            bits=sum(answer.bits for answer, _ in given) / len(given),
        )
        for (codec, precision, kind, count), given in found.items()
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
                ids = _planted(model, document, needle, count, depth)
                yield _Case(document=document, needle=needle, tokens=count, token_ids=ids)


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


def _ask(model: Model, methods: Sequence[Method], case: _Case, file: StateFile[Answers]) -> dict[str, Answers]:
    """The answers of the original and of each method, by codec; prefilling only if one is not known yet."""
    keys = {ORIGINAL: case.key(model, ORIGINAL, {})}
    keys |= {method.label: case.key(model, method.label, method.settings) for method in methods}
    if any(file.get(key) is None for key in keys.values()):
        original = rounded(prefill(model, case.token_ids))
        ids = suffix(model.tokenizer, case.needle.question)
        cache = live_cache(model, original, len(ids) + ANSWER_TOKENS)
        said = continue_greedily(model, cache, ids, ANSWER_TOKENS)
        answer = Answer(precision="full", right=_holds(model, said, case.needle), bits=8.0 * DTYPE_BYTES["bf16"])
        if file.get(keys[ORIGINAL]) is None:
            file.add(keys[ORIGINAL], Answers(answers=[answer]))
        for method in methods:
            if file.get(keys[method.label]) is None:
                file.add(keys[method.label], Answers(answers=_from_stored(model, method, original, ids, said, case)))
    return {codec: answers for codec, key in keys.items() if (answers := file.get(key)) is not None}


def _from_stored(
    model: Model, method: Method, original: KV, ids: list[int], guess: list[int], case: _Case
) -> list[Answer]:
    """The answers to `ids` at each precision; `guess` is what the original says, which most say too."""
    cache = empty_cache(model, original, len(ids) + ANSWER_TOKENS)
    found = []
    with method.store(original) as stored:
        for precision in stored.decode(cache):
            tokens = cache.tokens
            if stored.sparse is None:
                said = continue_greedily(model, cache, ids, ANSWER_TOKENS, guess=guess)
            else:
                # A guess would fetch what only it asks for.
                with replaced_attention(model, stored.sparse.attend), stored.sparse.answer(cache):
                    said = continue_greedily(model, cache, ids, ANSWER_TOKENS)
            cache.rollback(tokens)
            bits = 8 * stored.sizes.up_to(precision) / elements(original)
            found.append(Answer(precision=precision, right=_holds(model, said, case.needle), bits=bits))
    return found


def _holds(model: Model, token_ids: Sequence[int], needle: Needle) -> bool:
    return needle.answer.lower() in model.to_text(token_ids).lower()


__all__ = ["ANSWER_TOKENS", "DEPTHS", "NEEDLES", "Needle", "TaskRow", "bench_tasks", "plant"]
