"""Segments taken as they arrive, layer by layer: a model step can start on the first layers of a cache."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence

from lynxkv.fetch import SegmentPayload, SegmentStream
from lynxkv.format.index import Segment


class Arriving:
    """Hands segments on in file order, as far as somebody waits for them.

    Attributes:
        waited_s: seconds that this has taken, decoding included.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        stream: SegmentStream,
        take: Callable[[SegmentStream, SegmentPayload], None],
    ) -> None:
        self._stream, self._take, self._arrived = stream, take, iter(stream)
        self._left = Counter(segment.plan.tensor.layer for segment in segments if segment.plan.tensor is not None)
        self.waited_s = 0.0

    def wait_for_layer(self, layer: int) -> None:
        """Take segments until none of this layer is missing."""
        began = time.perf_counter()
        while self._left[layer]:
            self._take_next(next(self._arrived))
        self.waited_s += time.perf_counter() - began

    def wait_for_all(self) -> None:
        """Take what is left."""
        for payload in self._arrived:
            self._take_next(payload)

    def _take_next(self, payload: SegmentPayload) -> None:
        self._take(self._stream, payload)
        if payload.segment.plan.tensor is not None:
            self._left[payload.segment.plan.tensor.layer] -= 1
