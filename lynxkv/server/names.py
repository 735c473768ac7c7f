"""The names that requests have for caches, confined to the store's root."""

from __future__ import annotations

import re

from lynxkv.server.problems import Refusal
from lynxkv.store import SUFFIX

MAX_NAME = 512
# No part starts with a dot, so none leads up; nothing in a name has a meaning in a URL: no scheme, chain, query, escape
# or glob can be written.
_PART = r"\w[\w.+=@ -]*"
_NAME = re.compile(rf"(?:{_PART}/)*{_PART}{re.escape(SUFFIX)}")


def cache_url(root: str, name: str) -> str:
    """Where the cache of this name is.

    Raises:
        Refusal: the name is not one of a cache under `root`.
    """
    if len(name) > MAX_NAME or not _NAME.fullmatch(name):
        raise Refusal(
            f"{name[:80]!r} is not the name of a cache",
            code="invalid_cache_name",
            param="lynx.cache",
            hint=f"names are relative to the store, such as reports/may{SUFFIX}",
        )
    return f"{root.rstrip('/')}/{name}"
