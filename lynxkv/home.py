"""Where lynxkv keeps what it has made for later: converted models, bases."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def cache_home() -> Path:
    """`$LYNXKV_HOME`, or `lynxkv` in the platform's cache folder."""
    if home := os.environ.get("LYNXKV_HOME"):
        return Path(home).expanduser()
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local")) / "lynxkv"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "lynxkv"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lynxkv"
