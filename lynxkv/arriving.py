"""A cache on its way into a live one: decoded as it arrives, waited for by layer, so that a model step can start early.

The Anchor comes layer by layer, and so do the values of the Residual, after all keys. A step that asks for its layer
just before reading it runs while later layers are still on the wire.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence

from lynxkv.decoder import CacheDecoder, Destination
from lynxkv.events import AnchorProgress, Event, ResidualProgress, Span, Track
from lynxkv.fetch import CacheReader, SegmentPayload, SegmentStream, SpanReader
from lynxkv.fetch.waiting import wait_for_one
from lynxkv.layout import Extent, Precision

STAGES: tuple[Precision, ...] = ("anchor", "full", "exact")


class ArrivingCache:
    """Fetches a cache up to the precision `aim`, and decodes it into `cache`, in the thread that waits for it.

    Args:
        straight: nobody looks at the cache before it has the aim, so lower precisions are not decoded.
        hold: the Residual is asked for only when somebody waits for it or calls `start_residual`.
        swap: called before and after the Residual changes the cache, and once when the Anchor is complete.
        on_written: told of segments after they have been decoded.
        on_event: told of progress and spans.

    Attributes:
        complete_s: when each precision was reached, in seconds since the cache was opened.
        waited_s: seconds spent in waiting for layers, decoding included.
    """

    def __init__(
        self,
        reader: CacheReader,
        cache: Destination,
        aim: Precision,
        *,
        straight: bool,
        hold: bool = False,
        swap: Callable[[], None] = lambda: None,
        on_written: Callable[[Sequence[SegmentPayload]], None] = lambda payloads: None,
        on_event: Callable[[Event], None] = lambda event: None,
    ) -> None:
        self._reader, self._swap, self._on_written, self._on_event = reader, swap, on_written, on_event
        self._hold = hold
        extent, spans = self._loaded()
        self._aim: Precision = aim if extent.has_residual else "anchor"
        self._decoder = CacheDecoder(
            extent,
            cache,
            skip_anchor=straight and self._aim != "anchor",
            refines=self._aim != "anchor",
            bases=[span.basis() for span in spans],
        )
        self._missing: dict[Precision, Counter[int]] = {stage: Counter() for stage in STAGES}
        self._has: dict[Precision, bool] = dict.fromkeys(STAGES, False)
        self._known_spans = 0
        self._grow()
        self._started_at = time.perf_counter()
        self._anchor: SegmentStream | None = None
        self._residual: SegmentStream | None = None
        self._residual_s = 0.0
        self._batch_bytes = 0
        self.complete_s: dict[Precision, float] = {}
        self.waited_s = 0.0

    @property
    def bytes_total(self) -> int:
        """Of all that leads to the aim."""
        return sum(self._stage_bytes(stage) for stage in STAGES[: STAGES.index(self._aim) + 1])

    @property
    def bytes_done(self) -> int:
        """Of what has been decoded."""
        if self._residual is not None:
            return self._reader.bytes_anchor + self._residual.bytes_done
        return self._anchor.bytes_done if self._anchor is not None else 0

    @property
    def bytes_in_flight(self) -> int:
        """Memory of what has been asked for or is being decoded."""
        streams = [stream for stream in (self._anchor, self._residual) if stream is not None]
        return self._batch_bytes + sum(stream.bytes_in_flight for stream in streams)

    @property
    def bytes_codes(self) -> int:
        """Memory of anchor codes kept for refining."""
        return self._decoder.resident_bytes

    def has(self, precision: Precision) -> bool:
        """Whether the cache stores anything of its own for this precision."""
        return self._has[precision]

    def complete(self, precision: Precision) -> bool:
        """Whether every element holds at least `precision`, or the best the cache has."""
        return self._anchor is not None and self._anchor.done and self._decoder.complete(precision)

    def left_s(self, precision: Precision) -> tuple[float, float]:
        """Estimates, at the speed so far: seconds until `precision`, and how much of that its last tensors take."""
        stages = STAGES[: STAGES.index(precision) + 1]
        left = max(0, sum(map(self._stage_bytes, stages)) - self.bytes_done)
        tail = min(left, self._stage_bytes(precision) // 2)  # values come after all keys
        per_byte = (time.perf_counter() - self._started_at) / max(1, self.bytes_done)
        return left * per_byte, tail * per_byte

    def start(self) -> None:
        """Start to fetch the Anchor."""
        if self._anchor is None:
            growing = self._reader.is_growing
            self._anchor = self._reader.stream_anchor()
            if growing and not self._hold:  # while the next span is computed the link is free
                self.start_residual()

    def start_residual(self) -> None:
        """Start to fetch the Residual, if it is wanted."""
        if self._residual is None and self._aim != "anchor":
            self._residual_s = self._now()
            self._residual = self._reader.start_residual(exact=self._aim == "exact")

    def take_ready(self) -> None:
        """Decode what of the Residual has arrived, without waiting."""
        if self._residual is not None:
            self._refine(self._residual.ready())

    def wait_for_layer(self, precision: Precision, layer: int) -> None:
        """Decode what arrives until this layer has `precision`, or the best the cache has of it."""
        began = time.perf_counter()
        for stage in STAGES[: STAGES.index(precision) + 1]:
            while self._lacks(stage, layer):
                self._take_next()
        self.waited_s += time.perf_counter() - began

    def wait_for(self, precision: Precision) -> None:
        """Decode what arrives until every element has `precision`, or the best the cache has."""
        while not self.complete(precision):
            self._take_next()

    def close(self) -> None:
        """Ask for nothing more."""
        for stream in (self._anchor, self._residual):
            if stream is not None:
                stream.close()

    def _take_next(self) -> None:
        self.start()
        assert self._anchor is not None
        if not self._anchor.done:
            # Until the next span is written there is time for the Residuals of those that are there.
            early = self._residual if self._anchor.waits_for_more else None
            if early is not None and not _comes_first(self._anchor, early):
                self._refine(early.ready())
                return
            payloads = self._anchor.wait()
            self._decode(payloads + self._anchor.ready())
            return
        self.start_residual()
        assert self._residual is not None
        assert not self._residual.done
        payloads = self._residual.wait()
        self._refine(payloads + self._residual.ready())

    def _lacks(self, stage: Precision, layer: int) -> bool:
        growing = self._reader.is_growing  # asked first: what has come since is counted below
        self._grow()
        return growing or self._missing[stage][layer] > 0

    def _loaded(self) -> tuple[Extent, tuple[SpanReader, ...]]:
        """What is there, as an extent and as its spans; to a chain that is being written more may come at any time."""
        extent = self._reader.extent
        return extent, self._reader.spans[: len(extent.spans)]

    def _grow(self) -> None:
        """Take in the spans that have come to a chain which is still being written."""
        if len(self._reader.spans) == self._known_spans:
            return
        extent, spans = self._loaded()
        for span in spans[self._known_spans :]:
            tensors = [segment.plan.tensor for segment in span.anchor_segments()]
            self._missing["anchor"].update(tensor.layer for tensor in tensors if tensor is not None)
            for ref in span.header.tensors:
                count = sum(1 for _ in span.part.segments(ref))
                self._missing["full"][ref.layer] += count if ref.coding.has_residual else 0
                self._missing["exact"][ref.layer] += count if ref.coding.exact else 0
            for stage in STAGES:
                self._has[stage] |= bool(+self._missing[stage])
        self._decoder.grow(extent, [span.basis() for span in spans])
        self._known_spans = len(spans)

    def _decode(self, payloads: list[SegmentPayload]) -> None:
        assert self._anchor is not None
        self._grow()
        if self._anchor.done and not self._hold:  # the link is free: ask for the Residual before anything is decoded
            self.start_residual()
        began, self._batch_bytes = self._now(), sum(payload.raw.nbytes for payload in payloads)
        self._decoder.anchor_all(payloads)
        self._on_written(payloads)
        self._count("anchor", payloads)
        self._span("decode", began, sum(payload.segment.stored_bytes for payload in payloads))
        total = self._reader.bytes_anchor
        self._on_event(AnchorProgress(total if self._anchor.done else self._anchor.bytes_done, total))
        self._batch_bytes = 0
        if self._anchor.done:
            self._span("fetch", 0.0, total)
            self._reach("anchor")
            self._swap()
            self._reach_higher()

    def _refine(self, payloads: list[SegmentPayload]) -> None:
        if not payloads:
            return
        assert self._residual is not None
        self._swap()
        began, self._batch_bytes = self._now(), sum(payload.raw.nbytes for payload in payloads)
        self._decoder.refine_all(payloads)
        self._on_written(payloads)
        self._count("exact", [payload for payload in payloads if payload.segment.plan.part == "exact"])
        self._count("full", [payload for payload in payloads if payload.segment.plan.part != "exact"])
        self._span("refine", began, sum(payload.segment.stored_bytes for payload in payloads))
        self._swap()
        total = self.bytes_total - self._reader.bytes_anchor
        self._on_event(ResidualProgress(total if self._residual.done else self._residual.bytes_done, total))
        self._batch_bytes = 0
        self._reach_higher()
        if self._residual.done:
            self._span("fetch", self._residual_s, total)

    def _reach_higher(self) -> None:
        for precision in STAGES[1:]:
            if self.has(precision) and self.complete(precision):
                self._reach(precision)

    def _reach(self, precision: Precision) -> None:
        self.complete_s.setdefault(precision, self._now())
        if precision == self._aim:
            self._decoder.release()

    def _count(self, stage: Precision, payloads: list[SegmentPayload]) -> None:
        for payload in payloads:
            if payload.segment.plan.tensor is not None:
                self._missing[stage][payload.segment.plan.tensor.layer] -= 1

    def _stage_bytes(self, stage: Precision) -> int:
        return {
            "anchor": self._reader.bytes_anchor,
            "full": self._reader.bytes_residual,
            "exact": self._reader.bytes_exact,
        }[stage]

    def _span(self, track: Track, began_s: float, amount: int) -> None:
        self._on_event(Span(track, began_s, self._now(), amount))

    def _now(self) -> float:
        return time.perf_counter() - self._reader.opened_at


def _comes_first(anchor: SegmentStream, residual: SegmentStream) -> bool:
    """Wait for whichever has something next, and say whether it is `anchor`, which has precedence."""
    pending = [stream.pending for stream in (anchor, residual) if stream.pending is not None]
    wait_for_one(pending)
    return anchor.pending is None or anchor.pending.done()
