"""`lynxkv bench batch`: what decoding several prompts over one cache together gains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from lynxkv.batch import BatchResult, generate_batch
from lynxkv.bench.codec import Progress
from lynxkv.bench.decode import QUESTIONS
from lynxkv.bench.documents import Document
from lynxkv.encoder import encode
from lynxkv.errors import InputError
from lynxkv.fetch import open_cache
from lynxkv.integrations.hf import Model
from lynxkv.integrations.hf.templates import open_turn, suffix
from lynxkv.models import prefill
from lynxkv.pace import Pace
from lynxkv.store import Link


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """What is measured: `new_tokens` a row over a cache of `tokens`, behind `link`."""

    document: Document
    codec: str = "default"
    tokens: int = 2048
    link: str = "100mbit/20ms"
    batches: tuple[int, ...] = (1, 2, 4, 8, 16)
    new_tokens: int = 32
    repeats: int = 3


@dataclass(frozen=True, kw_only=True)
class BatchBenchRow:
    """Medians over the repeats; drafted and accepted are means over all rows.

    `tokens_per_s` counts verified tokens of all rows from the opening of the cache on, `decode_tokens_per_s` from the
    first verified token on.
    """

    batch: int
    repeats: int
    drafted: float
    accepted: float
    first_draft_s: float | None
    first_verified_s: float
    total_s: float
    tokens_per_s: float
    decode_tokens_per_s: float
    cache_bytes: int


def bench_batch(
    model: Model, plan: BatchPlan, *, progress: Progress = lambda stage, done, total: None
) -> list[BatchBenchRow]:
    """Measure batches of every size in turns.

    Raises:
        InputError: the document is too short.
    """
    endless = replace(model, eos_token_ids=frozenset())
    ids = open_turn(endless.tokenizer, plan.document.text)
    if len(ids) < plan.tokens:
        raise InputError(
            f"{plan.document.name} has {len(ids)} tokens, {plan.tokens} are needed", hint="give a longer document"
        )
    kv = prefill(endless, ids[: plan.tokens], progress=lambda done, total: progress("prefill", done, total))
    questions = [suffix(endless.tokenizer, question) for question in QUESTIONS]
    paces = {batch: Pace() for batch in plan.batches}
    results: dict[int, list[BatchResult]] = {batch: [] for batch in plan.batches}
    with TemporaryDirectory(prefix="lynxkv-bench-") as folder:
        url = str(Path(folder) / "cache.lynx")
        encode(kv, url, codec=plan.codec, identity=endless.identity)
        done, total = 0, len(plan.batches) * (plan.repeats + 1)
        for repeat in range(plan.repeats + 1):
            for batch in plan.batches:
                progress("batches", done, total)
                rows = [questions[(repeat + number) % len(questions)] for number in range(batch)]
                with open_cache(url, link=Link.parse(plan.link) if repeat else None) as reader:
                    result = generate_batch(
                        [(reader, row) for row in rows],
                        endless,
                        max_new_tokens=plan.new_tokens if repeat else 2,
                        pace=paces[batch],
                    )
                done += 1
                if repeat:  # the first round warms up
                    results[batch].append(result)
        progress("batches", total, total)
    return [_row(batch, own) for batch, own in results.items()]


def _row(batch: int, results: Sequence[BatchResult]) -> BatchBenchRow:
    texts = [text for result in results for text in result.texts]
    drafts = [result.first_draft_s for result in results if result.first_draft_s is not None]
    tokens = [sum(len(text.token_ids) for text in result.texts) for result in results]
    # What was accepted, and a token each unless that is all, stand with the first verification.
    later = [sum(max(0, len(text.token_ids) - text.accepted - 1) for text in result.texts) for result in results]
    spans = [result.total_s - result.first_verified_s for result in results]
    return BatchBenchRow(
        batch=batch,
        repeats=len(results),
        drafted=sum(text.drafted for text in texts) / len(texts),
        accepted=sum(text.accepted for text in texts) / len(texts),
        first_draft_s=median(drafts) if drafts else None,
        first_verified_s=median(result.first_verified_s for result in results),
        total_s=median(result.total_s for result in results),
        tokens_per_s=median(count / result.total_s for count, result in zip(tokens, results, strict=True)),
        decode_tokens_per_s=median(count / span if span else 0.0 for count, span in zip(later, spans, strict=True)),
        cache_bytes=results[0].cache_bytes,
    )
