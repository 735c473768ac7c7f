"""One measured cell of `lynxkv bench codec`, and the file that keeps finished ones."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lynxkv.bench.measure import Fidelity, LayerError
from lynxkv.bench.state import StateFile
from lynxkv.bench.stored import Sizes


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


class CellFile(StateFile[Cell]):
    """Finished cells by key."""

    def __init__(self, path: Path | None) -> None:
        super().__init__(path, _cell)


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
