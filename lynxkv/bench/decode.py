"""`lynxkv bench decode`: from opening a cache to its k-th verified token, for several ways to keep one.

All systems answer the same questions over the same simulated link, in turns. The model and the kernels are warm; a
clock starts when a cache is opened. Texts are greedy and go on past an end of text, so that all have k tokens.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from lynxkv._version import __version__
from lynxkv.bench.codec import Progress
from lynxkv.bench.documents import Document
from lynxkv.bench.state import StateFile
from lynxkv.bench.systems import BaselineSystem, CacheSystem, System, Timing, parse_systems
from lynxkv.errors import InputError
from lynxkv.integrations.hf import LynxCache, Model
from lynxkv.integrations.hf.templates import open_turn, suffix
from lynxkv.models import Prefilled, prefill_with_logits
from lynxkv.store import Link

DEFAULT_SYSTEMS = (
    "raw@whole",
    "int8@whole",
    "int8@layers",
    "int4@whole",
    "byte-planes@whole",
    "kivi:bits=4@whole",
    "alg1:alpha=100,chunk_dtype=f32@progressive",
    "default@progressive",
    "default@whole",
    "quality@progressive",
    "fast@progressive",
    "default@exact",
    "prefill",
)
QUICK_SYSTEMS = ("raw@whole", "int8@whole", "default@progressive", "default@whole", "fast@progressive")
# With a chat template's closing tokens a suffix of at most 16 tokens.
QUESTIONS = (
    "What is this about?",
    "Summarise it.",
    "Who is it for?",
    "Name one fact.",
    "Why does it matter?",
    "Give an example.",
    "What comes first?",
    "Explain one rule.",
)


@dataclass(frozen=True, kw_only=True)
class DecodePlan:
    """What is measured. Every repeat asks the next of `QUESTIONS`."""

    document: Document
    tokens: tuple[int, ...] = (2048,)
    links: tuple[str, ...] = ("200mbit/20ms", "25mbit/20ms")
    kth: int = 32
    repeats: int = 8


@dataclass(frozen=True, kw_only=True)
class DecodeRow:
    """Medians of one system's repeats. Limits are what bytes, link and a warm model allow at best.

    Attributes:
        limit_first_draft_s: bytes before the first token over the link's rate, two round trips, a step on the suffix.
        limit_first_verified_s: all bytes over the rate, two round trips, a step on the suffix.
        text_equal: every text was that of plain decoding from the same cache.
        bookkeeping: share of a draft step outside of model and refining, as `lynxkv.trace` counts it.
    """

    system: str
    link_bit_per_s: float
    rtt_s: float
    tokens: int
    repeats: int
    first_draft_s: float | None
    first_token_s: float
    first_verified_s: float
    kth_verified_s: float
    bytes_anchor: int
    bytes_total: int
    drafted: float
    accepted: float
    text_equal: bool
    limit_first_draft_s: float
    limit_first_verified_s: float
    peak_bytes: int
    bookkeeping: float | None


@dataclass(frozen=True, kw_only=True)
class Speedup:
    """How many times sooner than a baseline, pair by pair: median, and the extremes."""

    system: str
    baseline: str
    link_bit_per_s: float
    tokens: int
    first_token: tuple[float, float, float]
    kth_verified: tuple[float, float, float]


@dataclass(frozen=True, kw_only=True)
class DecodeBench:
    """All rows, and the pairs that speed-ups are made of."""

    model: str
    plan: DecodePlan
    rows: tuple[DecodeRow, ...]
    timings: dict[tuple[str, int, str], tuple[Timing, ...]]

    def speedups(self, baseline: str) -> list[Speedup]:
        """Of every other system over `baseline`, link by link."""
        out = []
        for (link, tokens, label), timings in self.timings.items():
            if label == baseline or (link, tokens, baseline) not in self.timings:
                continue
            pairs = list(zip(self.timings[link, tokens, baseline], timings, strict=True))
            out.append(
                Speedup(
                    system=label,
                    baseline=baseline,
                    link_bit_per_s=Link.parse(link).bit_per_s,
                    tokens=tokens,
                    first_token=_spread([old.first_token_s / new.first_token_s for old, new in pairs]),
                    kth_verified=_spread([old.kth_verified_s / new.kth_verified_s for old, new in pairs]),
                )
            )
        return out


@dataclass(frozen=True, kw_only=True)
class _Answer:
    """One answer, as a state file keeps it, with what its limits are made of: bytes as `System.sizes`, a step on a
    question."""

    timing: Timing
    sizes: tuple[int, int]
    step_s: float


def bench_decode(
    model: Model,
    systems: Sequence[str],
    plan: DecodePlan,
    *,
    state: Path | None = None,
    progress: Progress = lambda stage, done, total: None,
) -> DecodeBench:
    """Measure `systems` as `plan` says: they take turns within each repeat.

    Args:
        state: a file of finished answers; those in it are not measured again.
        progress: called with the name of the work, how much is done and how much there is.

    Raises:
        InputError: a system or link cannot be read, the document is too short, or `state` is no such file.
    """
    endless = replace(model, eos_token_ids=frozenset())
    for link in plan.links:
        Link.parse(link)
    parse_systems(systems, endless)
    kept = StateFile(state, _read)
    keys = {
        (tokens, link, repeat, label): _key(model, plan, tokens, link, repeat, label)
        for tokens in plan.tokens
        for link in plan.links
        for repeat in range(plan.repeats)
        for label in systems
    }
    missing = [item for item, key in keys.items() if kept.get(key) is None]
    done = len(keys) - len(missing)
    for tokens in plan.tokens:
        own = [item for item in missing if item[0] == tokens]
        if not own:
            continue
        chosen = parse_systems([label for label in systems if any(item[3] == label for item in own)], endless)
        earlier = [(item, answer) for item, key in keys.items() if item[0] == tokens and (answer := kept.get(key))]
        for system in chosen:
            for item, answer in earlier:
                if isinstance(system, CacheSystem) and item[3] == system.label:
                    system.recall(answer.timing)
        with _published(endless, chosen, plan.document, tokens, progress) as (ready, step_s):
            by_label = {system.label: system for system in ready}
            for item in own:
                progress("decode", done, len(keys))
                _, link, repeat, label = item
                timing = by_label[label].answer(
                    suffix(model.tokenizer, QUESTIONS[repeat % len(QUESTIONS)]),
                    plan.kth,
                    Link.parse(link),
                    check=_checks(plan, link, repeat),
                )
                kept.add(keys[item], _Answer(timing=timing, sizes=by_label[label].sizes, step_s=step_s))
                done += 1
    progress("decode", len(keys), len(keys))
    answers: dict[tuple[str, int, str], list[_Answer]] = {}
    for (tokens, link, _, label), key in keys.items():
        answer = kept.get(key)
        assert answer is not None
        answers.setdefault((link, tokens, label), []).append(answer)
    return DecodeBench(
        model=model.identity.model_id or "unnamed",
        plan=plan,
        rows=_with_equality(
            [_row(label, Link.parse(link), tokens, own) for (link, tokens, label), own in answers.items()]
        ),
        timings={item: tuple(answer.timing for answer in own) for item, own in answers.items()},
    )


def _checks(plan: DecodePlan, link: str, repeat: int) -> bool:
    """Whether an answer's text is checked: once, for it does not depend on the link."""
    return link == plan.links[0] and repeat < len(QUESTIONS)


