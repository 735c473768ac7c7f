"""A model's attention as it really happens: its queries, mask, scale, softcap and window, for measuring errors."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lynxkv.errors import UnsupportedModelError
from lynxkv.integrations.hf import support
from lynxkv.integrations.hf.model import Model


@dataclass(frozen=True, kw_only=True)
class LayerAttention:
    """One layer's attention of some last tokens, which can be computed again on other keys and values.

    `query` [1, H_q, Q, D] after RoPE; `keys`, `values` [1, H, S, D] are views of the live cache: they hold until its
    next step. `run` is the model's own attention function with everything else that it was called with.
    """

    query: Tensor
    keys: Tensor
    values: Tensor
    run: Callable[[Tensor, Tensor], Tensor]

    @torch.inference_mode()
    def __call__(self, keys: Tensor, values: Tensor) -> Tensor:
        """Outputs, f32 [H_q, Q, D] on the CPU, with `keys` and `values` [H, T, D] in the place of the last T."""
        output = self.run(_replaced(self.keys, keys), _replaced(self.values, values))
        return output[0].transpose(0, 1).to("cpu", torch.float32)


def _replaced(states: Tensor, last: Tensor) -> Tensor:
    out = states.clone()
    tokens = min(last.shape[1], states.shape[2])
    out[0, :, states.shape[2] - tokens :].copy_(last[:, last.shape[1] - tokens :])
    return out


def watch_attention(model: Model, cache: Any, token_ids: Sequence[int]) -> list[LayerAttention]:
    """Run `token_ids`, at most 512, after what `cache` holds; the attention of each layer.

    The model's registered attention function is replaced while this runs, so no other thread may run a model.

    Raises:
        UnsupportedModelError: the model's attention cannot be seen.
    """
    name = support.text_config(model.hf.config)._attn_implementation or "eager"
    registered = ALL_ATTENTION_FUNCTIONS.get(name)
    watched: list[LayerAttention] = []

    def watch(module: Any, query: Tensor, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> Any:
        # Eager attention is not registered: each family has its own beside its model.
        stock = registered or sys.modules[type(module).__module__].eager_attention_forward

        def run(keys: Tensor, values: Tensor) -> Tensor:
            output: Tensor = stock(module, query, keys, values, *args, **kwargs)[0]
            return output

        watched.append(LayerAttention(query=query, keys=keys, values=values, run=run))
        return stock(module, query, keys, values, *args, **kwargs)

    ALL_ATTENTION_FUNCTIONS[name] = watch
    try:
        model.step(cache, token_ids)
    finally:
        del ALL_ATTENTION_FUNCTIONS[name]  # type: ignore[no-untyped-call]
    seen = [item.keys.shape[1] for item in watched]
    if seen != [shape.tensors["k"][0] for shape in model.layer_specs()]:
        raise UnsupportedModelError(
            f"the attention of {model.hf.config.model_type} models cannot be seen",
            hint="compare keys and values alone: inspect --against",
        )
    return watched


def queries(model: Model, cache: Any, token_ids: Sequence[int]) -> list[Tensor]:
    """Each layer's queries of `token_ids` after RoPE, f32 [H_q, len(token_ids), D]; see `watch_attention`."""
    return [item.query[0].to(torch.float32) for item in watch_attention(model, cache, token_ids)]
