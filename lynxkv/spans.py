"""A prompt to published caches: what the store holds of it is loaded, the rest prefilled, whole or span by span.

prefill  |-- span 0 --|-- span 1 --|-- span 2 --|
encode                |-- span 0 --|-- span 1 --|-- span 2 --|
store                      NAME.0000.lynx  NAME.0001.lynx  NAME.lynx
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from lynxkv.bases import basis_of
from lynxkv.codecs import Codec, get_codec
from lynxkv.continuing import Continuation, after, continuation
from lynxkv.decoder import decode_into, holds_exact
from lynxkv.encoder import EncodeReport, Progress, check_options, encode
from lynxkv.errors import BindingError, InputError, LynxError, UnsupportedModelError
from lynxkv.fetch import FetchOptions, open_cache
from lynxkv.format.basis import Basis
from lynxkv.format.document import span_name
from lynxkv.format.limits import MAX_PARENT_SPANS
from lynxkv.kv import KV
from lynxkv.layout import Dtype, PartOf, Precision, SpanRef
from lynxkv.manage import check_not_continued, remove
from lynxkv.models import CHUNK_TOKENS, DecoderModel, LiveCache, check_prompt, extend, listed
from lynxkv.prefix_search import StoredPrefix, longest_prefix
from lynxkv.store import Store, Url
from lynxkv.store.problems import exists_already


@dataclass(frozen=True, kw_only=True)
class PromptReport:
    """What `encode_prompt` published, last span last, and what that continues.

    Attributes:
        tokens: of the whole prompt.
        continued_tokens: those that were in the store; 0 if none were.
        load_s, prefill_s: seconds spent in looking for these and loading them, and in prefilling the others; None if
            nothing had to be prefilled.
        encode_s: seconds that encoding and publishing took; most of it while the next span was prefilled.
    """

    url: str
    tokens: int
    spans: tuple[EncodeReport, ...]
    continued: tuple[SpanRef, ...]
    continued_tokens: int
    load_s: float
    prefill_s: float | None
    encode_s: float


def encode_prompt(
    model: DecoderModel,
    token_ids: Sequence[int],
    url: Url,
    *,
    span_tokens: int | None = None,
    continue_stored: bool = True,
    chunk_tokens: int = CHUNK_TOKENS,
    codec: str | Codec = "default",
    dtype: Dtype = "bf16",
    basis: Basis | None = None,
    exact: bool = False,
    logits: bool = False,
    store_token_ids: bool = True,
    overwrite: bool = False,
    residual_url: Url | None = None,
    progress: Progress | None = None,
    on_span: Callable[[EncodeReport], None] = lambda report: None,
    report: Callable[[str], None] = lambda message: None,
) -> PromptReport:
    """Prefill a prompt and publish its KV cache at `url`.

    Args:
        span_tokens: publish every so many tokens as soon as they are prefilled and encoded, as caches of one chain
            (SPEC 9.5). `url` is there when all are; until then others can follow. What a killed writer has left is
            a chain of its own, and is continued by the next run.
        continue_stored: look beside `url` for a cache of the same model, codec and dtype whose tokens are the first of
            the prompt; load it, prefill only the rest, and publish that as a cache that continues it.
        codec, basis, dtype, exact, store_token_ids: as for `encode`.
        residual_url: as for `encode`. What is continued has to have its Residual there as well: whoever reads the chain
            looks for all of them in one place.
        logits: store the logits of the last position.
        overwrite: replace a cache that is there. With `span_tokens` it is removed before the first span is published.
        progress: called with the name of the work, how much is done and how much there is.
        on_span: called with each cache that has been published.
        report: is told, in a sentence, why what is stored of the prompt could not be loaded, and is prefilled.

    Raises:
        CacheExistsError: there is a cache at `url`, or spans of another prompt with its name, and `overwrite` is false.
        BindingError: the basis does not fit the cache, or is of another model.
        UnsupportedModelError: spans are wanted of a model that has sliding-window layers.
        InputError: the prompt cannot be run, an option is out of range, or a cache that others continue would be
            replaced.
        StoreError: writing failed; nothing is half-published.
    """
    store, method, ids = Store(url), get_codec(codec), listed(token_ids)
    if basis is None and method.needs_basis:
        basis = basis_of(model.identity.fingerprint)
    check_options(method, dtype, basis=basis is not None)
    if basis is not None:
        basis.check_belongs(model.identity.fingerprint)
    check_prompt(model, ids)
    slides = any(shape.window is not None for shape in model.layer_specs())
    if span_tokens is not None:
        _check_spans(model, span_tokens)
    store.check_target(overwrite=overwrite)
    if overwrite and store.exists():
        check_not_continued(store)
    settings: dict[str, Any] = {
        "codec": method,
        "dtype": dtype,
        "identity": model.identity,
        "basis": basis,
        "exact": exact,
        "store_token_ids": store_token_ids,
        "residual_url": residual_url,
        "overwrite": overwrite,
    }
    began = time.perf_counter()
    loaded = None
    if continue_stored and not slides:
        found = longest_prefix(store, ids, model.identity, codec=method, basis=basis, dtype=dtype, exact=exact)
        loaded = _load(model, found, ids, residual_url, report) if found is not None else None
    load_s = time.perf_counter() - began
    cache = loaded.cache if loaded else model.new_cache(0, len(ids), rollback_tokens=2 * chunk_tokens)
    parent = loaded.parent if loaded else None
    stops = _stops(cache.tokens, len(ids), span_tokens, spans_before=len(parent.parent.spans) if parent else 0)
    numbers = _numbers(store, parent)
    if span_tokens is not None:
        _clear_the_way(store, next(numbers), overwrite=overwrite)
        numbers = _numbers(store, parent)
    chain = _Chain(store, ids, parent, settings, on_span)
    prefill_s = 0.0
    with ThreadPoolExecutor(1, thread_name_prefix="lynxkv-spans") as pool:
        published: Future[None] | None = None
        for stop in stops:
            began = time.perf_counter()
            last = extend(
                model,
                cache,
                ids,
                stop=stop,
                chunk_tokens=chunk_tokens,
                progress=None if progress is None else partial(progress, "prefill"),
            )
            prefill_s += time.perf_counter() - began
            if published is not None:
                published.result()
            if stop < len(ids):
                # Nothing writes to these positions any more.
                span = store.sibling(span_name(store.name, next(numbers)))
                published = pool.submit(chain.publish, span, cache.to_kv(ids[:stop]))
        kv = cache.to_kv(ids)
        chain.publish(store.url, kv, logits=last if logits else None, progress=progress)
    return PromptReport(
        url=store.url,
        tokens=len(ids),
        spans=tuple(chain.reports),
        continued=parent.parent.spans if parent else (),
        continued_tokens=parent.stop if parent else 0,
        load_s=load_s,
        prefill_s=prefill_s,
        encode_s=chain.encode_s,
    )


class _Chain:
    """Publishes spans one after the other, each as what continues those before it."""

    def __init__(
        self,
        store: Store,
        ids: list[int],
        parent: Continuation | None,
        settings: dict[str, Any],
        on_span: Callable[[EncodeReport], None],
    ) -> None:
        self._store, self._ids, self._parent, self._settings, self._on_span = store, ids, parent, settings, on_span
        self.reports: list[EncodeReport] = []
        self.encode_s = 0.0

    def publish(self, url: str, kv: KV, *, logits: Tensor | None = None, progress: Progress | None = None) -> None:
        """Publish what of `kv`, which starts at 0, is not published yet."""
        began = time.perf_counter()
        parent, stop = self._parent, kv.stop
        report = encode(
            kv.between(parent.stop, stop) if parent is not None else kv,
            url,
            logits=logits,
            parent=parent,
            part_of=PartOf(name=self._store.name, stop=len(self._ids)) if stop < len(self._ids) else None,
            progress=progress,
            **self._settings,
        )
        self.reports.append(report)
        self.encode_s += time.perf_counter() - began
        if stop < len(self._ids):
            ref = SpanRef(name=Store(url).name, header_sha256=report.header_sha256, stop=stop)
            spans = (*parent.parent.spans, ref) if parent is not None else (ref,)
            identity, dtype = self._settings["identity"], self._settings["dtype"]
            self._parent = after(spans, "computed", self._store.folder, dtype, identity, self._ids[:stop])
        self._on_span(report)


@dataclass(frozen=True, kw_only=True)
class _Loaded:
    """The first tokens of a prompt, from the store, with room for the others."""

    cache: LiveCache
    parent: Continuation


def _load(
    model: DecoderModel,
    found: StoredPrefix,
    ids: list[int],
    residual_url: Url | None,
    report: Callable[[str], None],
) -> _Loaded | None:
    """Load what is stored, at the best precision that it has; None if it cannot be loaded: it is prefilled then."""
    try:
        with open_cache(found.url, tokens=found.tokens, options=FetchOptions(residual_url=residual_url)) as reader:
            if reader.anchor_head.header_sha256 != found.header_sha256:
                raise BindingError(f"{found.url} was replaced a moment ago")
            extent = reader.extent
            cache = model.new_cache(extent.stop, len(ids) - extent.stop, layers=extent.layers)
            precision: Precision = "full"
            if extent.has_exact and holds_exact(
                extent.dtype, cache.target(0, next(iter(extent.layers[0].tensors))).dtype
            ):
                precision = "exact"
            decode_into(reader, cache, precision)
            return _Loaded(cache=cache, parent=continuation(reader, precision, token_ids=ids[: found.tokens]))
    except LynxError as error:  # what has replaced it may have fewer tokens, or be of another model
        report(f"{found.url} has the first {found.tokens} tokens, but cannot be continued: {error.message}")
        return None


def _check_spans(model: DecoderModel, span_tokens: int) -> None:
    for number, shape in enumerate(model.layer_specs()):
        if shape.window is not None:
            raise UnsupportedModelError(
                f"layer {number} of the model has a sliding window of {shape.window}: its caches cannot be chained yet",
                hint="leave the span's length out",
            )
    if span_tokens < 1:
        raise InputError(f"span_tokens is {span_tokens}", hint="a span has at least one token")


def _stops(start: int, total: int, span_tokens: int | None, *, spans_before: int) -> list[int]:
    """Where spans end: at multiples of `span_tokens`, the last one at `total`."""
    if span_tokens is None:
        return [total]
    stops = [*range((start // span_tokens + 1) * span_tokens, total, span_tokens), total]
    if spans_before + len(stops) > MAX_PARENT_SPANS + 1:
        least = -(-(total - start) // (MAX_PARENT_SPANS - spans_before)) if spans_before < MAX_PARENT_SPANS else None
        hint = "encode the prompt without continuing" if least is None else f"make spans of {least} tokens or more"
        raise InputError(f"a chain of {spans_before + len(stops)} caches is over {MAX_PARENT_SPANS + 1}", hint=hint)
    return stops


def _numbers(store: Store, parent: Continuation | None) -> Iterator[int]:
    """Numbers for the next spans: those that another run has left, and this one continues, keep theirs."""
    names = {span.name for span in parent.parent.spans} if parent is not None else set()
    return itertools.count(next(number for number in itertools.count() if span_name(store.name, number) not in names))


def _clear_the_way(store: Store, first: int, *, overwrite: bool) -> None:
    """See to it that the last span is not there, and none from number `first` on: nobody shall take what another writer
    has left for this one's.

    Raises:
        CacheExistsError: one is, and `overwrite` is false.
        InputError: other caches continue it.
    """
    there: list[Store] = [store] if store.exists() else []
    others = len(there)
    while (span := Store(store.sibling(span_name(store.name, first + len(there) - others)))).exists():
        there.append(span)
    if there and not overwrite:
        raise exists_already(
            there[0].url, "it is a span of another prompt; give another name, or --force to replace it"
        )
    for span in [*there[:others], *reversed(there[others:])]:
        remove(span.url)
