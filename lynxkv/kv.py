"""KV tensors in memory, and as plain safetensors files that other tools can write."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from lynxkv.choices import Precision
from lynxkv.errors import InputError
from lynxkv.layout import LayerKind, TensorName
from lynxkv.store.problems import writing

_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(kw_only=True)
class KVLayer:
    """One layer's tensors, each [H, T, D] for the positions [start, stop), T = stop - start."""

    tensors: dict[TensorName, Tensor]
    start: int
    stop: int
    kind: LayerKind = "full"
    window: int | None = None


@dataclass(kw_only=True)
class KV:
    """The KV tensors of positions [start, stop) of one sequence; there is no batch dimension.

    `precision` says what values loaded from a cache are; None if they come from elsewhere.
    """

    layers: list[KVLayer]
    start: int = 0
    stop: int = 0
    token_ids: list[int] | None = field(default=None)
    precision: Precision | None = None

    @property
    def tokens(self) -> int:
        return self.stop - self.start

    def between(self, start: int, stop: int) -> KV:
        """The positions [start, stop), sharing memory.

        Raises:
            InputError: they are not all here, or a layer does not hold all tokens (sliding window).
        """
        if not self.start <= start < stop <= self.stop:
            raise InputError(f"positions [{start}, {stop}) are not in [{self.start}, {self.stop})")
        for number, layer in enumerate(self.layers):
            if (layer.start, layer.stop) != (self.start, self.stop):
                raise InputError(f"layer {number} holds positions [{layer.start}, {layer.stop}) only")
        own = slice(start - self.start, stop - self.start)
        return KV(
            layers=[
                KVLayer(
                    tensors={name: tensor[:, own] for name, tensor in layer.tensors.items()},
                    start=start,
                    stop=stop,
                    kind=layer.kind,
                    window=layer.window,
                )
                for layer in self.layers
            ],
            start=start,
            stop=stop,
            token_ids=None if self.token_ids is None else self.token_ids[own],
            precision=self.precision,
        )


def kv_from_tensors(layers: Sequence[tuple[Tensor, Tensor]], token_ids: Sequence[int] | None = None) -> KV:
    """A `KV` from one (keys, values) pair a layer, each [H, T, D] or [1, H, T, D], all of one T.

    Raises:
        InputError: no layers, another rank, a batch, or layers of differing T.
    """
    if not layers:
        raise InputError("there are no layers")
    out = []
    tokens = layers[0][0].shape[-2] if layers[0][0].ndim >= 2 else 0
    for number, pair in enumerate(layers):
        tensors: dict[TensorName, Tensor] = {}
        names: tuple[TensorName, TensorName] = ("k", "v")
        for name, tensor in zip(names, pair, strict=True):
            tensors[name] = tensor[0] if tensor.ndim == 4 and tensor.shape[0] == 1 else tensor
            check_tensor(tensors[name], f"layer {number} {name}")
            if tensors[name].shape[1] != tokens:
                raise InputError(f"layer {number} {name} has {tensors[name].shape[1]} tokens, layer 0 k has {tokens}")
        out.append(KVLayer(tensors=tensors, start=0, stop=tokens))
    return KV(layers=out, stop=tokens, token_ids=list(token_ids) if token_ids is not None else None)


def kv_to_safetensors(kv: KV, path: str | Path) -> None:
    """Write `layer.<i>.k`, `layer.<i>.v` [H, T, D] and `token_ids` [T] (int64) to a plain safetensors file.

    Raises:
        InputError: a layer does not hold all tokens (sliding window); that needs a lynxkv cache.
        StoreError: the file cannot be written.
    """
    tensors: dict[str, Tensor] = {}
    for number, layer in enumerate(kv.layers):
        if (layer.start, layer.stop) != (kv.start, kv.stop):
            raise InputError(f"layer {number} holds positions [{layer.start}, {layer.stop}) only")
        for name, tensor in layer.tensors.items():
            tensors[f"layer.{number}.{name}"] = tensor.contiguous()
    if kv.token_ids is not None:
        tensors["token_ids"] = torch.tensor(kv.token_ids, dtype=torch.int64)
    with writing(str(path)):
        try:
            safetensors.torch.save_file(tensors, str(path))
        except safetensors.SafetensorError as error:
            raise _os_error(error) from error


def _os_error(error: safetensors.SafetensorError) -> Exception:
    """The system's error that safetensors, which is not written in Python, has only kept the number of."""
    number = re.search(r"\(os error (\d+)\)", str(error))
    return error if number is None else OSError(int(number[1]), os.strerror(int(number[1])))


def kv_from_safetensors(path: str | Path) -> KV:
    """Read what `kv_to_safetensors` writes: `layer.<i>.k` and `layer.<i>.v` for i = 0, 1, ..., [H, T, D] or
    [1, H, T, D], bf16, fp16, fp32 or fp64; `token_ids` [T] optional.

    Raises:
        InputError: the file cannot be read as safetensors, or its arrays are not those.
    """
    if not Path(path).is_file():  # opening a pipe would wait for somebody to write it
        raise InputError(f"cannot read {path}: there is no such file", hint="give a safetensors file")
    try:
        with safetensors.safe_open(str(path), framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, safetensors.SafetensorError) as error:
        raise InputError(f"cannot read {path}: {error}", hint="give a safetensors file") from error
    ids = tensors.pop("token_ids", None)
    pairs: list[tuple[Tensor, Tensor]] = []
    while (keys := tensors.pop(f"layer.{len(pairs)}.k", None)) is not None:
        values = tensors.pop(f"layer.{len(pairs)}.v", None)
        if values is None:
            raise InputError(f"{path}: layer.{len(pairs)}.v is missing")
        pairs.append((keys, values))
    if tensors or not pairs:
        odd = next(iter(sorted(tensors)), "nothing")
        raise InputError(
            f"{path}: expected the arrays layer.0.k, layer.0.v, layer.1.k, ..., found {odd}",
            hint="name them layer.<i>.k and layer.<i>.v, each [heads, tokens, head_dim]",
        )
    if ids is not None and (ids.ndim != 1 or ids.is_floating_point() or ids.dtype == torch.bool):
        raise InputError(f"{path}: token_ids are {ids.dtype} {tuple(ids.shape)}", hint="give integers [tokens]")
    kv = kv_from_tensors(pairs, ids.tolist() if ids is not None else None)
    if kv.token_ids is not None and len(kv.token_ids) != kv.tokens:
        raise InputError(f"{path}: {len(kv.token_ids)} token ids for {kv.tokens} tokens")
    return kv


def check_tensor(tensor: Tensor, what: str) -> None:
    """Refuse, with an InputError, what are not floats [H, T, D]."""
    if tensor.ndim != 3 or tensor.dtype not in _FLOATS or not tensor.numel():
        raise InputError(f"{what} is {tensor.dtype} {tuple(tensor.shape)}, not floats [heads, tokens, head_dim]")
