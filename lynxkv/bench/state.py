"""A file that keeps what a long run has finished, so that it can go on where it stopped."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from lynxkv.errors import InputError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")


class StateFile(Generic[T]):
    """Finished results by key, one JSON object a line. A last line that was cut short is dropped.

    Args:
        path: None keeps them in memory alone.
        read: makes a result of what `dataclasses.asdict` made of it.

    Raises:
        InputError: the file exists and is not such a file.
    """

    def __init__(self, path: Path | None, read: Callable[[dict[str, Any]], T]) -> None:
        self._path = path
        self._results: dict[str, T] = {}
        if path is None or not path.exists():
            return
        lines = path.read_text("utf-8").split("\n")
        whole, rest = lines[:-1], lines[-1]
        try:
            for line in whole:
                entry = json.loads(line)
                self._results[entry["key"]] = read(entry["result"])
        except (ValueError, TypeError, KeyError) as error:
            raise InputError(f"{path} is not a state file of this bench", hint="name another file") from error
        if rest:
            path.write_text("".join(f"{line}\n" for line in whole), "utf-8")

    def get(self, key: str) -> T | None:
        """The finished result of this key."""
        return self._results.get(key)

    def add(self, key: str, result: T) -> None:
        """Keep a result, on disk before anything else is measured."""
        self._results[key] = result
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"key": key, "result": asdict(result)}) + "\n")
