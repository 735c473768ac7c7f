"""A cache as a plain safetensors file that any other tool reads."""

from __future__ import annotations

import contextlib
import errno
import os
import uuid
from dataclasses import dataclass
from pathlib import Path

from lynxkv.choices import Precision
from lynxkv.decoder import load
from lynxkv.errors import StoreError
from lynxkv.fetch import FetchOptions
from lynxkv.kv import kv_to_safetensors
from lynxkv.store import Link, Url
from lynxkv.store.problems import writing


@dataclass(frozen=True, kw_only=True)
class ExportReport:
    """What `export` has written; `precision` is that of the values."""

    url: str
    path: str
    precision: Precision
    tokens: int
    layers: int
    bytes: int


def export(
    url: Url,
    path: str | Path,
    *,
    tokens: int | None = None,
    precision: Precision = "full",
    overwrite: bool = False,
    link: Link | None = None,
    options: FetchOptions | None = None,
) -> ExportReport:
    """Decode the cache at `url` and write `layer.<i>.k`, `layer.<i>.v` [H, T, D] and `token_ids` [T] to `path`.

    `tokens` takes the first so many only. Caches that it continues are written with it. The file appears when it is
    complete.

    Raises:
        InputError: exact precision is asked of a cache that does not hold it, so many tokens cannot be loaded, or
            layers hold unequal tokens.
        StoreError: `path` exists and `overwrite` is false, or cannot be written; the cache cannot be fetched.
        FormatError: the cache is damaged.
    """
    target = Path(path)
    with writing(str(target)):
        if not overwrite and target.exists():
            raise StoreError(f"{target} exists already", hint="give another name, or --force to replace it")
        if target.is_dir():
            raise StoreError(f"cannot write {target}: it is a folder", hint="give the name of a file")
        if not target.parent.is_dir():
            raise StoreError(f"cannot write {target}: there is no such folder", hint="make the folder first")
    kv = load(url, tokens=tokens, precision=precision, link=link, options=options)
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    try:
        kv_to_safetensors(kv, temporary)
        with writing(str(target)):
            if not overwrite and target.exists():
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
            temporary.replace(target)
            size = target.stat().st_size
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
    return ExportReport(
        url=os.fspath(url),
        path=str(target),
        precision=kv.precision or precision,
        tokens=kv.tokens,
        layers=len(kv.layers),
        bytes=size,
    )
