"""What may enter: how many requests at a time, and runs of what size."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from lynxkv.draft import DRAFT_BYTES
from lynxkv.fetch.options import SPAN_EDGES, WINDOW_BYTES
from lynxkv.models import CHUNK_TOKENS, DecoderModel
from lynxkv.server.problems import Refusal

RETRY_AFTER_S = 1
# What is asked for ahead of a cache that is opened, and its copy in a reading that may be kept.
OPENED_BYTES = 2 * SPAN_EDGES[-1]
# Of booleans that a mask is made from, at a time.
BOOLEANS = 4
MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")
# glibc keeps what is freed: each of its arenas, of which every few threads have one, as much as a run has ever taken.
_trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None


class Places:
    """Places of a bounded queue. Among several owners, none may take more than half of them.

    Used on one event loop, so that nothing needs a lock.
    """

    def __init__(self, places: int, *, shared: bool) -> None:
        self._places = places
        self._most = max(1, places // 2) if shared else places
        self._taken: Counter[str] = Counter()
        self.closed = False

    @property
    def taken(self) -> int:
        """Requests that run or wait."""
        return self._taken.total()

    @contextmanager
    def take(self, owner: str) -> Iterator[None]:
        """A place for one request.

        Raises:
            Refusal: there is none, or the server is stopping.
        """
        if self.closed:
            raise _busy("the server is stopping")
        if self.taken >= self._places or self._taken[owner] >= self._most:
            raise _busy("too many requests wait already")
        self._taken[owner] += 1
        try:
            yield
        finally:
            self._taken[owner] -= 1
            self._taken += Counter()  # forgets owners without requests


class Memory:
    """What runs hold beside the weights, by upper estimates made before they start.

    Attributes:
        held: bytes, now.
        on_more: called, by any thread, when some have been freed.
    """

    def __init__(self, limit: int) -> None:
        self._limit, self._lock = limit, threading.Lock()
        self.held = 0
        self.on_more: Callable[[], None] = lambda: None

    def fits(self, size: int) -> bool:
        """Whether so many bytes are free of what runs may hold."""
        return self.held + size <= self._limit

    def hold(self, size: int) -> None:
        """Hold bytes that fit."""
        with self._lock:
            self.held += size

    def free(self, size: int) -> None:
        """Give bytes back, to the system as well."""
        if _trim is not None:
            _trim(0)
        with self._lock:
            self.held -= size
        self.on_more()

    def check(self, needed: int) -> None:
        """Let a request enter.

        Raises:
            Refusal: it would not fit at any time, or the machine has not the memory now.
        """
        if needed > self._limit:
            raise Refusal(
                f"prompt and answer would take {needed >> 20} MiB of the {self._limit >> 20} MiB that a run may use",
                code="context_length_exceeded",
                hint="use a shorter prompt, or ask for fewer tokens",
            )
        free = free_bytes()
        if free is not None and needed > free:
            raise _busy("the machine has too little memory free")


class Sizes:
    """What runs of a model take."""

    def __init__(self, model: DecoderModel) -> None:
        self._token_bytes = model.new_cache(0, 1, rollback_tokens=1).nbytes
        self._logits_bytes = 4 * model.vocab_tokens
        shapes = model.layer_specs()
        elements = sum(heads * dim for shape in shapes for heads, dim in shape.tensors.values())
        # Of a query and a slot: there is a mask for layers of each window.
        self._mask_bytes = len({shape.window for shape in shapes}) * (self._token_bytes // elements) + BOOLEANS

    def run_bytes(
        self,
        stored: Sequence[int],
        suffixes: Sequence[int],
        new_tokens: int,
        *,
        caches: Sequence[int],
        opened: int = 0,
        written: int = 0,
    ) -> int:
        """An upper estimate of what a run holds: live cache, anchor codes, what is read, masks, logits.

        Args:
            stored, suffixes: tokens of each request that is run, cached ones and those after them.
            new_tokens: the most of an answer.
            caches: tokens of each cache that they are over.
            opened: caches that are open for them, those of a chain each.
            written: bytes of what is read that are written down, to be kept.
        """
        rows = len(stored)
        # Rows have as many slots as the longest would need, and draft tokens that do not pass keep theirs. Without a
        # suffix the last stored token is run again.
        slots = max(stored) + max(1, *suffixes) + (new_tokens if rows == 1 else 2 * new_tokens)
        drafted = min(new_tokens, DRAFT_BYTES // (3 * self._logits_bytes * rows))
        queries = min(max(1, *suffixes), CHUNK_TOKENS) + drafted
        logits = 3 * self._logits_bytes * drafted * rows
        # Codes take a byte an element, which is no more than the element itself does.
        tokens = rows * slots + sum(caches)
        masks = rows * queries * slots * self._mask_bytes
        read = len(caches) * WINDOW_BYTES + opened * OPENED_BYTES + written
        return self._token_bytes * tokens + read + masks + logits


def free_bytes() -> int | None:
    """Memory that this machine, or the container that this process is confined to, could still give; None if unknown.

    What the system keeps of files it gives when it is asked.
    """
    found = []
    lines = dict(line.split(":", 1) for line in _text(MEMINFO).splitlines())
    if "MemAvailable" in lines:
        found.append(int(lines["MemAvailable"].split()[0]) << 10)
    limit, used = _text(CGROUP / "memory.max").strip(), _text(CGROUP / "memory.current").strip()
    if limit.isdecimal() and used.isdecimal():
        pages = dict(line.split() for line in _text(CGROUP / "memory.stat").splitlines())
        found.append(int(limit) - int(used) + int(pages.get("inactive_file", 0)))
    return min(found, default=None)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _busy(message: str) -> Refusal:
    return Refusal(message, status=503, code="overloaded", retry_after_s=RETRY_AFTER_S)
