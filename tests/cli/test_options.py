"""How values on the command line are read."""

from __future__ import annotations

import io
import os
import pty
from pathlib import Path

import pytest

from lynxkv.errors import InputError
from lynxkv_cli import _options
from lynxkv_cli._errors import UsageProblem
from lynxkv_cli._options import parse_link, parse_speculate, read_text


@pytest.mark.parametrize(
    ("value", "bit_per_s", "rtt_s"),
    [("200mbit", 200e6, 0), ("1.5gbit/20ms", 1.5e9, 0.02), ("64KBIT", 64e3, 0), ("1mbit/0.5ms", 1e6, 0.0005)],
)
def test_links(value: str, bit_per_s: float, rtt_s: float) -> None:
    link = parse_link(value)
    assert link is not None
    assert link.bit_per_s == bit_per_s
    assert link.rtt_s == pytest.approx(rtt_s)


@pytest.mark.parametrize(
    "value", ["", "fast", "200", "mbit", "0mbit", "-1mbit", "200mb", "1mbit/", "1mbit/2", "1e3mbit"]
)
def test_what_is_no_link(value: str) -> None:
    with pytest.raises(UsageProblem, match="cannot read the link") as caught:
        parse_link(value)
    assert "200mbit" in caught.value.hint


def test_no_link_is_no_link() -> None:
    assert parse_link(None) is None


@pytest.mark.parametrize(("value", "meaning"), [("auto", "auto"), ("off", "off"), ("1", 1), ("32", 32), ("4096", 4096)])
def test_ways_to_speculate(value: str, meaning: str | int) -> None:
    assert parse_speculate(value) == meaning


@pytest.mark.parametrize("value", ["", "on", "0", "-1", "1.5", "4097", "9" * 5000, "٣", "Auto"])
def test_what_is_no_way_to_speculate(value: str) -> None:
    with pytest.raises(UsageProblem, match="not a way to speculate"):
        parse_speculate(value)


def read(value: str) -> str:
    """What `value` stands for as a prompt; nothing is to be noted."""
    return read_text(value, name="prompt", note=pytest.fail)


def test_text_is_itself_a_file_or_stdin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "prompt.txt"
    path.write_bytes("\ufeffgrüße".encode())
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("aus der Röhre".encode())))
    assert read("hello") == "hello"
    assert read(f"@{path}") == "grüße"
    assert read("-") == "aus der Röhre"


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "latin1.txt").write_bytes("grüße".encode("latin-1"))
    with pytest.raises(UsageProblem, match="No such file"):
        read(f"@{tmp_path}/missing.txt")
    with pytest.raises(UsageProblem, match="@ names no file"):
        read("@")
    with pytest.raises(UsageProblem, match="directory"):
        read(f"@{tmp_path}")
    with pytest.raises(UsageProblem, match=r"latin1.txt is not UTF-8 text \(byte 2\)"):
        read(f"@{tmp_path}/latin1.txt")
    with pytest.raises(UsageProblem, match="the prompt on the command line is not UTF-8"):
        read("gr\udcfc\udcdfe")


@pytest.mark.parametrize("text", ["", " \n\t ", "\ufeff"])
def test_text_that_is_empty(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "prompt.txt").write_text(text, "utf-8")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    for value in (text, f"@{tmp_path}/prompt.txt", "-"):
        with pytest.raises(InputError, match="the prompt is empty"):
            read(value)


def test_text_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_options, "MAX_TEXT_BYTES", 1 << 20)
    with Path("/dev/zero").open() as zeros:
        monkeypatch.setattr("sys.stdin", zeros)
        for value in ("@/dev/zero", "-", "x" * ((1 << 20) + 1)):
            with pytest.raises(InputError, match="longer than 1 MiB"):
                read(value)


def test_a_terminal_is_asked_for_text(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    notes: list[str] = []
    with open(theirs) as terminal:  # noqa: PTH123
        monkeypatch.setattr("sys.stdin", terminal)
        os.write(ours, b"Why?\n\x04")
        assert read_text("-", name="question", note=notes.append) == "Why?\n"
    os.close(ours)
    assert notes == ["type the question, then Ctrl-D at the start of a line"]


def test_a_closed_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(UsageProblem, match="stdin is closed"):
        read("-")
