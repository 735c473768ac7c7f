"""`lynxkv bench codec`: every method on every document at every length, measured against the original cache."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lynxkv._version import __version__
from lynxkv.bench.cells import Cell, CellFile
from lynxkv.bench.documents import Document, standard_documents
from lynxkv.bench.measure import Fidelity, Reference, empty_cache, make_reference, measure
from lynxkv.bench.stored import Method
from lynxkv.errors import InputError
from lynxkv.integrations.hf import Model
from lynxkv.integrations.hf.templates import open_turn
from lynxkv.kv import KV
from lynxkv.layout import Precision
from lynxkv.models import prefill

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is measured on each document.

    `next_tokens` of the document after the cached ones give queries and distributions; each question is answered with
    a greedy draft of `draft_tokens`.
    """

    documents: tuple[Document, ...]
    tokens: tuple[int, ...] = (2048,)
    next_tokens: int = 128
    draft_tokens: int = 32

    @classmethod
    def standard(cls, **changes: Any) -> Plan:
        """Four documents with eight questions each, 2,048 tokens."""
        return cls(**{"documents": standard_documents(), **changes})

    @classmethod
    def quick(cls, **changes: Any) -> Plan:
        """Two documents, one of them code, with four questions each, 1,024 tokens: about two minutes on two cores."""
        plan = cls(documents=standard_documents()[:2], tokens=(1024,), next_tokens=64).with_prompts(4)
        return replace(plan, **changes)

    def with_prompts(self, count: int) -> Plan:
        """At most this many questions a document."""
        documents = tuple(replace(item, prompts=item.prompts[:count]) for item in self.documents)
        return replace(self, documents=documents)


@dataclass(frozen=True, kw_only=True)
class CodecBench:
    """Everything that was measured; `report` makes tables of it."""

    model: str
    fingerprint: str | None
    plan: Plan
    codecs: tuple[str, ...]
    cells: tuple[Cell, ...]

    def facts(self) -> dict[str, Any]:
        """What one has to know to repeat it."""
        return {
            "model": self.model,
            "fingerprint": self.fingerprint,
            "lynxkv": __version__,
            "python": platform.python_version(),
            "documents": [
                {"name": item.name, "kind": item.kind, "sha256": item.sha256, "prompts": len(item.prompts)}
                for item in self.plan.documents
            ],
            "tokens": list(self.plan.tokens),
            "next_tokens": self.plan.next_tokens,
            "draft_tokens": self.plan.draft_tokens,
        }


def bench_codec(
    model: Model,
    methods: Sequence[Method],
    plan: Plan,
    *,
    state: Path | None = None,
    progress: Progress = lambda stage, done, total: None,
) -> CodecBench:
    """Measure `methods` as `plan` says. One decoded cache is in memory at a time, beside the original.

    Args:
        state: a file of finished cells; those in it are not measured again.
        progress: called with the name of the work, how much is done and how much there is.

    Raises:
        InputError: a document is shorter than the tokens asked for, or they do not fit the model's context.
    """
    file = CellFile(state)
    keys = {
        (document.name, tokens, method.label): _key(model, plan, document, tokens, method)
        for document in plan.documents
        for tokens in plan.tokens
        for method in methods
    }
    if len(keys) < len(plan.documents) * len(plan.tokens) * len(methods):
        raise InputError("two documents or two codecs have one name")
    token_ids = {document.name: _token_ids(model, plan, document) for document in plan.documents}
    done = sum(file.get(key) is not None for key in keys.values())
    for document in plan.documents:
        for tokens in plan.tokens:
            missing = [item for item in methods if file.get(keys[document.name, tokens, item.label]) is None]
            if not missing:
                continue
            reference = _reference(model, plan, document, token_ids[document.name], tokens, progress)
            for method in missing:
                progress("codecs", done, len(keys))
                file.add(keys[document.name, tokens, method.label], _cell(model, plan, document, reference, method))
                done += 1
            progress("codecs", done, len(keys))
    cells = tuple(cell for key in keys.values() if (cell := file.get(key)) is not None)
    return CodecBench(
        model=model.identity.model_id or "unnamed",
        fingerprint=model.identity.fingerprint,
        plan=plan,
        codecs=tuple(method.label for method in methods),
        cells=cells,
    )


def _key(model: Model, plan: Plan, document: Document, tokens: int, method: Method) -> str:
    """Digest of all that a cell depends on."""
    parts = [
        __version__,
        model.identity.fingerprint,
        str(model.hf.dtype),
        document.sha256,
        document.name,
        tokens,
        plan.next_tokens,
        plan.draft_tokens,
        method.label,
        method.settings,
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def _token_ids(model: Model, plan: Plan, document: Document) -> list[int]:
    ids = open_turn(model.tokenizer, document.text)
    needed = max(plan.tokens) + plan.next_tokens
    if len(ids) < needed:
        raise InputError(
            f"{document.name} has {len(ids)} tokens, {needed} are needed",
            hint="give a longer document or ask for fewer tokens",
        )
    return ids


def _reference(
    model: Model, plan: Plan, document: Document, token_ids: list[int], tokens: int, progress: Progress
) -> Reference:
    name = f"{document.name} {tokens}"

    def prefilled(done: int, total: int) -> None:
        progress(f"prefill {name}", done, total)

    kv = prefill(model, token_ids[:tokens], progress=prefilled)
    return make_reference(
        model,
        kv,
        token_ids[tokens : tokens + plan.next_tokens],
        document.prompts,
        draft_tokens=plan.draft_tokens,
        progress=lambda done, total: progress(f"answers {name}", done, total),
    )


def _cell(model: Model, plan: Plan, document: Document, reference: Reference, method: Method) -> Cell:
    measured: dict[Precision, Fidelity] = {}
    cache = empty_cache(model, reference.kv, reference.room_tokens)
    with method.store(reference.kv) as stored:
        for precision in stored.decode(cache):
            measured[precision] = measure(model, cache, reference, stored.sparse)
        sizes = stored.sizes
    return Cell(
        codec=method.label,
        document=document.name,
        tokens=reference.kv.tokens,
        elements=elements(reference.kv),
        sizes=sizes,
        draft_tokens=plan.draft_tokens,
        target_tokens=[len(prompt.target_ids) for prompt in reference.prompts],
        anchor=measured.get("anchor", measured["full"]),
        full=measured["full"],
        exact=measured.get("exact"),
    )


def elements(kv: KV) -> int:
    """Elements of all tensors."""
    return sum(tensor.numel() for layer in kv.layers for tensor in layer.tensors.values())
