"""One measured cell of the bench, and the file that keeps finished ones so that a long run can go on."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lynxkv.bench.measure import Fidelity, LayerError
from lynxkv.bench.stored import Sizes
from lynxkv.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One method on one document at one length. `anchor` is `full` where there is only one precision.

    `target_tokens` is by prompt the length of the original's continuation: the most that can be accepted.
    """

    codec: str
    document: str
    tokens: int
    elements: int
    sizes: Sizes
    draft_tokens: int
    target_tokens: list[int]
    anchor: Fidelity
    full: Fidelity
    exact: Fidelity | None = None


class CellFile:
    """Finished cells by key, one JSON object a line. A last line that was cut short is dropped.

    Raises:
        InputError: the file exists and is not such a file.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._cells: dict[str, Cell] = {}
        if path is None or not path.exists():
            return
        lines = path.read_text("utf-8").split("\n")
        whole, rest = lines[:-1], lines[-1]
        try:
            for line in whole:
                entry = json.loads(line)
                self._cells[entry["key"]] = _cell(entry["cell"])
        except (ValueError, TypeError, KeyError) as error:
            raise InputError(f"{path} is not a state file of this bench", hint="name another file") from error
        if rest:
            path.write_text("".join(f"{line}\n" for line in whole), "utf-8")

    def get(self, key: str) -> Cell | None:
        """The finished cell of this key."""
        return self._cells.get(key)

    def add(self, key: str, cell: Cell) -> None:
        """Keep a cell, on disk before anything else is measured."""
        self._cells[key] = cell
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"key": key, "cell": asdict(cell)}) + "\n")


def _cell(value: dict[str, Any]) -> Cell:
    fields = {**value, "sizes": Sizes(**value["sizes"])}
    for precision in ("anchor", "full", "exact"):
        if value[precision] is None:
            continue
        layers = [
            LayerError(**{name: (pair[0], pair[1]) for name, pair in layer.items()})
            for layer in value[precision]["layers"]
        ]
        fields[precision] = Fidelity(**{**value[precision], "layers": layers})
    return Cell(**fields)
