"""Progressive KV caches: decode from the Anchor at once, verify with the Residual when it arrives.

    lynxkv.encode(kv, "s3://caches/report.lynx")       publish a cache
    lynxkv.open("s3://caches/report.lynx")             read it, Anchor first
    lynxkv.load("s3://caches/report.lynx")             read all of it
    lynxkv.quantize(x), lynxkv.dequantize(q)           the codecs on any KV tensor, without files

Names are loaded when first used: `import lynxkv` imports neither torch, numba, triton nor transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lynxkv._version import __version__
from lynxkv.errors import (
    BindingError,
    CacheExistsError,
    CacheNotFoundError,
    ChecksumError,
    ContentError,
    FetchError,
    FormatError,
    HeaderError,
    IdentityError,
    InputError,
    LynxError,
    NonFiniteError,
    StoreError,
    TruncatedError,
    UnsupportedFormatError,
    UnsupportedModelError,
    WriterStoppedError,
)

if TYPE_CHECKING:
    from lynxkv.bases import load_basis as load_basis
    from lynxkv.batch import generate_batch as generate_batch
    from lynxkv.calibration import calibrate as calibrate
    from lynxkv.checkpoints import load_model as load_model
    from lynxkv.continuing import continuation as continuation
    from lynxkv.decoder import load as load
    from lynxkv.encoder import encode as encode
    from lynxkv.exporting import export as export
    from lynxkv.fetch import FetchOptions as FetchOptions
    from lynxkv.fetch import open_cache as _open_cache
    from lynxkv.fetch import open_cache_async as open_async
    from lynxkv.fidelity import compare as compare
    from lynxkv.integrations.hf import LynxCache as LynxCache
    from lynxkv.kv import KV as KV
    from lynxkv.manage import list_caches as list_caches
    from lynxkv.manage import prune as prune
    from lynxkv.manage import remove as remove
    from lynxkv.manage import remove_chain as remove_chain
    from lynxkv.models import prefill as prefill
    from lynxkv.models import prefill_with_logits as prefill_with_logits
    from lynxkv.quantization import dequantize as dequantize
    from lynxkv.quantization import quantize as quantize
    from lynxkv.report import check as check
    from lynxkv.report import inspect as inspect
    from lynxkv.runner import generate as generate
    from lynxkv.sampling import Sampling as Sampling
    from lynxkv.spans import encode_prompt as encode_prompt
    from lynxkv.store import Link as Link

    open = _open_cache  # which is no part of `__all__`, so that an import alone would not export it

# name: where it is defined
_LAZY = {
    "FetchOptions": "lynxkv.fetch.FetchOptions",
    "KV": "lynxkv.kv.KV",
    "Link": "lynxkv.store.Link",
    "LynxCache": "lynxkv.integrations.hf.LynxCache",
    "Sampling": "lynxkv.sampling.Sampling",
    "calibrate": "lynxkv.calibration.calibrate",
    "check": "lynxkv.report.check",
    "compare": "lynxkv.fidelity.compare",
    "continuation": "lynxkv.continuing.continuation",
    "dequantize": "lynxkv.quantization.dequantize",
    "encode": "lynxkv.encoder.encode",
    "encode_prompt": "lynxkv.spans.encode_prompt",
    "export": "lynxkv.exporting.export",
    "generate": "lynxkv.runner.generate",
    "generate_batch": "lynxkv.batch.generate_batch",
    "inspect": "lynxkv.report.inspect",
    "list_caches": "lynxkv.manage.list_caches",
    "load": "lynxkv.decoder.load",
    "load_basis": "lynxkv.bases.load_basis",
    "load_model": "lynxkv.checkpoints.load_model",
    "open": "lynxkv.fetch.open_cache",
    "open_async": "lynxkv.fetch.open_cache_async",
    "prefill": "lynxkv.models.prefill",
    "prefill_with_logits": "lynxkv.models.prefill_with_logits",
    "prune": "lynxkv.manage.prune",
    "quantize": "lynxkv.quantization.quantize",
    "remove": "lynxkv.manage.remove",
    "remove_chain": "lynxkv.manage.remove_chain",
}

# All but `open`, which `from lynxkv import *` would put before Python's own.
__all__ = [
    "KV",
    "BindingError",
    "CacheExistsError",
    "CacheNotFoundError",
    "ChecksumError",
    "ContentError",
    "FetchError",
    "FetchOptions",
    "FormatError",
    "HeaderError",
    "IdentityError",
    "InputError",
    "Link",
    "LynxCache",
    "LynxError",
    "NonFiniteError",
    "Sampling",
    "StoreError",
    "TruncatedError",
    "UnsupportedFormatError",
    "UnsupportedModelError",
    "WriterStoppedError",
    "__version__",
    "calibrate",
    "check",
    "compare",
    "continuation",
    "dequantize",
    "encode",
    "encode_prompt",
    "export",
    "generate",
    "generate_batch",
    "inspect",
    "list_caches",
    "load",
    "load_basis",
    "load_model",
    "open_async",
    "prefill",
    "prefill_with_logits",
    "prune",
    "quantize",
    "remove",
    "remove_chain",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = _LAZY[name].rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_LAZY))
