"""A transformers `Cache` for several sequences of their own lengths, decoded together.

All rows write a step's keys and values to the same slots, so nothing is ever moved or concatenated. Rows differ in
which slots count: stored positions they have, tokens that were padding, draft tokens that did not pass. Positions are
counted per row, by the slots that count.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from lynxkv.errors import InputError, UnsupportedModelError
from lynxkv.integrations.hf.cache import check_layers
from lynxkv.layout import LayerSpec, TensorName
from lynxkv.models import LayerShape


class BatchLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """K and V of all rows in buffers [B, H, slots, D], of which the first `length` are written."""

    def __init__(
        self, shape: LayerShape, rows: int, stored: int, slots: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.length = stored
        # Zeros: what does not count has no weight, and no weight times not-a-number would still be not a number.
        self.buffers: dict[TensorName, Tensor] = {
            name: torch.zeros(rows, heads, slots, dim, dtype=dtype, device=device)
            for name, (heads, dim) in shape.tensors.items()
        }
        self.keys: Tensor = self.buffers["k"]
        self.values: Tensor = self.buffers["v"]
        self.is_initialized = True

    def drop_row(self, row: int) -> None:
        """Forget a row; the last one takes its place."""
        for name, buffer in self.buffers.items():
            buffer[row, :, : self.length] = buffer[-1, :, : self.length]
            self.buffers[name] = buffer[:-1]
        self.keys, self.values = self.buffers["k"], self.buffers["v"]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: buffers exist from the start."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write [B, H, Q, D] to the next slots and return all that are written, as views."""
        stop = self.length + key_states.shape[-2]
        self.keys[:, :, self.length : stop].copy_(key_states)
        self.values[:, :, self.length : stop].copy_(value_states)
        self.length = stop
        return self.keys[:, :, :stop], self.values[:, :, :stop]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(slots returned by the next `update`, the first of them)."""
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        """Slots written."""
        return self.length

    def get_max_length(self) -> int:
        """Slots in all."""
        return int(self.keys.shape[2])


class BatchCache(Cache):
    """The live cache of several sequences. Rows are filled through `row(number).target`, as a `Destination`."""

    layers: list[BatchLayer]  # type: ignore[assignment]

    @classmethod
    def allocate(cls, model: Any, stored: Sequence[Sequence[LayerSpec]], new_slots: int) -> BatchCache:
        """Buffers for rows that store what `stored` says of their layers, and `new_slots` more tokens each.

        Raises:
            UnsupportedModelError: the model has sliding-window layers.
            IdentityError: layers are not those of the model.
        """
        shapes = model.layer_specs()
        if any(shape.window is not None for shape in shapes):
            raise UnsupportedModelError(
                "batches do not go with sliding-window layers yet", hint="decode one prompt at a time"
            )
        for layers in stored:
            check_layers(layers, shapes)
        longest = max(layers[0].stop for layers in stored)
        built: list[Any] = [
            BatchLayer(shape, len(stored), longest, longest + new_slots, model.hf.dtype, model.hf.device)
            for shape in shapes
        ]
        cache = cls(layers=built)
        cache.stored = longest
        cache.counts = torch.zeros(len(stored), longest + new_slots, dtype=torch.bool, device=model.hf.device)
        for row, layers in enumerate(stored):
            cache.counts[row, : layers[0].stop] = True
        return cache

    stored: int
    """Slots for stored positions: as many as the longest row has."""
    counts: Tensor
    """bool [B, slots]: whether a slot holds a token of the row's sequence."""

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.nbytes for layer in self.layers for buffer in layer.buffers.values())

    @property
    def length(self) -> int:
        """Slots written."""
        return self.layers[0].length

    def row(self, number: int) -> BatchRow:
        """One row, to be decoded into."""
        return BatchRow(self, number)

    def copy_stored(self, source: int, rows: Sequence[int], layer: int, tensor: TensorName, tokens: slice) -> None:
        """Give stored positions of one row to others that share its cache."""
        buffer = self.layers[layer].buffers[tensor]
        for row in rows:
            buffer[row, :, tokens] = buffer[source, :, tokens]

    def forget_stored(self, row: int, position: int) -> None:
        """Let a row's stored positions from `position` on not count: the model will run them again."""
        self.counts[row, position : self.stored] = False

    def forget_last(self, row: int, tokens: int) -> None:
        """Let a row's last `tokens` tokens not count: they did not pass."""
        self.counts[row, self.length - tokens : self.length] = False

    def drop_row(self, row: int) -> None:
        """Forget a row; the last one takes its place."""
        for layer in self.layers:
            layer.drop_row(row)
        self.counts[row] = self.counts[-1]
        self.counts = self.counts[:-1]

    def rollback(self, slots: int) -> None:
        """Forget all slots from `slots` on.

        Raises:
            InputError: fewer than the stored ones would be left.
        """
        if not self.stored <= slots <= self.length:
            raise InputError(f"the cache has {self.stored} to {self.length} slots and cannot go back to {slots}")
        self.counts[:, slots:] = False
        for layer in self.layers:
            layer.length = slots

    def step_inputs(self, present: Tensor) -> tuple[Tensor, Tensor]:
        """For a step on tokens of which `present` [B, Q] are not padding: their positions [B, Q], and the additive
        attention mask [B, 1, Q, slots]. From then on they count.

        Raises:
            InputError: there is no room for them.
        """
        queries, before = present.shape[1], self.length
        stop = before + queries
        if stop > self.counts.shape[1]:
            raise InputError(f"the cache has room for {self.counts.shape[1] - before} more tokens, not {queries}")
        self.counts[:, before:stop] = present
        positions = (self.counts[:, :stop].cumsum(1) - 1)[:, before:].clamp(min=0)
        slot = torch.arange(stop, device=present.device)
        visible = self.counts[:, None, :stop] & (slot <= slot[before:, None])
        # Padding sees itself, so that its softmax is one of something.
        visible |= slot == slot[before:, None]
        dtype = self.layers[0].keys.dtype
        mask = torch.zeros(visible.shape, dtype=dtype, device=present.device)
        return positions, mask.masked_fill_(~visible, torch.finfo(dtype).min)[:, None]


class BatchRow:
    """One row of a `BatchCache` as a `Destination`."""

    def __init__(self, cache: BatchCache, number: int) -> None:
        self._cache, self._number = cache, number

    def target(self, layer: int, tensor: TensorName) -> Tensor:
        """The view [H, tokens, D] of the stored positions; longer than those of a shorter row."""
        place = self._cache.layers[layer]
        return place.buffers[tensor][self._number, :, : self._cache.stored]
