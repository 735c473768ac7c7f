"""Caches that continue each other, opened as one (SPEC 9.4): which there are, and whether each is what it should be."""

from __future__ import annotations

from lynxkv.errors import BindingError, CacheNotFoundError, InputError
from lynxkv.fetch.span import SpanReader
from lynxkv.identity import check_identity
from lynxkv.layout import CacheHeader, SpanRef


def wanted_parents(header: CacheHeader, stop: int) -> list[SpanRef]:
    """The caches before this one that hold positions before `stop`, first to last."""
    spans = header.parent.spans if header.parent is not None else ()
    starts = [0, *(span.stop for span in spans)]
    return [span for start, span in zip(starts, spans, strict=False) if start < stop]


async def open_parent(span: SpanReader, head: CacheHeader, number: int) -> None:
    """Open the cache that comes at place `number` before the one of `head`, and check that it is that one.

    Raises:
        CacheNotFoundError: it is not there.
        BindingError: another cache is there.
        IdentityError: it belongs to another model.
        FetchError, FormatError: it cannot be read, or is damaged.
    """
    try:
        await span.open()
    except CacheNotFoundError as error:
        raise CacheNotFoundError(
            f"{span.url} is not there, though the cache continues it",
            hint="copy the whole chain, or encode the prompt again with --no-continue",
        ) from error
    check_parent(span, head, number)


def check_parent(span: SpanReader, head: CacheHeader, number: int) -> None:
    """Refuse what is not the cache at place `number` of a chain that ends with `head`; see `open_parent`."""
    assert head.parent is not None
    refs = head.parent.spans
    ref, own = refs[number], span.header
    start = refs[number - 1].stop if number else 0
    check_continues(span, head)
    stated = (ref.header_sha256, start, refs[:number])
    before = own.parent.spans if own.parent is not None else ()
    if stated != (span.anchor_head.header_sha256, own.tokens.start, before) or own.tokens.stop < ref.stop:
        raise _another(span)


def check_continues(span: SpanReader, header: CacheHeader) -> None:
    """Refuse a span that a cache with this header cannot continue: of another model, dtype or shape."""
    check_identity(span.header.identity, header.identity)
    if (span.header.dtype, _shapes(span.header)) != (header.dtype, _shapes(header)):
        raise _another(span)


def _another(span: SpanReader) -> BindingError:
    return BindingError(
        f"{span.url}: is another cache than the one that was continued",
        hint="it was replaced since: encode what continues it again",
    )


def check_tokens(header: CacheHeader, tokens: int | None) -> int:
    """How many tokens to load, if a cache has as many.

    Raises:
        InputError: it has not, or does not start at position 0.
    """
    if tokens is None:
        return header.tokens.stop
    if header.tokens.start and header.parent is None:
        raise InputError(
            f"the cache starts at position {header.tokens.start}", hint="leave the number of tokens out to load all"
        )
    if not 1 <= tokens <= header.tokens.stop:
        raise InputError(
            f"{tokens} tokens are asked for, the cache has {header.tokens.stop}",
            hint=f"ask for 1 to {header.tokens.stop}",
        )
    return tokens


def _shapes(header: CacheHeader) -> list[object]:
    return [
        (layer.kind, {name: (spec.heads, spec.head_dim) for name, spec in layer.tensors.items()})
        for layer in header.layers
    ]
