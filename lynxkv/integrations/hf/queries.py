"""The query vectors a model's attention really uses, for measuring the error of attention outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lynxkv.errors import UnsupportedModelError
from lynxkv.integrations.hf.model import Model


def queries(model: Model, cache: Any, token_ids: Sequence[int]) -> list[Tensor]:
    """Run `token_ids` after what `cache` holds; each layer's queries after RoPE, f32 [H_q, len(token_ids), D].

    The model's registered attention function is replaced while this runs, so no other thread may run a model.

    Raises:
        UnsupportedModelError: the model's attention is not a registered function.
    """
    name = model.hf.config._attn_implementation
    if name not in ALL_ATTENTION_FUNCTIONS:
        raise UnsupportedModelError(f"cannot see the queries of {name} attention", hint="load the model with sdpa")
    stock = ALL_ATTENTION_FUNCTIONS[name]
    captured: list[Tensor] = []

    def capture(module: Any, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        captured.append(query[0].to(torch.float32))
        return stock(module, query, *args, **kwargs)

    ALL_ATTENTION_FUNCTIONS[name] = capture
    try:
        model.step(cache, token_ids)
    finally:
        del ALL_ATTENTION_FUNCTIONS[name]  # type: ignore[no-untyped-call]
    return captured
