"""A file that keeps what a long run has finished, so that it can go on where it stopped."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from lynxkv.errors import InputError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

# Of every line: what does not begin like this is somebody else's.
_BEGIN = b'{"key": "'

T = TypeVar("T", bound="DataclassInstance")


class StateFile(Generic[T]):
    """Finished results by key, one JSON object a line. A last line that was cut short is dropped.

    Args:
        path: None keeps them in memory alone.
        read: makes a result of what `dataclasses.asdict` made of it.

    Raises:
        InputError: the file exists and is not such a file, which is left as it is; or it cannot be written.
    """

    def __init__(self, path: Path | None, read: Callable[[dict[str, Any]], T]) -> None:
        self._path = path
        self._results: dict[str, T] = {}
        if path is None:
            return
        try:
            path.open("ab").close()  # what cannot be kept is told before it is measured
            data = path.read_bytes()
        except OSError as error:
            raise InputError(f"{path} cannot be written: {error.strerror}", hint="name another file") from error
        *whole, rest = data.split(b"\n")
        try:
            for line in whole:
                entry = json.loads(line)
                self._results[entry["key"]] = read(entry["result"])
            if rest[: len(_BEGIN)] != _BEGIN[: len(rest)]:
                raise ValueError("the last line is not one of a state file")
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise InputError(f"{path} is not a state file of this bench", hint="name another file") from error
        if rest:
            os.truncate(path, len(data) - len(rest))

    def get(self, key: str) -> T | None:
        """The finished result of this key."""
        return self._results.get(key)

    def add(self, key: str, result: T) -> None:
        """Keep a result, on disk before anything else is measured."""
        self._results[key] = result
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"key": key, "result": asdict(result)}) + "\n")
