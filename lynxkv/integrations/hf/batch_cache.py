"""A transformers `Cache` for several sequences of their own lengths, decoded together.

All rows write a step's keys and values to the same slots, so nothing is ever moved or concatenated. Stored positions of
all rows end at the same slot, so that the windows of sliding layers lie side by side and no slot is kept that none of
them reaches. Rows differ in which slots count: stored positions they have, tokens that were padding, draft tokens that
did not pass. Positions are counted per row, by the slots that count, and so are windows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from lynxkv.errors import InputError
from lynxkv.integrations.hf.cache import check_layers
from lynxkv.layout import LayerSpec, TensorName
from lynxkv.models import LayerShape

Masks = Tensor | dict[str, Tensor]
"""An additive attention mask [B, 1, Q, slots]; of each kind of layer, as transformers names them, if there are two."""


class BatchLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """K and V of all rows: slots [first, slots) in buffers [B, H, slots - first, D], written up to `length`.

    `seen` is the first slot that the next step looks at.
    """

    def __init__(
        self,
        shape: LayerShape,
        rows: int,
        *,
        first: int,
        stored: int,
        slots: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.window = shape.window
        self.is_sliding = shape.window is not None
        self.first = self.seen = first
        self.length = stored
        # Zeros: what does not count has no weight, and no weight times not-a-number would still be not a number.
        self.buffers: dict[TensorName, Tensor] = {
            name: torch.zeros(rows, heads, slots - first, dim, dtype=dtype, device=device)
            for name, (heads, dim) in shape.tensors.items()
        }
        self.keys: Tensor = self.buffers["k"]
        self.values: Tensor = self.buffers["v"]
        self.is_initialized = True

    def drop_row(self, row: int) -> None:
        """Forget a row; the last one takes its place."""
        for name, buffer in self.buffers.items():
            written = slice(self.length - self.first)
            buffer[row, :, written] = buffer[-1, :, written]
            self.buffers[name] = buffer[:-1]
        self.keys, self.values = self.buffers["k"], self.buffers["v"]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: buffers exist from the start."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write [B, H, Q, D] to the next slots and return those written from `seen` on, as views."""
        start, stop = self.length - self.first, self.length - self.first + key_states.shape[-2]
        self.keys[:, :, start:stop].copy_(key_states)
        self.values[:, :, start:stop].copy_(value_states)
        self.length += key_states.shape[-2]
        seen = slice(self.seen - self.first, stop)
        return self.keys[:, :, seen], self.values[:, :, seen]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(slots returned by the next `update`, the first of them)."""
        return self.length + query_length - self.seen, self.seen

    def get_seq_length(self) -> int:
        """Slots written, those not kept included."""
        return self.length

    def get_max_length(self) -> int:
        """Slots in all."""
        return self.first + int(self.keys.shape[2])


class BatchCache(Cache):
    """The live cache of several sequences. Rows are filled through `row(number).target`, as a `Destination`."""

    layers: list[BatchLayer]  # type: ignore[assignment]

    @classmethod
    def allocate(cls, model: Any, stored: Sequence[Sequence[LayerSpec]], new_slots: int) -> BatchCache:
        """Buffers for rows that store what `stored` says of their layers, and `new_slots` more tokens each.

        Raises:
            IdentityError: layers are not those of the model.
        """
        shapes = model.layer_specs()
        for layers in stored:
            check_layers(layers, shapes)
        longest = max(layers[0].stop for layers in stored)
        built: list[Any] = [
            BatchLayer(
                shape,
                len(stored),
                first=longest - max(layers[number].tokens for layers in stored),
                stored=longest,
                slots=longest + new_slots,
                dtype=model.hf.dtype,
                device=model.hf.device,
            )
            for number, shape in enumerate(shapes)
        ]
        cache = cls(layers=built)
        cache.stored = longest
        cache.rows = list(stored)
        cache.counts = torch.zeros(len(stored), longest + new_slots, dtype=torch.bool, device=model.hf.device)
        for row, layers in enumerate(stored):
            cache.counts[row, longest - layers[0].stop : longest] = True
        return cache

    stored: int
    """Slots for stored positions, as many as the longest row has: those of each row are the last."""
    rows: list[Sequence[LayerSpec]]
    """What each row stores."""
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
        """Give stored tokens of one row's layer to others that share its cache."""
        given = self.row(source).target(layer, tensor)[:, tokens]
        for row in rows:
            self.row(row).target(layer, tensor)[:, tokens] = given

    def forget_stored(self, row: int, position: int) -> None:
        """Let a row's stored positions from `position` on not count: the model will run them again.

        Raises:
            InputError: a sliding layer does not hold what the one at `position` sees.
        """
        for spec in self.rows[row]:
            if spec.window is not None and spec.start > max(0, position - spec.window + 1):
                raise InputError(
                    f"the cache holds positions [{spec.start}, {spec.stop}) and cannot go back to {position}",
                    hint="give a suffix",
                )
        self.counts[row, self.stored - self.rows[row][0].stop + position : self.stored] = False

    def forget_last(self, row: int, tokens: int) -> None:
        """Let a row's last `tokens` tokens not count: they did not pass."""
        self.counts[row, self.length - tokens : self.length] = False

    def drop_row(self, row: int) -> None:
        """Forget a row; the last one takes its place."""
        for layer in self.layers:
            layer.drop_row(row)
        self.rows[row] = self.rows[-1]
        self.rows.pop()
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

    def step_inputs(self, present: Tensor) -> tuple[Tensor, Masks]:
        """For a step on tokens of which `present` [B, Q] are not padding: their positions [B, Q], and the masks of what
        `update` returns. From then on they count.

        Raises:
            InputError: there is no room for them.
        """
        queries, before = present.shape[1], self.length
        stop = before + queries
        if stop > self.counts.shape[1]:
            raise InputError(f"the cache has room for {self.counts.shape[1] - before} more tokens, not {queries}")
        self.counts[:, before:stop] = present
        position = self.counts[:, :stop].cumsum(1) - 1
        slot = torch.arange(stop, device=present.device)
        own = slot[before:, None]
        # Padding sees itself alone, so that its softmax is one of something.
        visible = self.counts[:, None, :stop] & (slot <= own) & present[:, :, None] | (slot == own)
        masks: dict[str, Tensor] = {}
        for window in {layer.window for layer in self.layers}:
            if window is None:
                masks["full_attention"] = self._mask(visible)
                continue
            near = visible & (position[:, None] > position[:, before:, None] - window)
            seen = int(near.any(1).any(0).int().argmax())
            masks["sliding_attention"] = self._mask(near[:, :, seen:])
            for layer in self.layers:
                layer.seen = layer.seen if layer.window is None else seen
        return position[:, before:].clamp(min=0), masks if len(masks) > 1 else masks.popitem()[1]

    def _mask(self, visible: Tensor) -> Tensor:
        """The additive mask [B, 1, Q, slots] of what is `visible` [B, Q, slots]."""
        dtype = self.layers[0].keys.dtype
        mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
        return mask.masked_fill_(~visible, torch.finfo(dtype).min)[:, None]


class BatchRow:
    """One row of a `BatchCache` as a `Destination`."""

    def __init__(self, cache: BatchCache, number: int) -> None:
        self._cache, self._number = cache, number

    def target(self, layer: int, tensor: TensorName) -> Tensor:
        """The view [H, stop - start, D] of the stored positions that the row's layer holds."""
        place = self._cache.layers[layer]
        stop = self._cache.stored - place.first
        tokens = self._cache.rows[self._number][layer].tokens
        return place.buffers[tensor][self._number, :, stop - tokens : stop]
