"""A model's attention as it really happens: its queries, mask, scale, softcap and window, for measuring errors."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lynxkv.errors import UnsupportedModelError
from lynxkv.integrations.hf import support
from lynxkv.integrations.hf.model import Model

AttentionFunction = Callable[..., Any]
"""transformers' form: (module, query [1, H_q, Q, D], keys, values [1, H, S, D], mask, **settings), which returns
outputs [1, Q, H_q, D] and weights that may be None."""

Run = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""An attention function on a query, keys, values and a mask, all else as it was called."""


@dataclass(frozen=True, kw_only=True)
class StoredAttention:
    """One layer's attention of some tokens to the positions before them alone. Unlike `LayerAttention` it lasts.

    `query` [1, H_q, q, D] holds those that see any of them; `mask` [1, 1, q, tokens].
    """

    query: Tensor
    mask: Tensor | None
    tokens: int
    run: Run

    @torch.inference_mode()
    def __call__(self, keys: Tensor, values: Tensor) -> Tensor:
        """Outputs, f32 [H_q, q, D] on the CPU, on the last `tokens` of `keys` and `values` [H, T, D]."""
        if not self.query.shape[2]:
            return torch.zeros(self.query.shape[1:])
        k, v = (x[None, :, x.shape[1] - self.tokens :].to(self.query) for x in (keys, values))
        return _outputs(self.run(self.query, k, v, self.mask))


@dataclass(frozen=True, kw_only=True)
class LayerAttention:
    """One layer's attention of some last tokens, which can be computed again on other keys and values.

    `query` [1, H_q, Q, D] after RoPE; `keys`, `values` [1, H, S, D] are views of the live cache: they hold until its
    next step. `run` is the model's own attention function with everything else that it was called with.
    """

    query: Tensor
    keys: Tensor
    values: Tensor
    mask: Tensor | None
    run: Run

    @torch.inference_mode()
    def __call__(self, keys: Tensor, values: Tensor) -> Tensor:
        """Outputs, f32 [H_q, Q, D] on the CPU, with `keys` and `values` [H, T, D] in the place of the last T."""
        return _outputs(self.run(self.query, _replaced(self.keys, keys), _replaced(self.values, values), self.mask))

    def on_stored(self) -> StoredAttention:
        """The same queries on the positions before them alone, each on those that it really sees.

        Raises:
            UnsupportedModelError: the model does not say by a mask which those are.
        """
        queries = self.query.shape[2]
        tokens = self.keys.shape[2] - queries
        if self.mask is None and queries > 1:
            raise _unseen("the mask of this model's attention")
        if self.mask is None:
            return StoredAttention(query=self.query, mask=None, tokens=tokens, run=self.run)
        mask = self.mask[..., :tokens]
        sees = allowed(mask).any(-1).any(1)[0]
        return StoredAttention(query=self.query[:, :, sees], mask=mask[:, :, sees], tokens=tokens, run=self.run)


def allowed(mask: Tensor) -> Tensor:
    """Where a mask, of truth values or to be added to logits, lets a query see a key."""
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2


@contextmanager
def replaced_attention(model: Model, function: AttentionFunction) -> Iterator[None]:
    """Have `model` attend by `function(stock, module, query, keys, values, mask, **settings)` meanwhile.

    `stock` is the attention function that it stands in for. Registered functions belong to the process, so no other
    thread may run a model.
    """
    name = _implementation(model)
    registered = ALL_ATTENTION_FUNCTIONS.get(name)

    def call(
        module: Any, query: Tensor, keys: Tensor, values: Tensor, attention_mask: Tensor | None, **settings: Any
    ) -> Any:
        return function(registered or _eager(module), module, query, keys, values, attention_mask, **settings)

    ALL_ATTENTION_FUNCTIONS[name] = call
    try:
        yield
    finally:
        if registered is None:
            del ALL_ATTENTION_FUNCTIONS[name]  # type: ignore[no-untyped-call]
        else:
            ALL_ATTENTION_FUNCTIONS[name] = registered


def watch_attention(model: Model, cache: Any, token_ids: Sequence[int]) -> list[LayerAttention]:
    """Run `token_ids`, at most 512, after what `cache` holds; the attention of each layer.

    The model's registered attention function is replaced while this runs, so no other thread may run a model.

    Raises:
        UnsupportedModelError: the model's attention cannot be seen.
    """
    name = _implementation(model)
    watched: list[LayerAttention] = []

    def watch(
        stock: AttentionFunction,
        module: Any,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor | None,
        **settings: Any,
    ) -> Any:
        def run(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
            # Whatever is registered when this is called: a replaced attention function is measured by it, too.
            function = ALL_ATTENTION_FUNCTIONS.get(name) or _eager(module)
            output: Tensor = function(module, query, keys, values, mask, **settings)[0]
            return output

        watched.append(LayerAttention(query=query, keys=keys, values=values, mask=mask, run=run))
        return stock(module, query, keys, values, mask, **settings)

    with replaced_attention(model, watch):
        model.step(cache, token_ids)
    seen = [item.keys.shape[1] for item in watched]
    if seen != [shape.tensors["k"][0] for shape in model.layer_specs()]:
        raise _unseen(f"the attention of {model.hf.config.model_type} models")
    return watched


def _implementation(model: Model) -> str:
    return support.text_config(model.hf.config)._attn_implementation or "eager"


def _eager(module: Any) -> AttentionFunction:
    """Eager attention is not registered: each family has its own beside its model."""
    function: AttentionFunction = sys.modules[type(module).__module__].eager_attention_forward
    return function


def _outputs(output: Tensor) -> Tensor:
    return output[0].transpose(0, 1).to("cpu", torch.float32)


def _replaced(states: Tensor, last: Tensor) -> Tensor:
    out = states.clone()
    tokens = min(last.shape[1], states.shape[2])
    out[0, :, states.shape[2] - tokens :].copy_(last[:, last.shape[1] - tokens :])
    return out


def _unseen(what: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{what} cannot be seen", hint="compare keys and values alone: inspect --against")
