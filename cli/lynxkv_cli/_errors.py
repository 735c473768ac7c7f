"""One table from exception to message and exit code; nothing else in the command line decides either.

0    done
1    failed: the cache, the store, the model or the input cannot be used
2    the command line itself is wrong
130  interrupted
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass

import typer

from lynxkv.errors import (
    BindingError,
    FormatError,
    IdentityError,
    InputError,
    LynxError,
    StoreError,
    UnsupportedFormatError,
)
from lynxkv_cli._output import Output
from lynxkv_cli._streams import StdoutError

FAILED, USAGE, INTERRUPTED = 1, 2, 130


@dataclass(frozen=True, kw_only=True)
class Failure:
    """What a person is told, and the exit code. `kind` is the error's type in JSON."""

    kind: str
    message: str
    hint: str | None
    exit_code: int


# For errors that carry no hint of their own; the nearest class counts.
HINTS: dict[type[BaseException], str] = {
    UnsupportedFormatError: "a newer lynxkv may read it",
    BindingError: "its two shards come from different encodes: copy both from one, or encode it again",
    FormatError: "the cache is damaged or was cut short: copy it again, or encode it again",
    IdentityError: "use the model that the cache was made with",
    StoreError: "check the URL, its permissions and the network",
    InputError: "`lynxkv COMMAND --help` says what is accepted",
}


def _lynx(error: LynxError) -> Failure:
    general = next((HINTS[kind] for kind in type(error).__mro__ if kind in HINTS), None)
    return Failure(kind=type(error).__name__, message=error.message, hint=error.hint or general, exit_code=FAILED)


def _usage(error: typer.TyperException) -> Failure:
    command = getattr(getattr(error, "ctx", None), "command_path", "lynxkv")
    message = error.format_message().rstrip()
    hint = getattr(error, "hint", None) or f"`{command} --help` shows how to call it"
    return Failure(kind="UsageError", message=message, hint=hint, exit_code=USAGE)


def _interrupted(error: BaseException) -> Failure:
    return Failure(kind="Interrupted", message="interrupted", hint=None, exit_code=INTERRUPTED)


def _stdout(error: StdoutError) -> Failure:
    hint = "send it to a file or a pipe that takes it, or to /dev/null if you do not need it"
    return Failure(kind="StdoutError", message=f"cannot write to stdout: {error}", hint=hint, exit_code=FAILED)


def _system(error: OSError) -> Failure:
    where = f": {error.filename}" if error.filename else ""
    message = f"{error.strerror or error}{where}"
    return Failure(kind="OSError", message=message, hint="check the path and its permissions", exit_code=FAILED)


def _out_of_memory(error: MemoryError) -> Failure:
    hint = "use a shorter prompt, a smaller model, or a machine with more memory"
    return Failure(kind="MemoryError", message="out of memory", hint=hint, exit_code=FAILED)


def _unexpected(error: BaseException) -> Failure:
    message = f"unexpected {type(error).__name__}: {error}"
    hint = "this is a bug in lynxkv; please report it with the output of the same command under LYNXKV_DEBUG=1"
    return Failure(kind="InternalError", message=message, hint=hint, exit_code=FAILED)


# The first row that fits counts.
TABLE: tuple[tuple[type[BaseException] | tuple[type[BaseException], ...], Callable[..., Failure]], ...] = (
    (LynxError, _lynx),
    (typer.TyperException, _usage),
    ((KeyboardInterrupt, typer.Abort), _interrupted),
    (StdoutError, _stdout),
    (OSError, _system),
    (MemoryError, _out_of_memory),
    (BaseException, _unexpected),
)


class UsageProblem(typer.BadParameter):
    """A value on the command line that does not parse, with a hint of its own."""

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message)
        self.hint = hint

    def format_message(self) -> str:
        """The message as it is: it names what is wrong, which an "Invalid value" before it would not."""
        return self.message


def failure_of(error: BaseException) -> Failure:
    """What to say of `error`."""
    return next(describe(error) for kinds, describe in TABLE if isinstance(error, kinds))


def report(error: BaseException, output: Output) -> int:
    """Print what went wrong and return the exit code; `LYNXKV_DEBUG=1` adds the traceback."""
    if isinstance(error, StdoutError) and error.reader_left:
        return FAILED  # Whoever read our output has left, which is their right.
    failure = failure_of(error)
    if os.environ.get("LYNXKV_DEBUG") == "1":
        traceback.print_exception(error)
    as_text = Output("human")
    try:
        (as_text if isinstance(error, StdoutError) else output).error(failure.kind, failure.message, failure.hint)
        sys.stdout.flush()
    except StdoutError:  # The error was to be a JSON object.
        as_text.error(failure.kind, failure.message, failure.hint)
    return failure.exit_code
