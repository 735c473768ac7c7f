"""Prefix digests: what a store is searched by (SPEC 9.2)."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from lynxkv.layout import PREFIX_BLOCK_TOKENS, Identity


def prefix_digests(ids: npt.NDArray[np.uint32], identity: Identity) -> npt.NDArray[np.uint8]:
    """Chained digests [blocks, 32] of every whole block of 256 token ids (SPEC 9.2)."""
    seed = [identity.fingerprint or "", identity.adapter or "", identity.salt_sha256 or ""]
    digest = hashlib.sha256("\n".join(["lynxkv-prefix-1", *seed]).encode()).digest()
    out = []
    for start in range(0, len(ids) // PREFIX_BLOCK_TOKENS * PREFIX_BLOCK_TOKENS, PREFIX_BLOCK_TOKENS):
        block = ids[start : start + PREFIX_BLOCK_TOKENS].astype("<u4").tobytes()
        digest = hashlib.sha256(digest + block).digest()
        out.append(digest)
    return np.frombuffer(b"".join(out), np.uint8).reshape(-1, 32)
