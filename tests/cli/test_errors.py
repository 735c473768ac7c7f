"""The table from exceptions to messages and exit codes, and the sink that prints them."""

from __future__ import annotations

import io
import json
import sys
from typing import Any

import pytest
import typer

from lynxkv import errors
from lynxkv_cli._errors import UsageProblem, failure_of, report
from lynxkv_cli._output import Output, seconds, size
from lynxkv_cli._streams import StdoutError


def every_error() -> list[errors.LynxError]:
    """One of each class in the tree."""
    found: list[errors.LynxError] = []
    kinds: list[Any] = [errors.LynxError]
    while kinds:
        kind = kinds.pop()
        kinds += kind.__subclasses__()
        extra = {"field": "x"} if kind is errors.IdentityError else {}
        found.append(kind("what", hint="do", **extra))
    return found


@pytest.mark.parametrize("error", every_error(), ids=lambda error: type(error).__name__)
def test_errors_of_the_library_exit_1_with_their_hint(error: errors.LynxError) -> None:
    failure = failure_of(error)
    assert (failure.kind, failure.message, failure.hint) == (type(error).__name__, "what", "do")
    assert failure.exit_code == 1


@pytest.mark.parametrize(
    ("error", "kind", "exit_code"),
    [
        (UsageProblem("bad", hint="good"), "UsageError", 2),
        (typer.BadParameter("bad"), "UsageError", 2),
        (KeyboardInterrupt(), "Interrupted", 130),
        (PermissionError(13, "Permission denied", "/x"), "OSError", 1),
        (MemoryError(), "MemoryError", 1),
        (EOFError("cut"), "InternalError", 1),
        (StdoutError(OSError(28, "No space left on device")), "StdoutError", 1),
        (ZeroDivisionError("division by zero"), "InternalError", 1),
    ],
)
def test_other_exceptions(error: BaseException, kind: str, exit_code: int) -> None:
    failure = failure_of(error)
    assert (failure.kind, failure.exit_code) == (kind, exit_code)


def test_an_unexpected_exception_asks_for_a_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert report(ZeroDivisionError("division by zero"), Output("human")) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "unexpected ZeroDivisionError: division by zero" in captured.err
    assert "LYNXKV_DEBUG=1" in captured.err
    assert "Traceback" not in captured.err


def test_an_error_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    report(errors.LynxError("no \x1b[2Jcache\nat x", hint="look\r\nthere"), Output("human"))
    assert capsys.readouterr().err == "error: no [2Jcache at x\nhint: look there\n"


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LYNXKV_DEBUG", "1")
    try:
        raise errors.ChecksumError("wrong digest")
    except errors.ChecksumError as error:
        report(error, Output("human"))
    assert "Traceback" in capsys.readouterr().err


def test_with_json_the_error_is_the_object(capsys: pytest.CaptureFixture[str]) -> None:
    report(errors.CacheNotFoundError("no cache at x", hint="look"), Output("json"))
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {
        "error": {"type": "CacheNotFoundError", "message": "no cache at x", "hint": "look"}
    }
    assert captured.err == ""


def test_quiet_still_prints_errors(capsys: pytest.CaptureFixture[str]) -> None:
    report(errors.LynxError("empty"), Output("quiet"))
    assert capsys.readouterr().err == "error: empty\n"


class Tty(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("variable", "styled"), [("", True), ("1", False)])
def test_no_color(variable: str, styled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Tty()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("NO_COLOR", variable)
    monkeypatch.setenv("TERM", "xterm")
    Output("human").error("X", "wrong", "right")
    assert ("\x1b[" in stream.getvalue()) is styled


def test_sizes_and_durations() -> None:
    assert [size(n) for n in (0, 999, 1000, 4_600_000, 5e9, 2e12)] == [
        "0 B",
        "999 B",
        "1.00 kB",
        "4.60 MB",
        "5.00 GB",
        "2.00 TB",
    ]
    assert [seconds(s) for s in (None, 0.25, 1.5)] == ["none", "250 ms", "1.50 s"]


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (errors.ChecksumError("x"), "damaged"),
        (errors.BindingError("x"), "different encodes"),
        (errors.FetchError("x"), "network"),
        (errors.NonFiniteError("x"), "--help"),
    ],
)
def test_errors_without_a_hint_get_that_of_their_class(error: errors.LynxError, hint: str) -> None:
    assert hint in (failure_of(error).hint or "")
