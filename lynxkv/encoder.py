"""KV tensors to a published cache: quantise segment by segment, seal, lay out, publish."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lynxkv._version import __version__
from lynxkv.bases import CALIBRATE_HINT, basis_of, publish_basis
from lynxkv.codecs import Codec, get_codec
from lynxkv.codecs.base import Place
from lynxkv.continuing import Continuation, check_chainable
from lynxkv.errors import FormatError, InputError
from lynxkv.format.basis import Basis
from lynxkv.format.document import VERSION
from lynxkv.format.index import anchor_plans
from lynxkv.format.limits import (
    MAX_CHANNELS,
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_LOGITS,
    MAX_SINK_TOKENS,
    MAX_TOKENS,
)
from lynxkv.format.read import read_anchor_head, read_residual_head
from lynxkv.format.write import Buffer, Payload, Shard, build_shards, laid_out, payload
from lynxkv.kernels import (
    EntropyTables,
    Tables,
    Transform,
    dequantize,
    pack_exact,
    quantize,
    tables_at,
    to_kernel_device,
)
from lynxkv.kv import KV, check_tensor
from lynxkv.layout import (
    DTYPE_BYTES,
    CacheHeader,
    Coding,
    Dtype,
    Identity,
    LayerSpec,
    PartOf,
    TensorName,
    TensorRef,
    TensorSpec,
    TokenRange,
    TransformRef,
)
from lynxkv.parallel import map_ordered, threads, torch_alone
from lynxkv.prefix import prefix_digests
from lynxkv.quantization import to_original
from lynxkv.store import Store, Url

U8 = npt.NDArray[np.uint8]
Progress = Callable[[str, int, int], None]
"""Called with the name of the work, how much is done and how much there is."""


@dataclass(frozen=True, kw_only=True)
class EncodedCache:
    """Both shards of a cache, laid out and ready to be written."""

    header: CacheHeader
    anchor: Shard
    residual: Shard | None


@dataclass(frozen=True, kw_only=True)
class EncodeReport:
    """What `encode` published: bytes up to anchor, full and exact precision, and of the original uncompressed.

    `header_sha256` is that of the Anchor's header, by which others name the cache when they continue it.
    """

    url: str
    cache_id: str
    header_sha256: str
    tokens: int
    bytes_anchor: int
    bytes_residual: int
    bytes_exact: int
    bytes_original: int


def encode(
    kv: KV,
    url: Url,
    *,
    codec: str | Codec = "default",
    dtype: Dtype = "bf16",
    identity: Identity | None = None,
    basis: Basis | None = None,
    exact: bool = False,
    logits: Tensor | None = None,
    store_token_ids: bool = True,
    parent: Continuation | None = None,
    part_of: PartOf | None = None,
    overwrite: bool = False,
    residual_url: Url | None = None,
    progress: Progress | None = None,
) -> EncodeReport:
    """Encode a KV cache and publish it at `url`, which ends in `.lynx`.

    Keys and values are first rounded to `dtype`; that is the original which all errors count from.

    Args:
        basis: of the model, from `lynxkv calibrate`: its components are coded instead of channels, in fewer bits. The
            codec `compact` needs one, and takes that which calibrate has kept if none is given; `default`, `quality`
            and `fast` can do with one. It is published beside the cache, once.
        exact: add what leads from full precision back to the original, bit by bit.
        logits: of the last position, [V] f32, from the run that computed `kv`; stored whole (SPEC 9.3).
        store_token_ids: False keeps only the digests of the token ids.
        parent: what `kv` was prefilled on, as `continuation` says it; `kv` starts where that ends. Both are then loaded
            as one.
        part_of: the chain that this cache is a part of, while that is being written (SPEC 9.5).
        residual_url: a folder or prefix for the Residual, instead of beside the Anchor. Its readers need to be told:
            nothing in the cache says where.
        progress: called with the name of the work, how much is done and how much there is.

    Raises:
        CacheExistsError: there is a cache at `url` and `overwrite` is false.
        NonFiniteError: a layer holds NaN or infinity.
        InputError: shapes that cannot be represented, an unknown codec, one that wants a basis or takes none,
            or `kv` does not continue `parent`.
        BindingError: the basis does not fit the cache, or is of another model.
        StoreError: writing failed; nothing is half-published.
    """
    if basis is None and get_codec(codec).needs_basis:
        basis = basis_of(identity.fingerprint if identity is not None else None)
    store = Store(url)
    if parent is not None:
        parent.check_beside(store)
    store.check_target(overwrite=overwrite)
    residual_store = None if residual_url is None else Store.of_residuals(residual_url)
    if residual_store is not None:
        residual_store.check_writable()
    with store.starting_anchor() as upload:
        cache = encode_shards(
            kv,
            codec=codec,
            dtype=dtype,
            identity=identity,
            basis=basis,
            exact=exact,
            logits=logits,
            store_token_ids=store_token_ids,
            parent=parent,
            part_of=part_of,
            progress=progress,
            on_anchor=partial(store.send, upload) if upload is not None else None,
        )
        if basis is not None:
            publish_basis(basis, store)
        ref = cache.header.residual
        residual = (ref.name, cache.residual) if ref is not None and cache.residual is not None else None
        store.publish(cache.anchor, residual, overwrite=overwrite, residual_store=residual_store, upload=upload)
    return EncodeReport(
        url=store.url,
        cache_id=cache.header.cache_id,
        header_sha256=cache.anchor.header_sha256,
        tokens=cache.header.tokens.count,
        bytes_anchor=cache.anchor.bytes,
        bytes_residual=ref.bytes - ref.exact_bytes if ref else 0,
        bytes_exact=ref.exact_bytes if ref else 0,
        bytes_original=cache.header.original_bytes,
    )


def encode_shards(
    kv: KV,
    *,
    codec: str | Codec = "default",
    dtype: Dtype = "bf16",
    identity: Identity | None = None,
    basis: Basis | None = None,
    exact: bool = False,
    logits: Tensor | None = None,
    store_token_ids: bool = True,
    parent: Continuation | None = None,
    part_of: PartOf | None = None,
    progress: Progress | None = None,
    on_anchor: Callable[[Buffer], None] | None = None,
) -> EncodedCache:
    """Encode a KV cache in memory; see `encode`. `on_anchor` gets what follows the Anchor's head as it is made."""
    method = check_options(codec, dtype, basis=basis is not None)
    header = _describe(kv, method, dtype, identity or Identity(), exact=exact, store_token_ids=store_token_ids)
    if parent is not None:
        parent.check_continued_by(header)
        header = replace(header, parent=parent.parent)
    if part_of is not None:
        check_chainable(header)
        header = replace(header, part_of=part_of)
    if logits is not None:
        header = replace(header, logits_tokens=_check_logits(logits))
    if basis is not None:
        header = replace(header, transform=_check_basis(basis, header))
    count = len(header.tensors)
    with torch_alone():
        encoding = _Encoding(kv, header, method, basis)
        sent = 0
        # One thread goes through the tensors, while others quantise, compress and digest the segments of the last ones.
        for part, sealed in map_ordered(encoding.seal, encoding.parts(), threads=threads()):
            encoding.add(part, sealed)
            done = part.ref.ordinal + part.ends_tensor
            if on_anchor is not None and done > sent:
                for buffer in encoding.anchor_data(sent, done):
                    on_anchor(buffer)
                sent = done
            if progress:
                progress("quantise", done, count)
    anchor, residual = encoding.anchor, encoding.residual
    if progress:
        progress("quantise", count, count)
    steps = encoding.steps
    anchor["steps"] = [payload(_u8(steps), may_compress=False)]
    if logits is not None:
        anchor["logits"] = [payload(_tensor_u8(logits.detach().to("cpu", torch.float32)), may_compress=False)]
    for name, values in method.codebooks().items():
        anchor[f"codebook.{name}"] = [payload(_u8(values), may_compress=False)]
    if kv.token_ids is not None:
        ids = np.asarray(kv.token_ids, np.uint32)
        anchor["token_ids"] = [payload(_u8(ids), may_compress=False)]
    if header.prefix_blocks:
        ids = np.asarray([*(parent.token_ids or () if parent else ()), *(kv.token_ids or ())], np.uint32)
        anchor["prefix_sha256"] = [payload(prefix_digests(ids, header.identity), may_compress=False)]
    header, anchor_shard, residual_shard = build_shards(header, anchor, residual)
    _read_back(anchor_shard, residual_shard)
    return EncodedCache(header=header, anchor=anchor_shard, residual=residual_shard)


