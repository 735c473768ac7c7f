"""How a cache is fetched: what may be tuned, and the values that measurement has chosen."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import get_args

from lynxkv.choices import CONCURRENCY, ResidualPolicy
from lynxkv.errors import InputError
from lynxkv.store import Url
from lynxkv.store.transport import TransportChoice

# A range holds neighbouring segments of about so many bytes. Smaller ones cost requests, a server's time above all; but
# all that are in flight at the end arrive together and are decoded when the link is idle, so the last ones are smaller.
RANGE_BYTES = 4 << 20
LAST_RANGE_BYTES = 2 << 20
# Segments of a range are checked and handed on when so many bytes of them are in, while the others arrive.
GROUP_BYTES = 256 << 10
# Pieces that are asked for when a remote cache is opened, before its layout is known. They keep link and server busy
# for the round trip, and the reading of the header, that pass until the first segments can be asked for; on a link of
# 200 Mbit/s and 20 ms half a megabyte does. Of one cache much is asked for: servers take their time for the first byte
# of an answer, however short. Of several that are loaded as one, or wait to be loaded, each takes memory.
FRONT_EDGES = (0, 1 << 20, 9 << 19, 8 << 20)
SPAN_EDGES = (0, 512 << 10)
# Where all of an Anchor is wanted at once, and it continues no other, its header tells its size, and the rest is asked
# for then, up to this byte.
FRONT_STOP = 24 << 20
# So many bytes are on their way at a time, and twice as many once so many have come within so many seconds: requests
# share a link, and what decoding waits for comes the later the more there are. At 200 Mbit/s and 20 ms, with 24 MiB on
# their way, the second of six ranges was there when all were, and an Anchor of 35 MB took a tenth longer.
IN_FLIGHT_BYTES = 12 << 20
IN_FLIGHT_S = 0.25
# What is asked for again when it fails.
MAX_REQUEST_BYTES = 4 << 20
# Bytes between two segments that are fetched though nobody wants them, where a request more would take longer: at
# 200 Mbit/s, 20 ms and 8 requests at a time one takes as long as 60 KiB.
GAP_BYTES = 32 << 10
# Memory that segments may take which were asked for and not handed out yet.
WINDOW_BYTES = 24 << 20
CACHE_MAX_BYTES = 16 << 30


@dataclass(frozen=True, kw_only=True)
class FetchOptions:
    """How a cache is fetched.

    Args:
        transport: "fsspec", "obstore", an object that reads ranges itself, or a function that makes one for each cache
            of a chain. "auto" is obstore for S3, where that is installed and s3fs has no settings that it does not
            know, and fsspec for all else.
        concurrency: requests in flight.
        stall_s: a request that brings no bytes for so long is given up and tried again.
        request_timeout_s: so is one that takes longer than this; what it brought is kept.
        deadline_s: no fetching goes on longer than this after opening; None: no such limit.
        attempts: requests in a row that bring nothing before a range is given up.
        residual_url: the folder or prefix that holds the Residual, if it is not beside the Anchor. Nothing in a cache
            names such a place: only who reads it does.
        if_residual_unavailable: "error", or "anchor-only": what is loaded then has the Anchor's precision and says so.
            A Residual that is damaged or belongs to another encode is an error always.
        dscp: mark packets, so that a network that heeds it takes those of Anchors before those of Residuals, other
            readers' too: AF21 and LE. Not with obstore, which has no way to; "auto" does not take it then.
        follow_s: who follows a chain that is being written gives up when nothing new has come for so long.
        cache_dir: a folder of this machine's disk that keeps what is fetched from other machines, and is read instead
            the next time. Opening still asks the store for the Anchor's head, and notices whether it was replaced.
        cache_max_bytes: what that folder may take; what was used least lately is dropped.
    """

    transport: TransportChoice = "auto"
    concurrency: int = CONCURRENCY
    stall_s: float = 10.0
    request_timeout_s: float = 60.0
    deadline_s: float | None = None
    attempts: int = 4
    residual_url: Url | None = None
    if_residual_unavailable: ResidualPolicy = "error"
    dscp: bool = False
    follow_s: float = 300.0
    cache_dir: str | os.PathLike[str] | None = None
    cache_max_bytes: int = CACHE_MAX_BYTES

    def __post_init__(self) -> None:
        if not 1 <= self.concurrency <= 256:
            raise InputError(f"concurrency is {self.concurrency}", hint="use 1 to 256 requests at a time")
        if self.attempts < 1:
            raise InputError(f"attempts is {self.attempts}", hint="use at least 1")
        if self.if_residual_unavailable not in get_args(ResidualPolicy):
            raise InputError(
                f"if_residual_unavailable is {self.if_residual_unavailable!r}", hint="use error or anchor-only"
            )
        if self.cache_max_bytes < 1:
            raise InputError(f"cache_max_bytes is {self.cache_max_bytes}", hint="give bytes above 0")
        limits = (
            self.stall_s,
            self.request_timeout_s,
            self.follow_s,
            1.0 if self.deadline_s is None else self.deadline_s,
        )
        if not all(seconds > 0 for seconds in limits):
            raise InputError("a time limit is not positive", hint="time limits are seconds above 0")
