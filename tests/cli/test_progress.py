"""Progress outside a terminal: lines of what takes long, and none of what does not."""

from __future__ import annotations

from lynxkv_cli._output import LINE_EVERY_S, lines_now_and_then


def test_lines_come_no_sooner_than_they_should() -> None:
    now, lines = 0.0, list[str]()
    tell = lines_now_and_then(lines.append, lambda: now)
    for done in range(41):
        now = done * LINE_EVERY_S / 16
        tell("prefill", done, 40)
    tell("prefill", 40, 40)
    assert lines == [f"prefill: {done} of 40" for done in (16, 32, 40)]


def test_what_is_short_says_nothing() -> None:
    lines = list[str]()
    tell = lines_now_and_then(lines.append, lambda: 7.0)
    for done in range(40):
        tell("quantise", done, 40)
    assert not lines