def check_options(codec: str | Codec, dtype: Dtype, *, basis: bool = False) -> Codec:
    """The codec, if it can store a cache in `dtype`, with a basis if there is to be one.

    What no KV could be encoded with is refused before there is one.

    Raises:
        InputError: an unknown codec or dtype, two that do not go together, or parameters over the format's limits.
    """
    method = get_codec(codec)
    if dtype not in DTYPE_BYTES:
        raise InputError(f"dtype {dtype!r} is not one of {', '.join(DTYPE_BYTES)}")
    if dtype == "fp32" and method.name != "raw":
        raise InputError("fp32 goes with the codec raw only", hint="use --dtype bf16, or --codec raw")
    if basis and not method.takes_basis:
        raise InputError(f"the codec {method.name} takes no basis", hint="use compact, default, quality or fast")
    if method.needs_basis and not basis:
        raise InputError(f"the codec {method.name} needs a basis", hint=CALIBRATE_HINT)
    coding = method.coding("k", 1)
    if not 0 <= coding.sink_tokens <= MAX_SINK_TOKENS:
        raise InputError(f"sink_tokens is {coding.sink_tokens}", hint=f"it lies in [0, {MAX_SINK_TOKENS}]")
    if coding.segment_tokens > MAX_TOKENS:
        raise InputError(f"segments of {coding.segment_tokens} tokens are over the format's limit of {MAX_TOKENS}")
    return method


