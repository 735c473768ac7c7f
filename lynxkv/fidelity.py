"""How far a decoded cache is from the original: K, V and attention outputs, by layer and tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from lynxkv.decoder import KVDestination, check_precision, decode_stages
from lynxkv.errors import InputError
from lynxkv.fetch import FetchOptions, open_cache
from lynxkv.kv import KV, KVLayer
from lynxkv.layout import Extent, LayerSpec, Precision, TensorName
from lynxkv.quantization import to_original
from lynxkv.store import Url

# Enough queries for a steady mean; more only cost time.
QUERIES = 64

Attention = Callable[[Tensor, Tensor], Tensor]
"""One layer's attention outputs, f32 [H_q, Q, D], from the keys and values [H, T, D] that a cache stores of it."""


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


def compare(
    url: Url,
    original: KV,
    attend: Sequence[Attention] | None = None,
    *,
    precision: Precision | None = None,
    options: FetchOptions | None = None,
) -> list[TensorError]:
    """Errors of the cache at `url` against the KV it was made from, at each precision that it tells apart.

    The cache is fetched once and refined in place. `original` is first rounded to the cache's declared dtype, which
    all errors count from; it may hold more positions of a sliding layer than the cache.

    Args:
        attend: of each layer, as `integrations.hf.queries.watch_attention` gives it; `key_attention` by default.
        precision: the highest to look at; by default the best that the cache has.
        options: how to fetch. A Residual that is not to be had is an error whatever they say, unless `precision` needs
            none.

    Raises:
        InputError: the shapes differ, there is no such precision, the cache does not have it, attention is not
            defined on a layer without a model, or overflows.
        StoreError, FormatError: the cache cannot be read.
    """
    out: list[TensorError] = []
    with open_cache(url, options=options) as reader:
        extent = reader.extent
        layers = _held_by(extent, original, reader.url)
        if attend is None:
            _check_heads(layers, reader.url)
        decoded = KVDestination(extent)
        best: Precision = precision or ("exact" if extent.has_exact else "full")
        check_precision(extent, best)
        stages: tuple[Precision, ...] = get_args(Precision)
        for reached in decode_stages(reader, decoded, stages[: stages.index(best) + 1]):
            for number, layer in enumerate(layers):
                rounded = {
                    name: to_original(x.to("cpu"), extent.dtype, where=f"layer {number} {name}")
                    for name, x in layer.items()
                }
                if {"k", "v"} <= set(rounded):
                    by = attend[number] if attend else key_attention(rounded["k"], extent.layers[number].window)
                    out += _layer_errors(number, reached, rounded, decoded.kv.layers[number].tensors, by)
    return out


def attention(query: Tensor, keys: Tensor, values: Tensor, *, visible: Tensor | None = None) -> Tensor:
    """softmax(q k^T / sqrt(D)) v for query [H_q, Q, D], keys and values [H, T, D], H dividing H_q; f32 [H_q, Q, D].

    `visible` [Q, T] says which keys a query sees; by default all.
    """
    groups = query.shape[0] // keys.shape[0]
    keys = keys.to(torch.float32).repeat_interleave(groups, 0)
    values = values.to(torch.float32).repeat_interleave(groups, 0)
    logits = query.to(torch.float32) @ keys.transpose(1, 2) * query.shape[-1] ** -0.5
    if visible is not None:
        logits = logits.masked_fill(~visible, float("-inf"))
    return torch.softmax(logits, -1) @ values


def key_attention(original_keys: Tensor, window: int | None = None) -> Attention:
    """Causal attention whose queries are the last original keys [H, T, D] of a layer, for want of a model's queries.

    A hard case, since these queries find themselves. `window` counts the tokens that a query sees, its own included.
    """
    query = original_keys[:, -QUERIES:].to(torch.float32)
    tokens = original_keys.shape[1]
    behind = torch.arange(tokens - query.shape[1], tokens)[:, None] - torch.arange(tokens)
    visible = (behind >= 0) & (behind < (window or tokens))
    return lambda keys, values: attention(query, keys, values, visible=visible)


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
    attend: Attention,
) -> list[TensorError]:
    k, v = original["k"], original["v"]
    exact = attend(k, v)
    both = nmse(attend(decoded["k"], decoded["v"]), exact)
    alone: dict[TensorName, float] = {
        "k": nmse(attend(decoded["k"], v), exact),
        "v": nmse(attend(k, decoded["v"]), exact),
    }
    errors = [
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
    for error in errors:
        if not math.isfinite(error.nmse + error.attention_nmse + error.attention_nmse_both):
            raise InputError(
                f"layer {number}: keys or values are too large for errors in float32",
                hint="check the KV that the cache was made from: attention on it overflows, too",
            )
    return errors


def _held_by(extent: Extent, original: KV, url: str) -> list[dict[TensorName, Tensor]]:
    """The original's tensors, cut to the positions that the cache holds."""
    if len(extent.layers) != len(original.layers):
        raise _other_shapes(url, f"{len(extent.layers)} layers", f"{len(original.layers)}")
    return [
        _cut(spec, layer, f"{url}: layer {number}")
        for number, (spec, layer) in enumerate(zip(extent.layers, original.layers, strict=True))
    ]


def _check_heads(layers: Sequence[dict[TensorName, Tensor]], url: str) -> None:
    for number, layer in enumerate(layers):
        heads = [layer[name].shape[0] for name in ("k", "v") if name in layer]
        if len(set(heads)) > 1:
            raise InputError(
                f"{url}: layer {number} has {heads[0]} heads of keys and {heads[1]} of values, "
                "which does not say how they attend",
                hint="compare with the model itself",
            )


def _cut(spec: LayerSpec, layer: KVLayer, where: str) -> dict[TensorName, Tensor]:
    stored = {name: (tensor.heads, tensor.head_dim) for name, tensor in spec.tensors.items()}
    given = {name: (x.shape[0], x.shape[2]) for name, x in layer.tensors.items()}
    if stored != given:
        raise _other_shapes(where, f"tensors {stored}", f"{given}")
    if not layer.start <= spec.start or layer.stop != spec.stop:
        raise _other_shapes(where, f"positions [{spec.start}, {spec.stop})", f"[{layer.start}, {layer.stop})")
    return {name: x[:, spec.start - layer.start :] for name, x in layer.tensors.items()}


def _other_shapes(where: str, stored: str, given: str) -> InputError:
    return InputError(
        f"{where} has {stored}, the original {given}: different shapes",
        hint="compare with the KV it was made from",
    )
