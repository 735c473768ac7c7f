"""From a store to checked segments: requests of our own schedule, the Anchor before the Residual."""

from lynxkv.fetch.options import FetchOptions
from lynxkv.fetch.reader import CacheReader, closing_after, open_cache, open_cache_async
from lynxkv.fetch.span import SpanReader
from lynxkv.fetch.stream import SegmentPayload, SegmentStream

__all__ = [
    "CacheReader",
    "FetchOptions",
    "SegmentPayload",
    "SegmentStream",
    "SpanReader",
    "closing_after",
    "open_cache",
    "open_cache_async",
]
