"""A stored cache whose tokens are the first of a prompt: what encoding that prompt can continue."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lynxkv.codecs import Codec
from lynxkv.continuing import check_chainable
from lynxkv.errors import FormatError, IdentityError, StoreError, UnsupportedModelError
from lynxkv.fetch import CacheReader
from lynxkv.format.basis import Basis
from lynxkv.format.document import is_sibling_name
from lynxkv.format.limits import MAX_PARENT_SPANS
from lynxkv.identity import check_identity
from lynxkv.layout import PREFIX_BLOCK_TOKENS, CacheHeader, Dtype, Identity
from lynxkv.manage import READERS
from lynxkv.prefix import prefix_digests
from lynxkv.store import Store

# Headers that are read at most, those of the last names.
MOST_SEARCHED = 1000
# Whoever loads a chain fetches segments whole, so that of a cache of which little is continued too much would be.
LEAST_SHARE = 7 / 8


@dataclass(frozen=True, kw_only=True)
class StoredPrefix:
    """A cache beside the one to be, of which the first `tokens` tokens are those of the prompt.

    `header_sha256` tells it from one that replaces it before it is loaded.
    """

    url: str
    tokens: int
    header_sha256: str


def longest_prefix(
    store: Store,
    token_ids: Sequence[int],
    identity: Identity,
    *,
    codec: Codec,
    basis: Basis | None = None,
    dtype: Dtype,
    exact: bool,
) -> StoredPrefix | None:
    """The cache beside `store` that holds most of the first tokens of a prompt, but not all of them; None without one.

    It must have been encoded for the same model, by the same codec, basis and dtype, hold exact values if these are
    wanted, have at least 256 tokens of the prompt, unless it is a span of this very cache, and hardly any other. Caches
    that cannot be read are passed over.
    """
    names = [name for name in store.try_siblings() if name != store.name and is_sibling_name(name)]
    ids = np.asarray(token_ids, "<u4")

    def suits(header: CacheHeader) -> bool:
        try:
            check_chainable(header)
            check_identity(header.identity, identity)
        except (UnsupportedModelError, IdentityError):
            return False
        before = header.parent.spans if header.parent is not None else ()
        return (
            (header.codec_name, header.codec_params, header.dtype) == (codec.name, codec.params(), dtype)
            and header.transform == (basis.ref if basis is not None else None)
            and (header.has_exact or not exact)
            and len(before) < MAX_PARENT_SPANS
            and all(span.name != store.name for span in before)
        )

    def held(name: str) -> StoredPrefix | None:
        """What it shares with the prompt from the first token on; None if it does not suit."""
        url = store.sibling(name)
        try:
            with CacheReader(url, header_only=True, alone=True) as reader:
                if not suits(reader.header):
                    return None
                tokens = _shared(reader, ids)
                # What an interrupted writer of this very chain has left counts, however short.
                left = reader.header.part_of is not None and reader.header.part_of.name == store.name
                if not tokens or (tokens < PREFIX_BLOCK_TOKENS and not left):
                    return None
                return StoredPrefix(url=url, tokens=tokens, header_sha256=reader.anchor_head.header_sha256)
        except (StoreError, FormatError):
            return None

    with ThreadPoolExecutor(READERS) as pool:
        found = [stored for stored in pool.map(held, names[-MOST_SEARCHED:]) if stored is not None]
    return max(found, key=lambda stored: stored.tokens, default=None)


def _shared(reader: CacheReader, ids: npt.NDArray[np.uint32]) -> int:
    """How many first tokens of `ids` a cache holds with those it continues; 0 if it is of no use for them."""
    header, digests = reader.header, reader.prefix_sha256()
    own = prefix_digests(ids, header.identity)
    if digests is not None and len(own) and not np.array_equal(own[0], digests[0]):
        return 0  # the most frequent case: no token ids are read for it
    start, stop = header.tokens.start, header.tokens.stop
    before = header.parent.tokens_sha256 if header.parent is not None else None
    if start >= len(ids) or (start and _sha256(ids[:start]) != before):
        return 0
    stored = reader.stored_token_ids()
    if stored is not None:
        compared = min(len(stored), len(ids) - start)
        other = np.flatnonzero(stored[:compared] != ids[start : start + compared])
        tokens = start + int(other[0] if len(other) else compared)
    else:
        tokens = stop if _sha256(ids[start:stop]) == header.tokens.sha256 else 0
    enough = tokens - start >= LEAST_SHARE * header.tokens.count
    return tokens if enough and tokens < len(ids) else 0


def _sha256(ids: npt.NDArray[np.uint32]) -> str:
    return hashlib.sha256(ids.tobytes()).hexdigest()
