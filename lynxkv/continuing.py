"""What a new cache continues: the caches of the positions before it, which are loaded with it as one (SPEC 9.4)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lynxkv.errors import InputError, UnsupportedModelError
from lynxkv.fetch import CacheReader
from lynxkv.format.document import is_sibling_name
from lynxkv.format.limits import MAX_PARENT_SPANS
from lynxkv.identity import check_identity
from lynxkv.layout import CacheHeader, Dtype, Identity, Parent, ParentPrecision, SpanRef
from lynxkv.store import Store


@dataclass(frozen=True, kw_only=True)
class Continuation:
    """What a new cache continues.

    Attributes:
        folder: URL of the prefix under which all caches of the chain are, and the new one has to be.
        token_ids: of the positions before the new cache; None if they are not known.
    """

    parent: Parent
    folder: str
    dtype: Dtype
    identity: Identity
    token_ids: list[int] | None

    @property
    def stop(self) -> int:
        """The position at which the new cache starts."""
        return self.parent.spans[-1].stop

    def check_beside(self, store: Store) -> None:
        """Refuse, with an InputError, a place for the new cache that is not beside what it continues."""
        if store.folder != self.folder:
            raise InputError(
                f"{store.url} would continue a cache under another prefix, {self.folder or '.'}",
                hint="a cache can only continue one beside it",
            )
        if any(span.name == store.name for span in self.parent.spans):
            raise InputError(f"{store.url} would continue itself", hint="give the new cache another name")

    def check_continued_by(self, header: CacheHeader) -> None:
        """Refuse a new cache that does not go on where this ends.

        Raises:
            InputError: it starts elsewhere, or has another dtype.
            UnsupportedModelError: a layer has a sliding window.
            IdentityError: it is of another model.
        """
        check_chainable(header)
        check_identity(self.identity, header.identity)
        if header.tokens.start != self.stop:
            raise InputError(
                f"the keys and values start at position {header.tokens.start}, what they continue ends at {self.stop}"
            )
        if header.dtype != self.dtype:
            raise InputError(
                f"a cache in {header.dtype} cannot continue one in {self.dtype}", hint=f"use --dtype {self.dtype}"
            )


def continuation(
    reader: CacheReader, precision: ParentPrecision, *, token_ids: Sequence[int] | None = None
) -> Continuation:
    """What a cache continues whose keys and values were computed on what `reader` loads.

    Args:
        precision: that it had then; "computed" if it was the model's own values, before they were rounded and encoded.
        token_ids: of the positions that `reader` loads, if they are known; by default those that it stores.

    Raises:
        InputError: it does not start at 0, the chain would be too long, or has a name that none can have.
        UnsupportedModelError: a layer has a sliding window.
        FetchError, FormatError: the token ids cannot be read.
    """
    extent = reader.extent
    check_chainable(reader.header)
    if extent.start:
        raise InputError(f"the cache starts at position {extent.start}", hint="continue one that starts at 0")
    if len(reader.spans) > MAX_PARENT_SPANS:
        raise InputError(f"a chain of more than {MAX_PARENT_SPANS + 1} caches", hint="encode the prompt as one cache")
    if token_ids is None:
        stored = reader.token_ids()
        token_ids = None if stored is None else stored.tolist()
    spans = tuple(
        SpanRef(name=span.store.name, header_sha256=span.anchor_head.header_sha256, stop=span.part.stop)
        for span in reader.spans
    )
    return after(spans, precision, reader.store.folder, extent.dtype, extent.identity, token_ids)


def after(
    spans: tuple[SpanRef, ...],
    precision: ParentPrecision,
    folder: str,
    dtype: Dtype,
    identity: Identity,
    token_ids: Sequence[int] | None,
) -> Continuation:
    """A continuation of these caches under `folder`, first to last; `token_ids` are those of all their positions.

    Raises:
        InputError: a name that no parent can have.
    """
    for span in spans:
        if not is_sibling_name(span.name):
            raise InputError(f"a cache called {span.name!r} cannot be continued", hint="give it a plain name")
    sha256 = None if token_ids is None else hashlib.sha256(np.asarray(token_ids, "<u4").tobytes()).hexdigest()
    return Continuation(
        parent=Parent(precision=precision, tokens_sha256=sha256, spans=spans),
        folder=folder,
        dtype=dtype,
        identity=identity,
        token_ids=None if token_ids is None else list(token_ids),
    )


def check_chainable(header: CacheHeader) -> None:
    """Refuse, with an UnsupportedModelError, caches that can neither continue others nor be continued."""
    for number, layer in enumerate(header.layers):
        if layer.kind != "full":
            raise UnsupportedModelError(
                f"layer {number} has a sliding window of {layer.window}: such caches cannot be continued yet",
                hint="encode the prompt as one cache",
            )
