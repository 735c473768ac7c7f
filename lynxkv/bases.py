"""Where bases are found: among this user's own, and beside the caches that name them. Imports no torch."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from operator import itemgetter
from pathlib import Path

from lynxkv.errors import ChecksumError, FetchError, FormatError, InputError
from lynxkv.format.basis import Basis, parse_basis
from lynxkv.format.document import basis_file
from lynxkv.format.limits import MAX_BASIS_BYTES
from lynxkv.format.write import Shard
from lynxkv.home import cache_home
from lynxkv.layout import TransformRef
from lynxkv.store import Store
from lynxkv.store.files import open_plain
from lynxkv.store.writers import LocalWriter

CALIBRATE_HINT = "make one with: lynxkv calibrate --model MODEL"


def bases_folder() -> Path:
    """The folder of this user's bases."""
    return cache_home() / "bases"


def fetched_folder() -> Path:
    """The folder of those that came with caches: good for reading them, but no cache is encoded with what anybody
    may have put beside one.
    """
    return bases_folder() / "fetched"


def load_basis(path: str | os.PathLike[str]) -> Basis:
    """The basis in a file.

    Raises:
        InputError: the file cannot be read.
        FormatError: it is not a basis.
    """
    try:
        data = _read(Path(path))
    except FetchError as error:
        raise InputError(f"cannot read the basis {path}: it is not a plain file", hint=CALIBRATE_HINT) from error
    except OSError as error:
        raise InputError(f"cannot read the basis {path}: {error.strerror}", hint=CALIBRATE_HINT) from error
    return parse_basis(data, what=str(path))


def save_basis(basis: Basis, path: str | os.PathLike[str] | None = None) -> Path:
    """Write a basis to `path`, or among this user's own; whole or not at all.

    Raises:
        InputError: the file cannot be written.
    """
    target = Path(path) if path is not None else bases_folder() / basis.ref.name
    with _writing(target, named=path is not None):
        LocalWriter(target.parent).put(target.name, (basis.data,), overwrite=True)
    return target


def check_savable(path: str | os.PathLike[str] | None = None) -> None:
    """Raise the InputError of `save_basis` before there is a basis, as far as it shows beforehand."""
    folder = Path(path).parent if path is not None else bases_folder()
    with _writing(Path(path or folder), named=path is not None):
        if path is not None and Path(path).is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        LocalWriter(folder).probe()


def keep_fetched(basis: Basis) -> None:
    """Keep a basis that came with a cache.

    Raises:
        InputError: it cannot be written.
    """
    save_basis(basis, fetched_folder() / basis.ref.name)


def find_basis(fingerprint: str | None) -> Basis | None:
    """The newest of this user's bases for the model with this fingerprint, if that is known; damaged files are passed
    over.
    """
    if fingerprint is None:
        return None
    for _, path in sorted(_dated_files(bases_folder()), key=itemgetter(0), reverse=True):
        try:
            basis = load_basis(path)
        except (FormatError, InputError):
            continue
        if basis.fingerprint == fingerprint and path.name == basis.ref.name:
            return basis
    return None


def basis_of(fingerprint: str | None) -> Basis:
    """The newest of this user's bases for the model with this fingerprint.

    Raises:
        InputError: there is none, or the model is not known.
    """
    basis = find_basis(fingerprint)
    if basis is None:
        raise InputError("the codec needs a basis of the model", hint=CALIBRATE_HINT)
    return basis


def known_basis(ref: TransformRef) -> Basis | None:
    """The basis that a cache names, if it is among this user's own or has come with another cache, undamaged."""
    for path in (bases_folder() / ref.name, fetched_folder() / ref.name):
        try:
            return checked_basis(_read(path), ref, what=str(path))
        except (OSError, FetchError, FormatError):
            continue
    return None


def checked_basis(data: bytes, ref: TransformRef, *, what: str) -> Basis:
    """A basis from bytes that have to be those of `ref`.

    Raises:
        ChecksumError: they are not.
        FormatError: they are, and no basis all the same.
    """
    if len(data) != ref.bytes or hashlib.sha256(data).hexdigest() != ref.sha256:
        raise ChecksumError(f"{what}: is not the basis that the cache names", hint="it is damaged; copy it again")
    return parse_basis(data, what=what)


def bases_beside(store: Store) -> Store:
    """The folder or prefix that a cache lies in, where its basis is published."""
    return Store.of_folder(store.folder or ".")


def publish_basis(basis: Basis, store: Store) -> None:
    """Put a basis beside the cache at `store`, unless it is there, undamaged.

    Raises:
        StoreError: it cannot be written, or what is there cannot be read.
    """
    beside, digest = bases_beside(store), basis.sha256
    shard = Shard(buffers=(basis.data,), bytes=len(basis.data), header_bytes=0, header_sha256=digest)
    beside.put(basis_file(digest), shard)


@contextmanager
def _writing(target: Path, *, named: bool) -> Iterator[None]:
    """What fails in the words of this tool; `named`: by the user, or else among this user's own."""
    try:
        yield
    except OSError as error:
        hint = "give another --out" if named else "set LYNXKV_HOME to a writable folder"
        raise InputError(f"cannot write the basis {target}: {error.strerror}", hint=hint) from error


def _read(path: Path) -> bytes:
    """A whole file, at least as far as that could be a basis.

    Raises:
        OSError: it cannot be read.
        FetchError: it is no plain file.
    """
    file = open_plain(path)
    try:
        return file.read(0, min(file.size(), MAX_BASIS_BYTES))
    finally:
        file.close()


def _dated_files(folder: Path) -> Iterator[tuple[float, Path]]:
    """Bases of a folder, each with the time that it was written at; those that others take away meanwhile left out."""
    try:
        paths = list(folder.glob("basis-*.safetensors"))
    except OSError:
        return
    for path in paths:
        try:
            yield path.stat().st_mtime, path
        except OSError:
            continue
