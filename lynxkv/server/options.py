"""What a server may be told: where it listens, and its limits."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import get_args

from lynxkv.choices import CONCURRENCY, OnFailure
from lynxkv.errors import InputError
from lynxkv.fetch.options import CACHE_MAX_BYTES
from lynxkv.store import Url

_NO_LIMITS = ("host", "port", "hot_bytes", "residual_url", "cache_dir", "publish", "on_failure")


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Where a server listens, and its limits.

    Args:
        host: loopback by default: nobody else can connect.
        port: 0 takes a free one.
        queue: requests that may run and wait together; more are answered 503.
        batch: so many requests are decoded together at most.
        runs: so many runs, of one request or several, compute in turns; those that wait for a store do not count.
        deadline_s: a request that takes longer, waiting included, is given up.
        drain_s: how long running requests may still take when the server is asked to stop.
        memory_bytes: of all runs' live caches and what belongs to them; model weights are left out.
        hot_bytes: of caches kept in memory as they are stored; those of local stores are the system's to keep.
        concurrency: requests to the store in flight, a run.
        residual_url: the folder or prefix that holds the Residuals of all caches, if they are not beside the Anchors.
        cache_dir: a folder of this machine's disk for caches of remote stores; see `FetchOptions`.
        cache_max_bytes: what that folder may take.
        refresh_s: how often the store is listed.
        publish: encode and publish prompts that no cache held.
        on_failure: when the cache that a request names cannot be loaded: "error", or "recompute" its prompt.
        max_body_bytes: of a request.
        max_prompt_tokens: of a request's own text, cached tokens left out.
        max_new_tokens: of an answer.

    Raises:
        InputError: a limit is out of range.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    queue: int = 64
    batch: int = 8
    runs: int = 4
    deadline_s: float = 300.0
    drain_s: float = 30.0
    memory_bytes: int = 4 << 30
    hot_bytes: int = 1 << 30
    concurrency: int = CONCURRENCY
    residual_url: Url | None = None
    cache_dir: Path | None = None
    cache_max_bytes: int = CACHE_MAX_BYTES
    refresh_s: float = 30.0
    publish: bool = False
    on_failure: OnFailure = "error"
    max_body_bytes: int = 4 << 20
    max_prompt_tokens: int = 32_768
    max_new_tokens: int = 2_048

    def __post_init__(self) -> None:
        if not 0 <= self.port < 1 << 16:
            raise InputError(f"port is {self.port}", hint="use 0 to 65535; 0 takes a free one")
        if self.on_failure not in get_args(OnFailure):
            raise InputError(f"on_failure is {self.on_failure!r}", hint="use error or recompute")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name not in _NO_LIMITS and not value > 0:
                raise InputError(f"{field.name} is {value}", hint="limits are above 0")