def _check_basis(basis: Basis, header: CacheHeader) -> TransformRef:
    """What the cache says of its basis, which has to fit."""
    basis.check_belongs(header.identity.fingerprint)
    basis.check_fits(header)
    return basis.ref


def _read_back(anchor: Shard, residual: Shard | None) -> None:
    """Open both heads as a reader will: what it would refuse must not be published."""
    try:
        header, _ = read_anchor_head(_head_of(anchor), anchor.bytes, what="the new Anchor")
        if residual is not None:
            read_residual_head(_head_of(residual), residual.bytes, header, what="the new Residual")
    except FormatError as error:
        raise InputError(f"the cache could not be read again: {error.message}") from error


def _head_of(shard: Shard) -> Callable[[int, int], bytes]:
    head = b"".join(shard.buffers[:3])  # header, its digest, index
    return lambda start, stop: head[start:stop]


@dataclass(frozen=True, kw_only=True)
class _Part:
    """A segment to be: `values` [H, t, D] in the declared dtype, on the device that the model keeps its cache on."""

    ref: TensorRef
    values: Tensor
    tables: Tables
    ends_tensor: bool


@dataclass(frozen=True, kw_only=True)
class _Sealed:
    anchor: Payload
    residual: Payload | None
    exact: Payload | None


class _Encoding:
    """Payloads of both shards by array name, as they come into being."""

    def __init__(self, kv: KV, header: CacheHeader, method: Codec, basis: Basis | None) -> None:
        self.kv, self.header, self.method, self.basis = kv, header, method, basis
        self.anchor: dict[str, list[Payload]] = defaultdict(list)
        self.residual: dict[str, list[Payload]] = defaultdict(list)
        self.steps = np.zeros((len(header.tensors), 2), np.float32)
        self.step_factors = method.step_factors(kv)

    def parts(self) -> Iterator[_Part]:
        """All segments to be; what explains those of a tensor is stored before its first one."""
        dtype = self.header.dtype
        for ref in self.header.tensors:
            x = to_kernel_device(self.kv.layers[ref.layer].tensors[ref.name].detach())
            original = to_original(x, dtype, where=f"layer {ref.layer} {ref.name}")
            if ref.sinks:
                sink = original[:, : ref.sinks].transpose(0, 1)
                self.anchor[f"{ref.key}.sink"] = [payload(_tensor_u8(sink), may_compress=False)]
            if not ref.coded_tokens:
                continue
            place = Place(
                step_factor=self.step_factors[ref.layer],
                transform=Transform.of(self.basis, self.header, ref) if self.basis is not None else None,
            )
            tables = self.method.tables(original[:, ref.sinks :], ref.name, place)
            if isinstance(tables, EntropyTables):
                mean = (tables.mean.view(np.uint32) >> 16).astype(np.uint16)
                self.anchor[f"{ref.key}.mean"] = [payload(_u8(mean), may_compress=False)]
                self.anchor[f"{ref.key}.order"] = [payload(_u8(tables.order), may_compress=False)]
                self.steps[ref.ordinal] = tables.step, tables.half_step
            for plan in ref.segments():
                start = ref.sinks + plan.first_token
                yield _Part(
                    ref=ref,
                    values=original[:, start : start + plan.tokens],
                    tables=tables_at(tables, plan.first_token),
                    ends_tensor=plan.first_token + plan.tokens == ref.coded_tokens,
                )

    def seal(self, part: _Part) -> tuple[_Part, _Sealed]:
        """Quantise, compress and digest a segment; on any thread."""
        coding, compress = part.ref.coding, self.method.compress
        first, second = quantize(part.values, coding, part.tables)
        exact = self._exact_raw(part, first, second) if coding.exact else None
        row_bytes = part.values.shape[1] if coding.scheme == "entropy" else None
        return part, _Sealed(
            anchor=payload(first, may_compress=compress and coding.scheme != "raw", row_bytes=row_bytes),
            residual=payload(second, may_compress=compress) if second is not None else None,
            exact=payload(exact, may_compress=True) if exact is not None else None,
        )

    def add(self, part: _Part, sealed: _Sealed) -> None:
        """Put a segment behind those before it."""
        key = part.ref.key
        self.anchor[f"{key}.{'raw' if part.ref.coding.scheme == 'raw' else 'anchor'}"].append(sealed.anchor)
        if sealed.residual is not None:
            self.residual[f"{key}.residual"].append(sealed.residual)
        if sealed.exact is not None:
            self.residual[f"{key}.exact"].append(sealed.exact)

    def anchor_data(self, start: int, stop: int) -> Iterator[Buffer]:
        """What the Anchor will hold of the tensors with these ordinals, all of whose segments have been added."""
        for plan in anchor_plans(self.header):
            if plan.tensor is not None and start <= plan.tensor.ordinal < stop:
                yield from laid_out(plan, self.anchor[plan.name])

    def _exact_raw(self, part: _Part, first: U8, second: U8 | None) -> U8:
        """Decode a segment again and take the difference to the original."""
        full = torch.empty(part.values.shape, dtype=part.values.dtype, device=part.values.device)
        dtype = self.header.dtype
        dequantize(first, second, part.ref.coding, part.tables, part.ref.spec, dtype, full)
        return pack_exact(_patterns(part.values), _patterns(full), dtype)


