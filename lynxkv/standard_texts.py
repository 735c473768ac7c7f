"""Long English text and code that every machine with Python has. They differ a little between Python versions."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence

from lynxkv.errors import InputError


def topics(keys: Sequence[str]) -> str:
    """Chapters of the language reference, one after the other.

    Raises:
        InputError: this Python comes without them.
    """
    try:
        texts: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    except ImportError as error:
        raise InputError("this Python has no pydoc_data", hint="give documents of your own") from error
    return "\n\n".join(texts[key] for key in keys if key in texts)


def source(module: str) -> str:
    """The source of a module of the standard library.

    Raises:
        InputError: this Python comes without it.
    """
    try:
        return inspect.getsource(importlib.import_module(module))
    except (ImportError, OSError, TypeError) as error:
        raise InputError(f"this Python has no source of {module}", hint="give documents of your own") from error
