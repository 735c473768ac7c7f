"""How far a decoded cache is from the original: K, V and attention outputs, by layer and tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lynxkv.decoder import load
from lynxkv.errors import InputError
from lynxkv.kv import KV
from lynxkv.layout import Precision, TensorName
from lynxkv.quantization import DTYPE_NAMES, to_original
from lynxkv.store import Url

# Enough queries for a steady mean; more only cost time.
QUERIES = 64


@dataclass(frozen=True, kw_only=True)
class TensorError:
    """Error of one tensor at one precision.

    `nmse` is the mean square error over the mean square of the original. `attention_nmse` is that of the layer's
    attention outputs when this tensor alone is replaced; `attention_nmse_both` when K and V both are.
    """

    layer: int
    tensor: str
    precision: Precision
    max_abs: float
    nmse: float
    attention_nmse: float
    attention_nmse_both: float


def compare(url: Url, original: KV, queries: Sequence[Tensor] | None = None) -> list[TensorError]:
    """Errors of the cache at `url` against the KV it was made from, at both precisions.

    `original` is first rounded to the cache's declared dtype, which all errors count from. `queries` holds each layer's
    [H_q, Q, D] query vectors after RoPE; without them the last keys of the layer stand in, which is a hard case, since
    they find themselves. Every query sees all tokens, and logits are scaled by 1 / sqrt(D).

    Raises:
        InputError: the shapes differ.
        StoreError, FormatError: the cache cannot be read.
    """
    out: list[TensorError] = []
    full = load(url, precision="full")
    same = _shapes(full) == _shapes(original)
    if not same:
        raise InputError(f"{url} and the original have different shapes", hint="compare with the KV it was made from")
    precisions: list[tuple[Precision, KV]] = [("anchor", load(url, precision="anchor")), ("full", full)]
    for precision, decoded in precisions:
        for number, layer in enumerate(original.layers):
            query = queries[number] if queries is not None else None
            tensors = decoded.layers[number].tensors
            rounded = {
                name: to_original(x, DTYPE_NAMES[tensors[name].dtype], where=f"layer {number} {name}")
                for name, x in layer.tensors.items()
            }
            out += _layer_errors(number, precision, rounded, tensors, query)
    return out


def attention(query: Tensor, keys: Tensor, values: Tensor, *, scale: float | None = None) -> Tensor:
    """softmax(q k^T * scale) v for query [H_q, Q, D], keys and values [H, T, D], H dividing H_q; f32 [H_q, Q, D]."""
    groups = query.shape[0] // keys.shape[0]
    keys = keys.to(torch.float32).repeat_interleave(groups, 0)
    values = values.to(torch.float32).repeat_interleave(groups, 0)
    scale = scale if scale is not None else query.shape[-1] ** -0.5
    weights = torch.softmax(query.to(torch.float32) @ keys.transpose(1, 2) * scale, -1)
    return weights @ values


def nmse(decoded: Tensor, original: Tensor) -> float:
    """Mean square error over the original's mean square."""
    reference = original.to(torch.float32)
    power = float(reference.square().mean())
    error = float((decoded.to(torch.float32) - reference).square().mean())
    return error / power if power else error


def _layer_errors(
    number: int,
    precision: Precision,
    original: dict[TensorName, Tensor],
    decoded: dict[TensorName, Tensor],
    query: Tensor | None,
) -> list[TensorError]:
    if set(original) != {"k", "v"}:
        return []
    k, v = original["k"], original["v"]
    query = query if query is not None else k[:, -QUERIES:].to(torch.float32)
    exact = attention(query, k, v)
    both = nmse(attention(query, decoded["k"], decoded["v"]), exact)
    alone: dict[TensorName, float] = {
        "k": nmse(attention(query, decoded["k"], v), exact),
        "v": nmse(attention(query, k, decoded["v"]), exact),
    }
    return [
        TensorError(
            layer=number,
            tensor=name,
            precision=precision,
            max_abs=float((decoded[name].to(torch.float32) - original[name].to(torch.float32)).abs().max()),
            nmse=nmse(decoded[name], original[name]),
            attention_nmse=alone[name],
            attention_nmse_both=both,
        )
        for name in alone
    ]


def _shapes(kv: KV) -> list[dict[str, tuple[int, ...]]]:
    return [{name: tuple(tensor.shape) for name, tensor in layer.tensors.items()} for layer in kv.layers]
