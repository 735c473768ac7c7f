"""A transformers `Cache` with one preallocated buffer a layer and tensor, refined and rolled back in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from lynxkv.decoder import decode_into
from lynxkv.errors import IdentityError, InputError
from lynxkv.fetch import FetchOptions, open_cache
from lynxkv.identity import check_identity
from lynxkv.kv import KV, KVLayer
from lynxkv.layout import LayerSpec, Precision, TensorName
from lynxkv.models import LayerShape
from lynxkv.store import Link, Url

ROLLBACK_TOKENS = 256


class LynxLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """K and V of positions [start, start + length) in buffers [1, H, capacity, D].

    A sliding layer that is full moves its last positions to the front, so it holds at least `window - 1` positions and
    can be rolled back by at least `margin` tokens. A full layer never moves.
    """

    is_croppable = True

    def __init__(
        self,
        shape: LayerShape,
        *,
        start: int,
        stop: int,
        capacity: int,
        margin: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.window = shape.window
        self.is_sliding = shape.window is not None
        self.start = self.stored_start = start
        self.length = self.stored_length = stop - start
        self.capacity = capacity
        self.margin = margin
        self.buffers: dict[TensorName, Tensor] = {
            name: torch.empty(1, heads, capacity, dim, dtype=dtype, device=device)
            for name, (heads, dim) in shape.tensors.items()
        }
        self.keys, self.values = self.buffers["k"], self.buffers["v"]
        self.is_initialized = True

    @property
    def stop(self) -> int:
        return self.start + self.length

    @property
    def reach(self) -> int:
        """Positions before its own that a query can see."""
        return self.stop if self.window is None else min(self.window - 1, self.length)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: buffers exist from the start."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append [1, H, Q, D] and return what the queries can see, as views.

        Raises:
            InputError: more than one sequence, or no room is left.
        """
        if key_states.shape[0] != 1:
            raise InputError("a lynxkv cache holds one sequence", hint="use batch size 1 and no beam search")
        states: dict[TensorName, Tensor] = {"k": key_states, "v": value_states}
        queries = key_states.shape[-2]
        if self.length + queries > self.capacity:
            if self.window is None:
                raise InputError(
                    f"the cache has room for {self.capacity - self.length} more tokens, not {queries}",
                    hint="allocate it with a larger new_tokens",
                )
            if self.window - 1 + self.margin + queries > self.capacity:
                return self._pass_through(states, queries)
            self._compact()
        for name, new in states.items():
            self.buffers[name][:, :, self.length : self.length + queries].copy_(new)
        seen = self.reach + queries
        self.length += queries
        keys, values = (self.buffers[name][:, :, self.length - seen : self.length] for name in ("k", "v"))
        return keys, values

    def _compact(self) -> None:
        """Move the positions that are still needed to the front."""
        assert self.window is not None
        keep = min(self.length, self.window - 1 + self.margin)
        for buffer in self.buffers.values():
            buffer[:, :, :keep] = buffer[:, :, self.length - keep : self.length].clone()
        self.start, self.length = self.stop - keep, keep

    def _pass_through(self, states: dict[TensorName, Tensor], queries: int) -> tuple[Tensor, Tensor]:
        """A step too long for the buffers of a sliding layer: concatenate once, keep the end."""
        past, stop = self.reach, self.stop + queries
        seen: dict[TensorName, Tensor] = {}
        for name, new in states.items():
            seen[name] = torch.cat([self.buffers[name][:, :, self.length - past : self.length], new], dim=-2)
            kept = seen[name][:, :, -self.capacity :]
            self.buffers[name][:, :, : kept.shape[-2]] = kept
        self.length = min(past + queries, self.capacity)
        self.start = stop - self.length
        return seen["k"], seen["v"]

    def rollback(self, tokens: int) -> None:
        """Forget the positions from `tokens` on.

        Raises:
            InputError: positions that the next query could see are no longer held.
        """
        needed = tokens if self.window is None else min(self.window - 1, tokens)
        if not 0 <= tokens <= self.stop or tokens - needed < self.start:
            raise InputError(
                f"the cache holds positions [{self.start}, {self.stop}) and cannot go back to {tokens}",
                hint="allocate it with a larger rollback_tokens",
            )
        self.length = tokens - self.start

    def crop(self, tokens_to_remove: int) -> None:
        """transformers' rollback: -n removes the last n tokens.

        A positive number is the length to keep, as transformers had it at first; its own layers refuse one today.
        """
        self.rollback(tokens_to_remove if tokens_to_remove > 0 else self.stop + tokens_to_remove)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(positions returned by the next `update`, position of the first of them)."""
        return self.reach + query_length, self.stop - self.reach

    def get_seq_length(self) -> int:
        """Tokens seen so far, those no longer held included."""
        return self.stop

    def get_max_length(self) -> int:
        """Positions the layer can hold at once."""
        return self.capacity if self.window is None else self.window

    def reset(self) -> None:
        """Forget everything."""
        self.start = self.length = 0


class LynxCache(Cache):
    """The live cache of one sequence: a `Destination` for decoding, a `Cache` for transformers.

        cache = LynxCache.load("report.lynx", model, new_tokens=256)
        model.hf.generate(prompt_and_question_ids, past_key_values=cache)

    `rollback(tokens)` takes the length to keep; `crop(-n)`, transformers' own form, removes n tokens.
    """

    layers: list[LynxLayer]  # type: ignore[assignment]
    on_layer: Callable[[int], None] | None = None
    """Called with its number before the model reads a layer: whoever fills the cache can wait there until it may."""
    precision: Precision | None = None
    """Of what `load` has brought; None if the cache was filled otherwise."""

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """transformers' way in: append to a layer and return what the queries can see."""
        if self.on_layer is not None:
            self.on_layer(layer_idx)
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return keys, values

    @classmethod
    def allocate(
        cls,
        model: Any,
        tokens: int,
        new_tokens: int,
        *,
        layers: Sequence[LayerSpec] | None = None,
        rollback_tokens: int = ROLLBACK_TOKENS,
    ) -> LynxCache:
        """Buffers for `tokens` stored tokens and `new_tokens` more, in the dtype and on the device of `model`.

        The stored part is not initialised: decode into it (`target`) before the model runs.

        Args:
            layers: what a cache states of its layers; by default full layers hold all tokens and sliding layers the
                last `window`.
            rollback_tokens: how far steps and rollbacks together reach on sliding layers without moving anything.

        Raises:
            IdentityError: `layers` are not those of the model.
            InputError: `new_tokens` is negative.
        """
        if new_tokens < 0:
            raise InputError(f"new_tokens is {new_tokens}", hint="give the number of tokens to leave room for")
        shapes = model.layer_specs()
        if layers is None:
            spans = [(max(0, tokens - shape.window) if shape.window else 0, tokens) for shape in shapes]
        else:
            check_layers(layers, shapes)
            spans = [(layer.start, layer.stop) for layer in layers]
        built: list[Any] = []
        for shape, (start, stop) in zip(shapes, spans, strict=True):
            capacity = tokens + new_tokens - start
            if shape.window is not None:
                capacity = min(capacity, max(stop - start, shape.window - 1) + rollback_tokens)
            built.append(
                LynxLayer(
                    shape,
                    start=start,
                    stop=stop,
                    capacity=capacity,
                    margin=max(1, rollback_tokens // 2),
                    dtype=model.hf.dtype,
                    device=model.hf.device,
                )
            )
        return cls(layers=built)

    @classmethod
    def load(
        cls,
        url: Url,
        model: Any,
        *,
        new_tokens: int,
        tokens: int | None = None,
        precision: Precision = "full",
        link: Link | None = None,
        options: FetchOptions | None = None,
    ) -> LynxCache:
        """Fetch and decode the cache at `url`, with room for `new_tokens` more; `tokens` loads its first so many only.

        `link` simulates a slower one, `options` say how to fetch. The cache's `precision` says what it holds.

        Raises:
            IdentityError: it belongs to another model.
            InputError: exact precision is asked of a cache or a model that does not hold it.
            CacheNotFoundError, FetchError, FormatError: it cannot be fetched or is damaged.
        """
        with open_cache(url, tokens=tokens, link=link, options=options) as reader:
            extent = reader.extent
            if extent.start:
                raise InputError(f"the cache starts at position {extent.start}", hint="give one that starts at 0")
            check_identity(extent.identity, model.identity)
            cache = cls.allocate(model, extent.stop, new_tokens, layers=extent.layers)
            cache.precision = decode_into(reader, cache, precision)
        return cache

    @property
    def tokens(self) -> int:
        """Tokens held, counted from position 0."""
        return self.layers[0].stop

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.nbytes for layer in self.layers for buffer in layer.buffers.values())

    def target(self, layer: int, tensor: TensorName) -> Tensor:
        """The view [H, stop - start, D] that stored layer `layer` decodes into (`Destination`)."""
        place = self.layers[layer]
        if place.start != place.stored_start:
            raise InputError(f"layer {layer} has moved on: the stored positions are no longer held")
        return place.buffers[tensor][0, :, : place.stored_length]

    def rollback(self, tokens: int) -> None:
        """Forget all but the first `tokens` tokens.

        Raises:
            InputError: a sliding layer no longer holds the positions before them.
        """
        for layer in self.layers:
            layer.rollback(tokens)

    def to_kv(self, token_ids: Sequence[int] | None = None) -> KV:
        """The cache as `KV`, sharing memory; sliding layers give their last `window` positions at most."""
        out = []
        for layer in self.layers:
            count = layer.length if layer.window is None else min(layer.length, layer.window)
            tensors: dict[TensorName, Tensor] = {
                name: buffer[0, :, layer.length - count : layer.length] for name, buffer in layer.buffers.items()
            }
            out.append(
                KVLayer(
                    tensors=tensors,
                    start=layer.stop - count,
                    stop=layer.stop,
                    kind="sliding" if layer.window is not None else "full",
                    window=layer.window,
                )
            )
        return KV(layers=out, start=0, stop=self.tokens, token_ids=list(token_ids) if token_ids is not None else None)


def check_layers(layers: Sequence[LayerSpec], shapes: Sequence[LayerShape]) -> None:
    """Return if a cache's layers are those of the model and hold all that the next token can see.

    Raises:
        IdentityError: they are not; the layer is named.
    """
    if len(layers) != len(shapes):
        raise _mismatch("layers", len(layers), len(shapes))
    for number, (layer, shape) in enumerate(zip(layers, shapes, strict=True)):
        stored = {name: (spec.heads, spec.head_dim) for name, spec in layer.tensors.items()}
        if (layer.kind, layer.window) != (shape.kind, shape.window):
            raise _mismatch(f"layers[{number}].kind", (layer.kind, layer.window), (shape.kind, shape.window))
        if stored != shape.tensors:
            raise _mismatch(f"layers[{number}].tensors", stored, shape.tensors)
        first = 0 if shape.window is None else max(0, layer.stop - shape.window + 1)
        if layer.start > first:
            raise _mismatch(f"layers[{number}].start", layer.start, first)


def _mismatch(field: str, cache: object, model: object) -> IdentityError:
    return IdentityError(
        f"the cache does not fit the model: {field} is {cache} in the cache, {model} in the model",
        field=field,
        hint="use the model that the cache was made with",
    )
