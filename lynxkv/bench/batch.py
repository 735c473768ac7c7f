"""`lynxkv bench batch`: what decoding several prompts together gains, over one cache or over several."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
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
    """What is measured: `new_tokens` a row over caches of `tokens`, behind one `link`.

    Attributes:
        documents: what the caches hold, a document each; at least as many as `caches` asks for.
        caches: prompts take turns among so many. Batches of fewer prompts are left out.
    """

    documents: tuple[Document, ...]
    caches: tuple[int, ...] = (1,)
    codec: str = "default"
    tokens: int = 2048
    link: str = "100mbit/20ms"
    batches: tuple[int, ...] = (1, 2, 4, 8, 16)
    new_tokens: int = 32
    repeats: int = 3


@dataclass(frozen=True, kw_only=True)
class BatchBenchRow:
    """Medians over the repeats; drafted and accepted are means over all rows.

    `tokens_per_s` counts verified tokens of all rows from the opening of the first cache on, `decode_tokens_per_s` from
    the first verified token on.
    """

    batch: int
    caches: int
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
    """Measure batches of every size, over every number of caches, in turns.

    Raises:
        InputError: a document is too short, there are too few, or no batch has a prompt for each cache.
    """
    runs = _runs(plan)
    endless = replace(model, eos_token_ids=frozenset())
    questions = [suffix(endless.tokenizer, question) for question in QUESTIONS]
    paces = {run: Pace() for run in runs}
    results: dict[tuple[int, int], list[BatchResult]] = {run: [] for run in runs}
    with TemporaryDirectory(prefix="lynxkv-bench-") as folder:
        urls = _encoded(endless, plan, Path(folder), progress)
        done, total = 0, len(runs) * (plan.repeats + 1)
        for repeat in range(plan.repeats + 1):
            for caches, batch in runs:
                progress("batches", done, total)
                rows = [questions[(repeat + number) % len(questions)] for number in range(batch)]
                link = Link.parse(plan.link) if repeat else None
                with ExitStack() as stack:
                    readers = [stack.enter_context(open_cache(url, link=link)) for url in urls[:caches]]
                    result = generate_batch(
                        [(readers[number % caches], row) for number, row in enumerate(rows)],
                        endless,
                        max_new_tokens=plan.new_tokens if repeat else 2,
                        pace=paces[caches, batch],
                    )
                done += 1
                if repeat:  # the first round warms up
                    results[caches, batch].append(result)
        progress("batches", total, total)
    return [_row(batch, caches, own) for (caches, batch), own in results.items()]


def _runs(plan: BatchPlan) -> list[tuple[int, int]]:
    """Caches and prompts of everything that is measured."""
    for caches in plan.caches:
        if caches > len(plan.documents):
            raise InputError(
                f"{caches} caches need as many documents, there are {len(plan.documents)}", hint="give more documents"
            )
        if caches > max(plan.batches):
            raise InputError(
                f"no batch has a prompt for each of {caches} caches", hint=f"measure a batch of {caches} or more"
            )
    return [(caches, batch) for caches in plan.caches for batch in plan.batches if batch >= caches]


def _encoded(model: Model, plan: BatchPlan, folder: Path, progress: Progress) -> list[str]:
    """Where the documents' caches are, as many as are wanted."""
    documents = plan.documents[: max(plan.caches)]
    prompts = [open_turn(model.tokenizer, document.text) for document in documents]
    for document, ids in zip(documents, prompts, strict=True):
        if len(ids) < plan.tokens:
            raise InputError(
                f"{document.name} has {len(ids)} tokens, {plan.tokens} are needed", hint="give a longer document"
            )
    urls = []
    for number, (document, ids) in enumerate(zip(documents, prompts, strict=True)):
        stage = f"prefill {document.name}"
        kv = prefill(model, ids[: plan.tokens], progress=partial(progress, stage))
        urls.append(str(folder / f"{number}.lynx"))
        encode(kv, urls[-1], codec=plan.codec, identity=model.identity)
    return urls


def _row(batch: int, caches: int, results: Sequence[BatchResult]) -> BatchBenchRow:
    texts = [text for result in results for text in result.texts]
    drafts = [result.first_draft_s for result in results if result.first_draft_s is not None]
    tokens = [sum(len(text.token_ids) for text in result.texts) for result in results]
    # What was accepted, and a token each unless that is all, stand with the first verification.
    later = [sum(max(0, len(text.token_ids) - text.accepted - 1) for text in result.texts) for result in results]
    spans = [result.total_s - result.first_verified_s for result in results]
    return BatchBenchRow(
        batch=batch,
        caches=caches,
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
