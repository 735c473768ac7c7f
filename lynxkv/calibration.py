"""A model's basis: the directions in which its keys and values vary, found once on a few texts (SPEC 8.8).

The channels of a layer depend on each other, and RoPE hides how: it turns a key's channels by its position. Turned back
and written as components along the eigenvectors of their covariance, most components are small, and an entropy coder
needs fewer bits for all of them together (the Karhunen-Loeve transform). The covariance is the model's far more than
the text's: two texts of 2,048 tokens give nearly the basis that five do.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from lynxkv._version import __version__
from lynxkv.codecs.base import SINK_TOKENS
from lynxkv.errors import InputError, NonFiniteError, UnsupportedModelError
from lynxkv.format.basis import TENSORS, Basis, RopeTables, TensorBasis, render_basis
from lynxkv.integrations.hf.model import Model
from lynxkv.integrations.hf.ropes import rope_tables
from lynxkv.integrations.hf.templates import open_turn
from lynxkv.kernels import Rope
from lynxkv.kernels.transform import turned_back
from lynxkv.kv import KV
from lynxkv.layout import TensorName
from lynxkv.models import prefill
from lynxkv.standard_texts import source, topics

TOKENS = 2048
# A product with a block costs n multiplications a channel: beyond this they would count beside the model's own.
MAX_BLOCK_CHANNELS = 1024
# Below this part of the largest one, variances are rounding.
_FLOOR = 1e-9

_CALLS = ("async", "calls", "slicings", "typesmapping", "typesfunctions", "typesmethods", "lambda", "yield-exprs")
_LITERALS = ("context-managers", "atom-identifiers", "numbers", "strings", "lists", "dict", "del", "while", "for")

Progress = Callable[[str, int, int], None]


def calibration_texts() -> tuple[str, ...]:
    """Two chapters of prose and two modules of code, none of them among the bench's documents."""
    return topics(_CALLS), source("zipfile"), topics(_LITERALS), source("inspect")


def calibrate(
    model: Model,
    texts: Sequence[str] | None = None,
    *,
    tokens: int = TOKENS,
    progress: Progress = lambda stage, done, total: None,
) -> Basis:
    """Prefill `tokens` tokens of each text and find the model's basis.

    Args:
        texts: as little as two will do; prose and code that comes with Python by default.
        progress: called with the name of the work, how much is done and how much there is.

    Raises:
        InputError: a text is too short, or all of them together have fewer tokens than a layer has channels.
        UnsupportedModelError: the model keeps no keys and values to calibrate on.
        NonFiniteError: they hold NaN or infinity.
    """
    texts = calibration_texts() if texts is None else texts
    ids = [_token_ids(model, text, tokens, number) for number, text in enumerate(texts)]
    if not ids:
        raise InputError("there are no texts to calibrate on")
    ropes = rope_tables(model)
    sums: dict[tuple[int, TensorName], dict[str | None, _Covariance]] = {}
    for number, own in enumerate(ids):
        kv = prefill(model, own, progress=partial(progress, f"prefill {number + 1}"))
        for layer, tensor, x, first in _tensors(kv):
            known = sums.setdefault((layer, tensor), {})
            for rope in (None, *ropes) if tensor == "k" else (None,):
                if rope is None or 2 * ropes[rope].pairs <= x.shape[2]:
                    known.setdefault(rope, _Covariance(*_blocks(x))).add(x, ropes.get(rope or ""), first)
    layers: list[dict[TensorName, TensorBasis]] = [{} for _ in range(1 + max(layer for layer, _ in sums))]
    for done, ((layer, tensor), candidates) in enumerate(sums.items()):
        layers[layer][tensor] = _best(candidates, f"layer {layer} {tensor}")
        progress("basis", done + 1, len(sums))
    used = {own.rope for layer in layers for own in layer.values()}
    return render_basis(
        tuple(layers),
        {name: rope for name, rope in ropes.items() if name in used},
        fingerprint=model.identity.fingerprint,
        model_id=model.identity.model_id,
        writer={"tool": "lynxkv", "version": __version__},
        calibration={
            "texts_sha256": [hashlib.sha256(text.encode()).hexdigest() for text in texts],
            "tokens": [len(own) for own in ids],
        },
    )


def _token_ids(model: Model, text: str, tokens: int, number: int) -> list[int]:
    ids = open_turn(model.tokenizer, text)[:tokens]
    if len(ids) < tokens:
        raise InputError(
            f"text {number + 1} has {len(ids)} tokens, {tokens} are needed",
            hint="give a longer text, or fewer --tokens",
        )
    return ids


def _tensors(kv: KV) -> Iterator[tuple[int, TensorName, Tensor, int]]:
    """Layer, name, coded tokens [H, T, D] and the position of the first."""
    for number, layer in enumerate(kv.layers):
        sinks = max(SINK_TOKENS - layer.start, 0)
        for tensor in TENSORS:
            if tensor not in layer.tensors or layer.tensors[tensor].shape[1] <= sinks:
                raise UnsupportedModelError("there is nothing to calibrate on: no keys and values behind the sinks")
            x = layer.tensors[tensor][:, sinks:]
            if not torch.isfinite(x).all():
                raise NonFiniteError(f"layer {number} {tensor} holds NaN or infinity")
            yield number, tensor, x, layer.start + sinks


def _blocks(x: Tensor) -> tuple[int, int]:
    """Blocks and channels of a block: as many whole heads as `MAX_BLOCK_CHANNELS` allows, all alike."""
    heads, _, dim = x.shape
    most = max(1, MAX_BLOCK_CHANNELS // dim)
    together = max(count for count in range(1, heads + 1) if heads % count == 0 and count <= most)
    return heads // together, together * dim


@dataclass
class _Covariance:
    """Sum of covariances [blocks, n, n] about each text's own means, f64."""

    blocks: int
    size: int
    total: Tensor | float = 0.0
    tokens: int = 0

    def add(self, x: Tensor, rope: RopeTables | None, first: int) -> None:
        turns = Rope(tables=rope, first=first) if rope is not None else None
        rows = turned_back(x.to("cpu"), turns).transpose(0, 1).to(torch.float64)
        rows = rows.reshape(x.shape[1], self.blocks, self.size).transpose(0, 1)
        rows = rows - rows.mean(1, keepdim=True)
        self.total = self.total + torch.bmm(rows.transpose(1, 2), rows)
        self.tokens += x.shape[1]

    def directions(self) -> tuple[Tensor, float]:
        """Eigenvectors as rows [blocks, n, n], and the logarithm of what is left to code: the sum of log variances."""
        assert isinstance(self.total, Tensor)
        values, vectors = torch.linalg.eigh(self.total / self.tokens)
        floor = values.amax().clamp_min(1e-30) * _FLOOR
        return vectors.transpose(1, 2), float(values.clamp_min(floor).log().sum())


def _best(candidates: dict[str | None, _Covariance], where: str) -> TensorBasis:
    """The rope that leaves least, or none; rows are whole numbers, the longest entry 127."""
    found = {rope: covariance.directions() for rope, covariance in candidates.items()}
    rope = min(found, key=lambda name: found[name][1])
    rows, tokens = found[rope][0], candidates[rope].tokens
    if tokens < rows.shape[1]:
        raise InputError(
            f"{where}: {tokens} tokens are too few for {rows.shape[1]} channels", hint="give more texts, or longer ones"
        )
    whole = torch.round(rows * (127 / rows.abs().amax())).to(torch.int8)
    return TensorBasis(rows=whole.contiguous().numpy(), rope=rope)
