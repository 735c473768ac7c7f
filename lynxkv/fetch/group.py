"""What of a range is checked at once and handed on together."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress

from lynxkv.errors import ChecksumError, TruncatedError
from lynxkv.fetch.disk_cache import ShardCopy
from lynxkv.fetch.stream import SegmentPayload
from lynxkv.format.index import ZSTD, Segment
from lynxkv.format.read import open_segment

Buffer = bytes | bytearray | memoryview

# Segments of up to so many bytes that were stored as they are do not keep the range in memory that brought them.
SMALL_BYTES = 32 << 10


class Group:
    """Neighbouring segments that are checked and handed on together; bytes [start, stop) of their object.

    Args:
        offset: where, in the object, their offsets count from.
        number: of their span.
        what: the object, for errors.
    """

    def __init__(self, segments: tuple[Segment, ...], offset: int, number: int, what: str) -> None:
        self.segments = segments
        self.start, self.stop = offset + segments[0].offset, offset + segments[-1].stop
        self.payloads: Future[list[SegmentPayload]] = Future()
        self._number, self._what = number, what

    def check(self, data: Buffer) -> None:
        """Hand on the segments in these bytes, if they are what the index says; on any thread.

        Raises:
            ChecksumError, TruncatedError, ContentError: they are not, and nobody has been told yet.
        """
        view, first = memoryview(data), self.segments[0].offset
        payloads = []
        for segment in self.segments:
            raw = open_segment(segment, view[segment.offset - first : segment.stop - first], what=self._what)
            if segment.compression != ZSTD and segment.stored_bytes <= SMALL_BYTES:
                raw = raw.copy()
            payloads.append(SegmentPayload(segment=segment, raw=raw, span=self._number))
        with suppress(InvalidStateError):  # the reader was closed meanwhile
            self.payloads.set_result(payloads)

    def check_copy(self, copy: ShardCopy) -> None:
        """The same for the bytes of a copy on disk."""
        self.check(copy.read(self.start, self.stop))

    def fail(self, error: BaseException) -> None:
        """Say why the segments do not come, unless they have."""
        if not self.payloads.done():
            with suppress(InvalidStateError):
                self.payloads.set_exception(error)


async def failed_of(groups: Iterable[Group], checks: Iterable[Future[None]]) -> list[Group]:
    """Wait for checks of the first so many groups: those whose bytes are not what they should be."""
    failed = []
    for group, check in zip(groups, checks, strict=False):
        try:
            if not check.done():
                await asyncio.wrap_future(check)
            check.result()
        except (ChecksumError, TruncatedError):
            failed.append(group)
    return failed
