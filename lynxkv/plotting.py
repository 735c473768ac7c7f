"""What drawing asks of this machine before any work is done. matplotlib comes with `lynxkv[bench]`."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from lynxkv.errors import InputError

PLOT_SUFFIXES = (".png", ".svg", ".pdf")


def check_matplotlib() -> None:
    """Refuse, with an InputError, a machine without it."""
    if importlib.util.find_spec("matplotlib") is None:
        raise InputError("plots need matplotlib", hint="pip install 'lynxkv[bench]'")


def check_plot(path: Path) -> None:
    """Refuse, with an InputError, a plot that could not be written."""
    check_matplotlib()
    if path.suffix not in PLOT_SUFFIXES:
        raise InputError(f"cannot draw {path}", hint=f"name a file that ends in {', '.join(PLOT_SUFFIXES)}")
    check_writable(path)


def check_writable(path: Path) -> None:
    """Refuse, with an InputError, a file that could not be written."""
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise InputError(f"cannot write {path}", hint="name a file in a folder that can be written")
