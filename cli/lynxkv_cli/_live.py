"""Text in a terminal whose last part is still a draft: dimmed, replaced in place, solid once it is verified.

Verified text is written once and scrolls away as usual. What follows it (draft, rejected draft, a status
line) is the *region*: it is erased and drawn again at every change. To erase it the cursor must find its way
back to the end of the verified text, so the rows and columns of a terminal's own wrapping are computed here.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from typing import TextIO

from rich.cells import cell_len

from lynxkv_cli._output import printable

DIM, STRUCK, PLAIN = "\x1b[2m", "\x1b[9;31m", "\x1b[0m"
ERASE_TO_END = "\x1b[J"


@dataclass(frozen=True)
class Position:
    """Where a cursor is, in rows below some start and columns from the left edge."""

    row: int
    column: int

    def after(self, text: str, width: int) -> Position:
        """The position after `text`, `width` columns a row; at the very edge it is still on the old row."""
        row, column = self.row, self.column
        for character in text:
            if character == "\n":
                row, column = row + 1, 0
                continue
            cells = cell_len(character)
            if column + cells > width:
                row, column = row + 1, 0
            column += cells
        return Position(row, column)


class LiveText:
    """Verified text with a region behind it, on a terminal that takes ANSI sequences."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._column = 0
        self._drawn = ""
        self._draft = ""
        self._rejected = ""
        self._status = ""

    def verify(self, text: str) -> None:
        """Append verified text, taking its place from the draft where the draft foresaw it."""
        text = printable(text)
        if self._draft.startswith(text):
            self._draft = self._draft[len(text) :]
        else:
            self._draft = ""
        self._rejected = ""
        self._redraw(text)

    def draft(self, text: str) -> None:
        """Append text that may yet be replaced."""
        self._rejected = ""
        self._draft += printable(text)
        self._redraw()

    def replace(self, text: str) -> None:
        """Put other text that may yet be replaced in the place of the draft."""
        self._rejected = ""
        self._draft = printable(text)
        self._redraw()

    def reject(self, text: str) -> None:
        """Show that the rest of the draft was wrong; it goes at the next change."""
        self._draft = ""
        self._rejected = printable(text)
        self._redraw()

    def status(self, text: str) -> None:
        """Show a line below the text; empty for none."""
        if text != self._status:
            self._status = text
            self._redraw()

    def finish(self) -> None:
        """Leave only the verified text, and the cursor on a new line."""
        self._draft = self._rejected = self._status = ""
        self._redraw()
        if self._column:
            self._stream.write("\n")
        self._stream.flush()

    def _redraw(self, verified: str = "") -> None:
        width, height = shutil.get_terminal_size()
        out = [self._erasure(width), verified]
        self._column = Position(0, self._column).after(verified, width).column
        if self._column >= width:
            out.append(" \r")  # The cursor waits past the edge; a blank makes it wrap, whatever comes next.
            self._column = 0
        draft = self._fitting(self._rejected or self._draft, width, height - 2)
        if draft:
            out += [STRUCK if self._rejected else DIM, draft, PLAIN]
        status = self._status[: width - 1]
        if status:
            out += ["\r\n", DIM, status, PLAIN]
        self._drawn = draft + ("\n" + status if status else "")
        self._stream.write("".join(out))
        self._stream.flush()

    def _erasure(self, width: int) -> str:
        if not self._drawn:
            return ""
        rows = Position(0, self._column).after(self._drawn, width).row
        up = f"\x1b[{rows}A" if rows else ""
        right = f"\x1b[{self._column}C" if self._column else ""
        return f"{up}\r{right}{ERASE_TO_END}"

    def _fitting(self, text: str, width: int, rows: int) -> str:
        """As much of `text` as fits in `rows`: a region taller than the terminal could not be erased."""
        while text and Position(0, self._column).after(text, width).row >= rows:
            text = text[: -width or None].rstrip("\n")
        return text
