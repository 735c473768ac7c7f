"""SparQ (arXiv 2312.04985): leave the cache where it is, and fetch for each query what it attends to most.

For every query and KV head the `components` largest components of the query, with those of all keys, give approximate
scores; keys and values of the `top_tokens` best tokens are fetched and attended to exactly, a quarter of them the
latest ones. What the others would have added is taken from the mean of all values. Heads that share keys choose
together.

Written anew. The paper counts what a decoding step moves between memories of one device; here all answers' bytes cross
a link, so each element counts once an answer, whichever of the two layouts of K that the method keeps brought it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lynxkv.bench.baselines.base import Baseline
from lynxkv.bench.stored import Sizes, TensorDestination
from lynxkv.codecs.base import check_range
from lynxkv.integrations.hf.queries import allowed
from lynxkv.kernels.rounding import round_to
from lynxkv.kv import KV
from lynxkv.layout import DTYPE_BYTES, Precision


@dataclass(frozen=True, kw_only=True)
class SparQ(Baseline):
    """r and k of the paper. Its own r is a quarter to an eighth of the head dim, its own k 128."""

    name: ClassVar[str] = "sparq"

    components: int = 16
    top_tokens: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("components", self.components, 1, 1024)
        check_range("top_tokens", self.top_tokens, 1, 1 << 20)

    def stored(self, kv: KV) -> SparQStored:
        return SparQStored(kv, SparQFetch(self))


class SparQStored:
    """The original in bf16, and what answers have fetched of it."""

    def __init__(self, kv: KV, fetch: SparQFetch) -> None:
        self._kv = kv
        self.sparse = fetch

    @property
    def sizes(self) -> Sizes:
        """All of the cache is stored; what is fetched is the mean over the answers so far."""
        total = DTYPE_BYTES["bf16"] * sum(x.numel() for layer in self._kv.layers for x in layer.tensors.values())
        fetched = self.sparse.mean_bytes()
        full = total if fetched is None else round(fetched)
        return Sizes(anchor_bytes=full, full_bytes=full, total_bytes=total)

    def decode(self, destination: TensorDestination) -> Iterator[Precision]:
        """The original: it is the attention to it that is sparse."""
        for number, layer in enumerate(self._kv.layers):
            for name, x in layer.tensors.items():
                destination.target(number, name).copy_(round_to(x.to("cpu", torch.float32), "bf16"))
        yield "full"


class SparQFetch:
    """The sparse attention, and the distinct elements that each answer fetches (`lynxkv.bench.stored.SparseFetch`)."""

    def __init__(self, method: SparQ) -> None:
        self._method = method
        self._answers: list[float] = []
        self._cache: Any = None
        self._stored = 0
        self._components: dict[int, Tensor] = {}  # by layer [H, D]: components of K fetched of all tokens
        self._tokens: dict[int, Tensor] = {}  # by layer [H, positions]: tokens of which K and V were fetched

    def mean_bytes(self) -> float | None:
        """Of all answers; None before the first."""
        return sum(self._answers) / len(self._answers) if self._answers else None

    @contextmanager
    def answer(self, cache: Any) -> Iterator[None]:
        """Count the distinct bytes of the tokens that `cache` holds now which the steps inside fetch."""
        self._cache, self._stored = cache, cache.tokens
        self._components, self._tokens = {}, {}
        starts = {number: layer.start for number, layer in enumerate(cache.layers)}
        yield
        elements = 0
        for number, components in self._components.items():
            heads, dim = components.shape
            columns, tokens = components.sum(1), self._tokens[number].sum(1)
            # K by component of all tokens, the rest of K and V by token, and the mean of V.
            length = self._stored - starts[number]
            elements += int((columns * length + tokens * (dim - columns) + tokens * dim).sum()) + heads * dim
        self._answers.append(elements * DTYPE_BYTES["bf16"])
        self._cache = None

    def attend(
        self,
        stock: Any,
        module: Any,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor | None,
        **settings: Any,
    ) -> tuple[Tensor, None]:
        """Algorithm 1 of the paper for each query; in f32."""
        q = query.to(torch.float32).view(keys.shape[1], -1, *query.shape[2:])  # [H, G, Q, D]
        k, v = (x[0].to(torch.float32)[:, None] for x in (keys, values))  # [H, 1, S, D]
        sees = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool) if mask is None else allowed(mask)[0, 0]
        scale = settings.get("scaling") or q.shape[-1] ** -0.5
        softcap = settings.get("softcap")
        # Which components, and with them about which scores.
        size = q.abs()
        count = min(self._method.components, q.shape[-1])
        largest = size.sum(1).topk(count, -1).indices
        components = torch.zeros_like(size[:, 0], dtype=torch.bool).scatter_(-1, largest, True)  # [H, Q, D]
        share = (size * components[:, None]).sum(-1, keepdim=True) / size.sum(-1, keepdim=True).clamp(min=1e-30)
        rough = (q * components[:, None]) @ k.transpose(2, 3) * scale / share.clamp(min=1e-30).sqrt()
        weights = torch.softmax(_capped(rough, softcap).masked_fill(~sees, float("-inf")), -1)  # [H, G, Q, S]
        # Which tokens: the latest, then those of the highest scores.
        local = self._method.top_tokens // 4
        latest = sees & (sees.flip(-1).cumsum(-1).flip(-1) <= local)
        best = (weights.sum(1) + latest * q.shape[1]).topk(min(self._method.top_tokens, k.shape[2]), -1).indices
        tokens = torch.zeros(q.shape[0], *sees.shape, dtype=torch.bool).scatter_(-1, best, True) & sees  # [H, Q, S]
        if self._cache is not None:
            self._count(module.layer_idx, components.any(1), tokens.any(1))
        logits = _capped(q @ k.transpose(2, 3) * scale, softcap).masked_fill(~tokens[:, None], float("-inf"))
        exact = torch.softmax(logits, -1) @ v
        covered = (weights * tokens[:, None]).sum(-1, keepdim=True)
        mean = (sees.to(v.dtype) @ v) / sees.sum(-1, keepdim=True)
        output = covered * exact + (1 - covered) * mean  # [H, G, Q, D]
        return output.flatten(0, 1).transpose(0, 1)[None].to(query.dtype), None

    def _count(self, layer: int, components: Tensor, tokens: Tensor) -> None:
        """Remember what a step has fetched: `components` [H, D], `tokens` [H, S] of the last S positions."""
        start = self._cache.layers[layer].stop - tokens.shape[1]
        stored = tokens[:, : max(self._stored - start, 0)]
        if layer not in self._components:
            self._components[layer] = torch.zeros_like(components)
            self._tokens[layer] = torch.zeros(tokens.shape[0], self._stored, dtype=torch.bool)
        self._components[layer] |= components
        self._tokens[layer][:, start : start + stored.shape[1]] |= stored


def _capped(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)
