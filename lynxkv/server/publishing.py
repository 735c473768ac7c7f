"""Prompts that no cache held, encoded and published while others are answered."""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import numpy as np

from lynxkv.encoder import encode
from lynxkv.errors import CacheExistsError, LynxError
from lynxkv.kv import KV, KVLayer
from lynxkv.layout import PREFIX_BLOCK_TOKENS, Identity
from lynxkv.prefix import prefix_digests
from lynxkv.server.admission import Memory
from lynxkv.server.catalog import Catalog, Entry
from lynxkv.server.names import cache_url
from lynxkv.store import SUFFIX

LOG = logging.getLogger("lynxkv.server")
FOLDER = "auto"
Outcome = Literal["published", "there_already", "busy", "failed"]


def whole_blocks(tokens: int) -> int:
    """How many first tokens of a prompt are published: whole blocks, and never the last token."""
    return (tokens - 1) // PREFIX_BLOCK_TOKENS * PREFIX_BLOCK_TOKENS


class Publisher:
    """Encodes one prompt at a time, on a thread of its own; what comes meanwhile is not published.

    Attributes:
        held_bytes: of the keys and values that are being encoded.
    """

    def __init__(self, catalog: Catalog, memory: Memory, told: Callable[[Outcome], None]) -> None:
        self._catalog, self._memory, self._told = catalog, memory, told
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="lynxkv-publish")
        self._busy = threading.Lock()
        self.held_bytes = 0

    def offer(self, kv: KV, identity: Identity) -> None:
        """Publish a copy of `kv` in the background, if nothing else is being published and there is memory for it."""
        size = sum(tensor.nbytes for layer in kv.layers for tensor in layer.tensors.values())
        if not self._memory.fits(size) or not self._busy.acquire(blocking=False):
            self._told("busy")
            return
        self._memory.hold(size)
        self.held_bytes = size
        copied = KV(
            layers=[
                KVLayer(
                    tensors={name: tensor.clone() for name, tensor in layer.tensors.items()},
                    start=layer.start,
                    stop=layer.stop,
                    kind=layer.kind,
                    window=layer.window,
                )
                for layer in kv.layers
            ],
            start=kv.start,
            stop=kv.stop,
            token_ids=kv.token_ids,
        )
        self._pool.submit(self._publish, copied, identity, size)

    def close(self) -> None:
        """Wait for what is being published."""
        self._pool.shutdown()

    def _publish(self, kv: KV, identity: Identity, size: int) -> None:
        try:
            self._told(self._encode(kv, identity))
        except LynxError as error:
            LOG.warning("a prompt could not be published: %s", error.message)
            self._told("failed")
        finally:
            self.held_bytes = 0
            self._busy.release()
            self._memory.free(size)

    def _encode(self, kv: KV, identity: Identity) -> Outcome:
        ids = np.asarray(kv.token_ids, "<u4")
        digest = prefix_digests(ids, identity)[-1].tobytes()
        name = f"{FOLDER}/{digest.hex()}{SUFFIX}"
        url = cache_url(self._catalog.root, name)
        outcome: Outcome = "published"
        try:
            encode(kv, url, identity=identity)
        except CacheExistsError:
            outcome = "there_already"
        self._catalog.add(
            Entry(
                name=name,
                url=url,
                tokens=len(ids),
                parts=((0, len(ids), hashlib.sha256(ids.tobytes()).hexdigest()),),
                digest=digest,
                identity=identity,
                stamp=None,
            )
        )
        return outcome
