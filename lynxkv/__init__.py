"""Progressive KV caches: decode from the Anchor at once, verify with the Residual when it arrives.

    lynxkv.encode(kv, "s3://caches/report.lynx")       publish a cache
    lynxkv.open("s3://caches/report.lynx")             read it, Anchor first
    lynxkv.load("s3://caches/report.lynx")             read all of it
    lynxkv.quantize(x), lynxkv.dequantize(q)           the codecs on any KV tensor, without files

Names are loaded when first used: `import lynxkv` imports neither torch, numba, triton nor transformers.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
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
)

if TYPE_CHECKING:
    from lynxkv.check import check as check
    from lynxkv.decode import load as load
    from lynxkv.encode import encode as encode
    from lynxkv.fetch import open as open
    from lynxkv.inspect import compare as compare
    from lynxkv.inspect import inspect as inspect
    from lynxkv.integrations.hf import LynxCache as LynxCache
    from lynxkv.kv import KV as KV
    from lynxkv.models import load_model as load_model
    from lynxkv.models import prefill as prefill
    from lynxkv.quantization import dequantize as dequantize
    from lynxkv.quantization import quantize as quantize
    from lynxkv.runner import generate as generate
    from lynxkv.sampling import Sampling as Sampling
    from lynxkv.store import Link as Link

# name: the module that defines it
_LAZY = {
    "KV": "lynxkv.kv",
    "Link": "lynxkv.store",
    "LynxCache": "lynxkv.integrations.hf",
    "Sampling": "lynxkv.sampling",
    "check": "lynxkv.check",
    "compare": "lynxkv.inspect",
    "dequantize": "lynxkv.quantization",
    "encode": "lynxkv.encode",
    "generate": "lynxkv.runner",
    "inspect": "lynxkv.inspect",
    "load": "lynxkv.decode",
    "load_model": "lynxkv.models",
    "open": "lynxkv.fetch",
    "prefill": "lynxkv.models",
    "quantize": "lynxkv.quantization",
}

__all__ = [
    "KV",
    "BindingError",
    "CacheExistsError",
    "CacheNotFoundError",
    "ChecksumError",
    "ContentError",
    "FetchError",
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
    "__version__",
    "check",
    "compare",
    "dequantize",
    "encode",
    "generate",
    "inspect",
    "load",
    "load_model",
    "open",
    "prefill",
    "quantize",
]


class _Package(ModuleType):
    """The package, whose names stay functions when a module of the same name is imported.

    After `import lynxkv.encode` the import system would bind the module to that name and hide the function.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, ModuleType) and name in _LAZY:
            return
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
