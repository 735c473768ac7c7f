"""Why a request got no answer, as OpenAI's clients understand it: a status, and an error object."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lynxkv.errors import CacheNotFoundError, FormatError, IdentityError, InputError, LynxError, StoreError


class Refusal(LynxError):
    """A request that gets no answer.

    Attributes:
        status: of HTTP.
        code: for programs to tell what was wrong.
        param: the field of the request that was.
        retry_after_s: when it makes sense to ask again; None where asking again will not help.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str | None = None,
        param: str | None = None,
        hint: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.status, self.code, self.param, self.retry_after_s = status, code, param, retry_after_s

    @property
    def body(self) -> dict[str, Any]:
        """The error object of OpenAI's API; a hint is part of the message."""
        return {
            "error": {
                "message": f"{self.message}; {self.hint}" if self.hint else self.message,
                "type": _kind(self.status),
                "param": self.param,
                "code": self.code,
            }
        }

    @property
    def headers(self) -> dict[str, str]:
        """What tells a client whether to ask again."""
        if self.retry_after_s is None:
            return {"x-should-retry": "false"}
        return {"retry-after": str(self.retry_after_s)}


def _kind(status: int) -> str:
    if status == 401:
        return "authentication_error"
    return "invalid_request_error" if status < 500 else "server_error"


def _lynx(status: int, code: str, retry_after_s: int | None = None) -> Callable[[LynxError], Refusal]:
    def refusal(error: LynxError) -> Refusal:
        return Refusal(error.message, status=status, code=code, hint=error.hint, retry_after_s=retry_after_s)

    return refusal


# The first row that fits counts.
TABLE: tuple[tuple[type[LynxError], Callable[[LynxError], Refusal]], ...] = (
    (IdentityError, _lynx(400, "cache_of_another_model")),
    (CacheNotFoundError, _lynx(404, "cache_not_found")),
    (FormatError, _lynx(502, "cache_damaged")),
    (StoreError, _lynx(502, "store_failed", retry_after_s=1)),
    (InputError, _lynx(400, "invalid_value")),
)


def refusal_of(error: Exception) -> Refusal:
    """What a client is told of `error`. Of what nobody has foreseen it is told nothing."""
    if isinstance(error, Refusal):
        return error
    for kind, describe in TABLE:
        if isinstance(error, kind):
            return describe(error)
    if isinstance(error, MemoryError):
        return Refusal("the server is out of memory", status=503, code="overloaded", retry_after_s=5)
    return Refusal("the server has failed; its log says why", status=500, code="internal_error")