def _key(model: Model, plan: DecodePlan, tokens: int, link: str, repeat: int, label: str) -> str:
    """Digest of all that an answer depends on, but the machine."""
    parts = [
        __version__,
        model.identity.fingerprint,
        str(model.hf.dtype),
        plan.document.sha256,
        tokens,
        link,
        plan.kth,
        repeat,
        label,
        _checks(plan, link, repeat),
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _read(value: dict[str, Any]) -> _Answer:
    first, total = value["sizes"]
    timing = Timing(**value["timing"])
    numbers = [first, total, value["step_s"], *(getattr(timing, item.name) for item in fields(timing))]
    unknown = (timing.first_draft_s, timing.equal, timing.bookkeeping)
    if any(not isinstance(number, int | float) for number in numbers if number is not None) or (
        numbers.count(None) > unknown.count(None)
    ):
        raise TypeError("an answer consists of numbers")
    return _Answer(timing=timing, sizes=(first, total), step_s=value["step_s"])


@contextmanager
def _published(
    model: Model, systems: Sequence[System], document: Document, tokens: int, progress: Progress
) -> Iterator[tuple[Sequence[System], float]]:
    """The systems, each with the prompt stored and everything warm, and the seconds of a step on a question."""
    ids = open_turn(model.tokenizer, document.text)
    if len(ids) < tokens:
        raise InputError(f"{document.name} has {len(ids)} tokens, {tokens} are needed", hint="give a longer document")
    filled = prefill_with_logits(
        model, ids[:tokens], progress=lambda done, total: progress(f"prefill {tokens}", done, total)
    )
    question = suffix(model.tokenizer, QUESTIONS[0])
    with TemporaryDirectory(prefix="lynxkv-bench-") as folder:
        for system in systems:
            system.publish(filled, Path(folder))
            if isinstance(system, CacheSystem):
                system.answer(question, 4, None, check=False)
        try:
            yield systems, _step_seconds(model, filled, question)
        finally:
            for system in systems:
                if isinstance(system, BaselineSystem):
                    system.kept.close()


def _step_seconds(model: Model, filled: Prefilled, suffix_ids: list[int]) -> float:
    """Of a step on `suffix_ids` after the prompt: the median of five."""
    tokens = filled.kv.tokens
    cache = LynxCache.allocate(model, tokens, len(suffix_ids))
    for number, layer in enumerate(filled.kv.layers):
        for name, tensor in layer.tensors.items():
            cache.target(number, name).copy_(tensor)
    seconds = []
    for _ in range(5):
        cache.rollback(tokens)
        began = time.perf_counter()
        model.step(cache, suffix_ids)
        seconds.append(time.perf_counter() - began)
    return median(seconds)


def _row(label: str, link: Link, tokens: int, answers: Sequence[_Answer]) -> DecodeRow:
    first, total = answers[0].sizes
    timings = [answer.timing for answer in answers]
    drafts = [timing.first_draft_s for timing in timings if timing.first_draft_s is not None]
    outside = [timing.bookkeeping for timing in timings if timing.bookkeeping is not None]
    fixed_s = 2 * link.rtt_s + median(answer.step_s for answer in answers)
    return DecodeRow(
        system=label,
        link_bit_per_s=link.bit_per_s,
        rtt_s=link.rtt_s,
        tokens=tokens,
        repeats=len(timings),
        first_draft_s=median(drafts) if drafts else None,
        first_token_s=median(timing.first_token_s for timing in timings),
        first_verified_s=median(timing.first_verified_s for timing in timings),
        kth_verified_s=median(timing.kth_verified_s for timing in timings),
        bytes_anchor=first,
        bytes_total=total,
        drafted=sum(timing.drafted for timing in timings) / len(timings),
        accepted=sum(timing.accepted for timing in timings) / len(timings),
        text_equal=all(timing.equal for timing in timings if timing.equal is not None),
        limit_first_draft_s=first * 8 / link.bit_per_s + fixed_s,
        limit_first_verified_s=total * 8 / link.bit_per_s + fixed_s,
        peak_bytes=max(timing.peak_bytes for timing in timings),
        bookkeeping=median(outside) if outside else None,
    )


def _with_equality(rows: Sequence[DecodeRow]) -> tuple[DecodeRow, ...]:
    """What was checked over the first link holds for the others."""
    unequal = {(row.system, row.tokens) for row in rows if not row.text_equal}
    return tuple(replace(row, text_equal=(row.system, row.tokens) not in unequal) for row in rows)


def _spread(values: Sequence[float]) -> tuple[float, float, float]:
    return median(values), min(values), max(values)
