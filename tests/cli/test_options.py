"""How values on the command line are read."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("value", ["", "on", "0", "-1", "1.5", "4097", "٣", "Auto"])
def test_what_is_no_way_to_speculate(value: str) -> None:
    with pytest.raises(UsageProblem, match="not a way to speculate"):
        parse_speculate(value)


def test_text_is_itself_a_file_or_stdin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "prompt.txt"
    path.write_bytes("\ufeffgrüße".encode())
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("aus der Röhre".encode())))
    assert read_text("hello", name="a prompt") == "hello"
    assert read_text(f"@{path}", name="a prompt") == "grüße"
    assert read_text("-", name="a prompt") == "aus der Röhre"


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "latin1.txt").write_bytes("grüße".encode("latin-1"))
    with pytest.raises(UsageProblem, match="No such file"):
        read_text(f"@{tmp_path}/missing.txt", name="a prompt")
    with pytest.raises(UsageProblem, match="directory"):
        read_text(f"@{tmp_path}", name="a prompt")
    with pytest.raises(UsageProblem, match="not UTF-8"):
        read_text(f"@{tmp_path}/latin1.txt", name="a prompt")
