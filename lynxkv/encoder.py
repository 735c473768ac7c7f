"""KV tensors to a published cache: quantise segment by segment, seal, lay out, publish."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lynxkv._version import __version__
from lynxkv.codecs import Codec, get_codec
from lynxkv.errors import FormatError, InputError
from lynxkv.exact import pack_exact
from lynxkv.format.document import VERSION
from lynxkv.format.limits import MAX_CHANNELS, MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS, MAX_LOGITS
from lynxkv.format.read import read_anchor_head, read_residual_head
from lynxkv.format.write import Payload, Shard, build_shards, payload
from lynxkv.kernels import EntropyTables, Tables, dequantize, quantize
from lynxkv.kv import KV
from lynxkv.layout import (
    DTYPE_BYTES,
    CacheHeader,
    Coding,
    Dtype,
    Identity,
    LayerSpec,
    TensorName,
    TensorRef,
    TensorSpec,
    TokenRange,
)
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
    """What `encode` published: bytes up to anchor, full and exact precision, and of the original uncompressed."""

    url: str
    cache_id: str
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
    exact: bool = False,
    logits: Tensor | None = None,
    store_token_ids: bool = True,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> EncodeReport:
    """Encode a KV cache and publish it at `url`, which ends in `.lynx`.

    Keys and values are first rounded to `dtype`; that is the original which all errors count from.

    Args:
        exact: add what leads from full precision back to the original, bit by bit.
        logits: of the last position, [V] f32, from the run that computed `kv`; stored whole (SPEC 9.3).
        store_token_ids: False keeps only the digests of the token ids.
        progress: called with the name of the work, how much is done and how much there is.

    Raises:
        CacheExistsError: there is a cache at `url` and `overwrite` is false.
        NonFiniteError: a layer holds NaN or infinity.
        InputError: shapes that cannot be represented, an unknown codec.
        StoreError: writing failed; nothing is half-published.
    """
    store = Store(url)
    store.check_target(overwrite=overwrite)
    cache = encode_shards(
        kv,
        codec=codec,
        dtype=dtype,
        identity=identity,
        exact=exact,
        logits=logits,
        store_token_ids=store_token_ids,
        progress=progress,
    )
    ref = cache.header.residual
    residual = (ref.name, cache.residual) if ref is not None and cache.residual is not None else None
    store.publish(cache.anchor, residual, overwrite=overwrite)
    return EncodeReport(
        url=store.url,
        cache_id=cache.header.cache_id,
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
    exact: bool = False,
    logits: Tensor | None = None,
    store_token_ids: bool = True,
    progress: Progress | None = None,
) -> EncodedCache:
    """Encode a KV cache in memory; see `encode`."""
    method = get_codec(codec)
    if dtype not in DTYPE_BYTES:
        raise InputError(f"dtype {dtype!r} is not one of {', '.join(DTYPE_BYTES)}")
    if dtype == "fp32" and method.name != "raw":
        raise InputError("fp32 goes with the codec raw only", hint="use --dtype bf16, or --codec raw")
    header = _describe(kv, method, dtype, identity or Identity(), exact=exact, store_token_ids=store_token_ids)
    if logits is not None:
        header = replace(header, logits_tokens=_check_logits(logits))
    anchor: dict[str, list[Payload]] = {}
    residual: dict[str, list[Payload]] = {}
    steps = np.zeros((len(header.tensors), 2), np.float32)
    for ref in header.tensors:
        x = kv.layers[ref.layer].tensors[ref.name].detach()
        tables = _encode_tensor(ref, x, method, dtype, anchor, residual)
        if isinstance(tables, EntropyTables):
            steps[ref.ordinal] = tables.step, tables.half_step
        if progress:
            progress("quantise", ref.ordinal + 1, len(header.tensors))
    anchor["steps"] = [payload(_u8(steps), may_compress=False)]
    if logits is not None:
        anchor["logits"] = [payload(_tensor_u8(logits.detach().to("cpu", torch.float32)), may_compress=False)]
    for name, values in method.codebooks().items():
        anchor[f"codebook.{name}"] = [payload(_u8(values), may_compress=False)]
    if kv.token_ids is not None:
        ids = np.asarray(kv.token_ids, np.uint32)
        anchor["token_ids"] = [payload(_u8(ids), may_compress=False)]
        anchor["prefix_sha256"] = [payload(prefix_digests(ids, header.identity), may_compress=False)]
    header, anchor_shard, residual_shard = build_shards(header, anchor, residual)
    _read_back(anchor_shard, residual_shard)
    return EncodedCache(header=header, anchor=anchor_shard, residual=residual_shard)


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


def _encode_tensor(
    ref: TensorRef,
    x: Tensor,
    method: Codec,
    dtype: Dtype,
    anchor: dict[str, list[Payload]],
    residual: dict[str, list[Payload]],
) -> Tables:
    # Bytes are laid out in host memory, wherever the model keeps its cache.
    original = to_original(x.to("cpu"), dtype, where=f"layer {ref.layer} {ref.name}")
    if ref.sinks:
        sink = original[:, : ref.sinks].transpose(0, 1)
        anchor[f"{ref.key}.sink"] = [payload(_tensor_u8(sink), may_compress=False)]
    if not ref.coded_tokens:
        return None
    raw_coding = ref.coding.scheme == "raw"
    coded = original[:, ref.sinks :]
    tables = method.tables(coded, ref.name)
    if isinstance(tables, EntropyTables):
        mean = (tables.mean.view(np.uint32) >> 16).astype(np.uint16)
        anchor[f"{ref.key}.mean"] = [payload(_u8(mean), may_compress=False)]
        anchor[f"{ref.key}.order"] = [payload(_u8(tables.order), may_compress=False)]
    anchors, residuals, exacts = [], [], []
    for plan in ref.segments():
        tokens = slice(ref.sinks + plan.first_token, ref.sinks + plan.first_token + plan.tokens)
        part = original[:, tokens]
        first, second = quantize(part, ref.coding, tables)
        anchors.append(payload(first, may_compress=method.compress and not raw_coding))
        if second is not None:
            residuals.append(payload(second, may_compress=method.compress))
        if ref.coding.exact:
            exacts.append(payload(_exact_raw(part, first, second, ref, tables, dtype), may_compress=True))
    anchor[f"{ref.key}.{'raw' if raw_coding else 'anchor'}"] = anchors
    if residuals:
        residual[f"{ref.key}.residual"] = residuals
    if exacts:
        residual[f"{ref.key}.exact"] = exacts
    return tables


def _exact_raw(original: Tensor, first: U8, second: U8 | None, ref: TensorRef, tables: Tables, dtype: Dtype) -> U8:
    """Decode a segment again and take the difference to the original."""
    full = torch.empty(original.shape, dtype=original.dtype)
    dequantize(first, second, ref.coding, tables, ref.spec, dtype, full)
    return pack_exact(_patterns(original), _patterns(full), dtype)


def _patterns(tensor: Tensor) -> npt.NDArray[np.uint16]:
    """16-bit patterns of a bf16 or fp16 tensor, flat."""
    return tensor.contiguous().view(torch.int16).numpy().view(np.uint16).reshape(-1)


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
            heads, tokens, dim = tensor.shape
            where = f"layer {number} {name}"
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
    flat: U8 = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    return flat