def _patterns(tensor: Tensor) -> npt.NDArray[np.uint16]:
    """16-bit patterns of a bf16 or fp16 tensor, flat."""
    return tensor.contiguous().view(torch.int16).cpu().numpy().view(np.uint16).reshape(-1)


def _check_logits(logits: Tensor) -> int:
    if logits.ndim != 1 or not 1 <= logits.numel() <= MAX_LOGITS or not torch.isfinite(logits).all():
        raise InputError(f"logits are {tuple(logits.shape)}, not finite values [vocabulary]")
    return logits.numel()


def _describe(
    kv: KV, method: Codec, dtype: Dtype, identity: Identity, *, exact: bool, store_token_ids: bool
) -> CacheHeader:
    """The header of the cache to be, digests still empty."""
    if not kv.layers or kv.tokens < 1:
        raise InputError("the cache is empty", hint="a cache needs at least one layer and one token")
    if len(kv.layers) > MAX_LAYERS:
        raise InputError(f"{len(kv.layers)} layers are over {MAX_LAYERS}")
    codings: list[Coding] = []
    layers = []
    for number, layer in enumerate(kv.layers):
        tensors: dict[TensorName, TensorSpec] = {}
        for name, tensor in sorted(layer.tensors.items()):
            where = f"layer {number} {name}"
            check_tensor(tensor, where)
            heads, tokens, dim = tensor.shape
            if tokens != layer.stop - layer.start:
                raise InputError(f"{where} has {tokens} tokens for positions [{layer.start}, {layer.stop})")
            if heads > MAX_HEADS or dim > MAX_HEAD_DIM or heads * dim > MAX_CHANNELS:
                raise InputError(f"{where}: {heads} heads of {dim} are over the format's limits")
            coding = method.coding(name, heads * dim)
            if exact and coding.scheme != "raw":
                coding = replace(coding, exact=True)
            if coding not in codings:
                codings.append(coding)
            tensors[name] = TensorSpec(heads=heads, head_dim=dim, coding=codings.index(coding))
        layers.append(
            LayerSpec(kind=layer.kind, window=layer.window, start=layer.start, stop=layer.stop, tensors=tensors)
        )
    ids = _checked_ids(kv.token_ids) if kv.token_ids is not None else None
    if ids is not None and len(ids) != kv.tokens:
        raise InputError(f"{len(ids)} token ids for {kv.tokens} tokens")
    return CacheHeader(
        version=VERSION,
        cache_id="",
        index_sha256="",
        dtype=dtype,
        tokens=TokenRange(
            start=kv.start,
            stop=kv.stop,
            sha256=hashlib.sha256(ids.tobytes()).hexdigest() if ids is not None else None,
            stored=ids is not None and store_token_ids,
        ),
        codec_name=method.name,
        codec_params=method.params(),
        codings=tuple(codings),
        layers=tuple(layers),
        residual=None,
        identity=identity,
        writer={"tool": "lynxkv", "version": __version__},
    )


def _checked_ids(ids: list[int]) -> npt.NDArray[np.uint32]:
    if not all(type(token) is int and 0 <= token < 2**32 for token in ids):
        raise InputError("a token id is not an integer in [0, 2^32)")
    return np.asarray(ids, "<u4")


def _u8(values: npt.NDArray[np.generic]) -> U8:
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)


def _tensor_u8(tensor: Tensor) -> U8:
    flat: U8 = tensor.contiguous().view(-1).view(torch.uint8).cpu().numpy()
    return flat
