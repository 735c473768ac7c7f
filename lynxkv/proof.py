"""Proving a text: the same tokens, one by one, from plain decoding on the same cache.

Nothing of the run is used again: the cache is fetched and decoded anew, in one go, and no draft is made.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lynxkv.decoder import decode_into
from lynxkv.events import GenerateResult
from lynxkv.fetch import CacheReader
from lynxkv.identity import check_identity
from lynxkv.models import DecoderModel
from lynxkv.prompt import place

# Logits of more positions are not kept.
ROUNDING_TOKENS = 64


@dataclass(frozen=True, kw_only=True)
class Proof:
    """How a greedy text compares with plain decoding from the same cache.

    Attributes:
        equal: all tokens are the same.
        tokens: how many were compared, the first that differs included.
        differs_at: the index of that one; None if none does.
        gap_there: how far plain decoding ranks the run's token below its own there, in logits.
        smallest_gap: the least difference of the two highest logits at all positions compared.
        rounding: the largest difference of a logit between one pass over all tokens and passes over one token each, at
            the last `ROUNDING_TOKENS` positions: the model's own kernels round differently, and such a gap can turn.
    """

    equal: bool
    tokens: int
    differs_at: int | None
    gap_there: float | None
    smallest_gap: float
    rounding: float

    @property
    def explained(self) -> bool:
        """Whether the texts are equal, or first differ where the two logits are within twice the rounding."""
        return self.gap_there is None or self.gap_there <= 2 * self.rounding


def prove(
    reader: CacheReader,
    model: DecoderModel,
    suffix_ids: Sequence[int],
    result: GenerateResult,
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Proof:
    """Decode again without speculation, and compare.

    Args:
        suffix_ids: as given to the run.
        result: what the run returned; its text must have been chosen greedily, without penalties.
        progress: called with (tokens done, tokens in all).

    Raises:
        IdentityError: the cache belongs to another model.
        FetchError, FormatError: the cache cannot be fetched or is damaged.
    """
    check_identity(reader.extent.identity, model.identity)
    tokens = result.token_ids
    prompt = place(
        reader,
        model,
        suffix_ids,
        max_new_tokens=len(tokens),
        needs_history=False,
        use_logits=result.precision == "exact",
    )
    new_tokens = len(prompt.suffix_ids) + len(tokens)
    cache = model.new_cache(reader.extent.stop, new_tokens, layers=reader.extent.layers, rollback_tokens=2 * new_tokens)
    decode_into(reader, cache, result.precision)
    cache.rollback(prompt.base)
    # Up to the first difference both are one text, so the run's tokens can be fed.
    given = [] if prompt.suffix_ids else [_stored_logits(reader, model)]
    rows, gaps = deque(given, maxlen=ROUNDING_TOKENS), [_gap(row) for row in given]
    pending = prompt.suffix_ids or tokens[:1]
    while len(gaps) < len(tokens) and (not rows or int(rows[-1].argmax()) == tokens[len(gaps) - 1]):
        rows.append(model.step(cache, pending)[0])
        gaps.append(_gap(rows[-1]))
        pending = [tokens[len(gaps) - 1]]
        progress(len(gaps), len(tokens))
    count, last, chosen = len(gaps), rows[-1], tokens[len(gaps) - 1]
    cache.rollback(prompt.base)
    ids = [*prompt.suffix_ids, *tokens[: count - 1]]
    compared = min(len(rows), count - len(given))
    together: Iterable[Tensor] = model.step(cache, ids, rows=compared) if compared else ()
    alone = list(rows)[len(rows) - compared :]
    differs = int(last.argmax()) != chosen
    return Proof(
        equal=not differs,
        tokens=count,
        differs_at=count - 1 if differs else None,
        gap_there=float(last.max() - last[chosen]) if differs else None,
        smallest_gap=min(gaps),
        rounding=max((float((a - b).abs().max()) for a, b in zip(alone, together, strict=True)), default=0.0),
    )


def _gap(logits: Tensor) -> float:
    """Of the two highest."""
    return float(logits.topk(2).values.diff().abs())


def _stored_logits(reader: CacheReader, model: DecoderModel) -> Tensor:
    stored = reader.logits()
    assert stored is not None
    return torch.from_numpy(stored.copy()).to(model.device)
