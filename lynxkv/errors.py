"""Every error that lynxkv raises on purpose.

    LynxError
    ├── FormatError (ValueError)      the bytes of a cache are not what the SPEC allows
    │   ├── TruncatedError            a shard is shorter than its header says
    │   ├── HeaderError               the header or the index is malformed or over a limit
    │   ├── ChecksumError             stored bytes do not have the stated digest
    │   ├── UnsupportedFormatError    a version or required feature this reader does not know
    │   ├── BindingError              two shards, or a cache and one it continues, do not belong together
    │   └── ContentError              checked bytes hold values the SPEC forbids
    ├── IdentityError (ValueError)    the cache belongs to another model, tokenizer, adapter or tenant
    ├── StoreError (OSError)          a store cannot be read or written
    │   ├── CacheNotFoundError (FileNotFoundError)
    │   ├── CacheExistsError (FileExistsError)
    │   └── FetchError                a read failed, and retries did not help
    │       └── WriterStoppedError    nothing new came of a chain that is being written
    └── InputError (ValueError)       what the caller passed cannot be used
        ├── NonFiniteError            NaN or infinity in keys, values or logits
        └── UnsupportedModelError     a model kind that a KV cache per head cannot represent

Each also inherits the builtin that a caller would expect to catch.
"""


class LynxError(Exception):
    """Base of all errors raised on purpose: what was wrong and where, and a hint what to do next."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message


class FormatError(LynxError, ValueError):
    """The bytes of a cache are not what the SPEC allows."""


class TruncatedError(FormatError):
    """A shard is shorter than its header says."""


class HeaderError(FormatError):
    """The header or the index is malformed or over a limit."""


class ChecksumError(FormatError):
    """Stored bytes do not have the stated digest."""


class UnsupportedFormatError(FormatError):
    """A version or a required feature that this reader does not know."""


class BindingError(FormatError):
    """Anchor and Residual, or a cache and one that it continues, do not belong together."""


class ContentError(FormatError):
    """Checked bytes hold values that the SPEC forbids."""


class IdentityError(LynxError, ValueError):
    """The cache belongs to another model, tokenizer, adapter or tenant; `field` names what differs."""

    def __init__(self, message: str, *, field: str, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.field = field


class StoreError(LynxError, OSError):
    """A store cannot be read or written."""


class CacheNotFoundError(StoreError, FileNotFoundError):
    """There is no cache at this URL."""


class CacheExistsError(StoreError, FileExistsError):
    """There is a cache at this URL already."""


class FetchError(StoreError):
    """A read failed, and retries did not help."""


class WriterStoppedError(FetchError):
    """Nothing new came of a chain that is being written, for longer than its reader would wait."""


class InputError(LynxError, ValueError):
    """What the caller passed cannot be used."""


class NonFiniteError(InputError):
    """NaN or infinity in keys or values, where the message names the layer, or in a model's logits."""


class UnsupportedModelError(InputError):
    """A model kind whose cache cannot be represented."""
