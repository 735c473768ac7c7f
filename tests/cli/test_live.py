"""The live text on an emulated terminal: what a person sees, wrapping and scrolling included."""

from __future__ import annotations

import io
import random

import pyte
import pytest

from lynxkv_cli._live import LiveText, Position
from lynxkv_cli._output import printable


class Terminal(io.StringIO):
    """A stream that draws on an emulated screen, as a terminal in its usual line discipline does."""

    def __init__(self, columns: int, lines: int) -> None:
        super().__init__()
        self.screen = pyte.HistoryScreen(columns, lines, history=1000, ratio=1.0)
        self.screen.set_mode(pyte.modes.LNM)
        self.feed = pyte.Stream(self.screen)

    def write(self, text: str) -> int:
        self.feed.feed(text.replace("\x1b[2m", "\x1b[3m"))  # The emulator knows italics, but not dim.
        return len(text)

    def lines(self) -> list[str]:
        """All lines, those scrolled away included, without empty ones at the end."""
        columns = self.screen.columns
        scrolled = ["".join(line[x].data for x in range(columns)) for line in self.screen.history.top]
        lines = [line.rstrip() for line in scrolled + list(self.screen.display)]
        while lines and not lines[-1]:
            lines.pop()
        return lines

    def marked(self, attribute: str) -> str:
        """The characters on the screen that have this attribute."""
        rows = self.screen.buffer
        cells = (rows[y][x] for y in range(self.screen.lines) for x in range(self.screen.columns))
        return "".join(cell.data for cell in cells if getattr(cell, attribute))


def wrapped(text: str, columns: int) -> list[str]:
    """`text` as a terminal wraps it."""
    return [line[i : i + columns].rstrip() for line in text.split("\n") for i in range(0, max(len(line), 1), columns)]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setenv("LINES", "8")
    return Terminal(20, 8)


def test_a_draft_is_dim_until_verified(terminal: Terminal) -> None:
    live = LiveText(terminal)
    live.draft("The answer")
    assert terminal.marked("italics").replace(" ", "") == "Theanswer"
    live.verify("The")
    assert terminal.marked("italics").replace(" ", "") == "answer"
    live.verify(" answer")
    live.finish()
    assert terminal.lines() == ["The answer"]
    assert terminal.marked("italics") == ""


def test_wrong_tokens_are_struck_through_then_replaced(terminal: Terminal) -> None:
    live = LiveText(terminal)
    live.draft("It is Tuesday today")
    live.verify("It is")
    live.reject(" Tuesday today")
    assert terminal.marked("strikethrough").replace(" ", "") == "Tuesdaytoday"
    live.verify(" Monday")
    live.finish()
    assert terminal.lines() == ["It is Monday"]


def test_provisional_text_takes_the_place_of_the_draft(terminal: Terminal) -> None:
    live = LiveText(terminal)
    live.draft("It is Tuesday today")
    live.reject(" Tuesday today")
    live.replace("It is Monday")
    live.draft(" again")
    assert terminal.marked("strikethrough") == ""
    assert terminal.marked("italics").replace(" ", "") == "ItisMondayagain"
    live.verify("It is Monday")
    live.finish()
    assert terminal.lines() == ["It is Monday"]


def test_the_status_line_goes_below_and_leaves_nothing(terminal: Terminal) -> None:
    live = LiveText(terminal)
    live.status("anchor 40 %")
    live.draft("Yes")
    live.status("residual 10 %")
    assert terminal.lines() == ["Yes", "residual 10 %"]
    live.verify("Yes")
    live.finish()
    assert terminal.lines() == ["Yes"]


@pytest.mark.parametrize("length", [19, 20, 21, 39, 40, 41])
def test_text_that_ends_at_the_edge(terminal: Terminal, length: int) -> None:
    text = "abcdefghij" * 5
    live = LiveText(terminal)
    live.verify(text[:length])
    live.draft("XYZ" * 9)
    live.status("status")
    live.verify(text[length:])
    live.finish()
    assert terminal.lines() == wrapped(text, 20)


def test_a_draft_taller_than_the_screen_is_cut(terminal: Terminal) -> None:
    live = LiveText(terminal)
    live.verify("one two ")
    for number in range(100):
        live.draft(f"word{number} ")
    live.verify("three")
    live.finish()
    assert terminal.lines() == ["one two three"]


@pytest.mark.parametrize("seed", range(30))
def test_any_sequence_ends_as_the_verified_text(terminal: Terminal, seed: int) -> None:
    rng = random.Random(seed)
    live = LiveText(terminal)
    verified = ""
    for _ in range(60):
        piece = "".join(rng.choice("abc \n") for _ in range(rng.randrange(1, 30)))
        match rng.randrange(5):
            case 0:
                live.verify(piece)
                verified += piece
            case 1:
                live.reject(piece)
            case 2:
                live.status("s" * rng.randrange(40))
            case _:
                live.draft(piece)
    live.finish()
    expected = wrapped(verified, 20)
    while expected and not expected[-1]:
        expected.pop()
    assert terminal.lines() == expected


def test_wide_characters_wrap_as_a_whole() -> None:
    assert Position(0, 0).after("漢" * 5, 9) == Position(1, 2)


def test_a_model_cannot_send_escape_sequences() -> None:
    assert printable("a\x1b[2Jb\x07\x9bc\r\n\td\u202ee") == "a[2Jbc\n    de"
