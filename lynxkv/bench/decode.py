"""`lynxkv bench decode`: from opening a cache to its k-th verified token, for several ways to keep one.

All systems answer the same questions over the same simulated link, in turns. The model and the kernels are warm; a
clock starts when a cache is opened. Texts are greedy and go on past an end of text, so that all have k tokens.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from lynxkv.bench.codec import Progress
from lynxkv.bench.documents import Document
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


def bench_decode(
    model: Model,
    systems: Sequence[str],
    plan: DecodePlan,
    *,
    progress: Progress = lambda stage, done, total: None,
) -> DecodeBench:
    """Measure `systems` as `plan` says: they take turns within each repeat.

    Raises:
        InputError: a system or link cannot be read, or the document is too short.
    """
    endless = replace(model, eos_token_ids=frozenset())
    for link in plan.links:
        Link.parse(link)
    parse_systems(systems, endless)
    questions = [suffix(model.tokenizer, question) for question in QUESTIONS]
    timings: dict[tuple[str, int, str], tuple[Timing, ...]] = {}
    rows: list[DecodeRow] = []
    done, total = 0, len(plan.tokens) * len(plan.links) * plan.repeats * len(systems)
    for tokens in plan.tokens:
        with _published(endless, parse_systems(systems, endless), plan.document, tokens, progress) as (ready, step_s):
            for link in plan.links:
                measured: dict[str, list[Timing]] = {system.label: [] for system in ready}
                for repeat in range(plan.repeats):
                    question = questions[repeat % len(questions)]
                    for system in ready:
                        progress("decode", done, total)
                        # A text is checked once: it does not depend on the link.
                        check = link == plan.links[0] and repeat < len(questions)
                        timing = system.answer(question, plan.kth, Link.parse(link), check=check)
                        measured[system.label].append(timing)
                        done += 1
                for system in ready:
                    timings[link, tokens, system.label] = tuple(measured[system.label])
                    rows.append(_row(system, Link.parse(link), tokens, measured[system.label], step_s))
    progress("decode", total, total)
    return DecodeBench(
        model=model.identity.model_id or "unnamed", plan=plan, rows=_with_equality(rows), timings=timings
    )


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


def _row(system: System, link: Link, tokens: int, timings: Sequence[Timing], step_s: float) -> DecodeRow:
    first, total = system.sizes
    drafts = [timing.first_draft_s for timing in timings if timing.first_draft_s is not None]
    fixed_s = 2 * link.rtt_s + step_s
    return DecodeRow(
        system=system.label,
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
    )


def _with_equality(rows: Sequence[DecodeRow]) -> tuple[DecodeRow, ...]:
    """What was checked over the first link holds for the others."""
    unequal = {(row.system, row.tokens) for row in rows if not row.text_equal}
    return tuple(replace(row, text_equal=(row.system, row.tokens) not in unequal) for row in rows)


def _spread(values: Sequence[float]) -> tuple[float, float, float]:
    return median(values), min(values), max(values)
