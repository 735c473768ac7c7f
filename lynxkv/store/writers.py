"""How an object comes into a store so that nobody sees half of it.

local    written beside its final name, flushed, then linked or moved there
moved    other file systems with folders (sftp, smb, memory): the same, through fsspec
s3       an object appears when its upload completes, which may be made conditional
object   other object stores: without the condition
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
import time
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.local import LocalFileSystem

from lynxkv.format.write import Buffer
from lynxkv.store.problems import s3_code

# What `os.link` fails with where hard links are not to be had: FAT, some network and container mounts.
NO_LINKS = frozenset({errno.EPERM, errno.EACCES, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})
# A claim is held for one rename. One as old as this belongs to a writer that was killed.
STALE_CLAIM_S = 60.0


class Writer(Protocol):
    """Writes the objects of one cache."""

    def probe(self) -> None:
        """Fail with what writing would fail with, as far as that shows beforehand."""
        ...

    def put(self, name: str, buffers: Iterable[Buffer], *, overwrite: bool) -> None:
        """Write one object, whole or not at all; FileExistsError if it is there and `overwrite` is false."""
        ...

    def remove(self, name: str) -> None:
        """Remove one object that this writer has put."""
        ...


def writer_for(fs: Any, path: str) -> Writer:
    """The writer that suits a file system."""
    if isinstance(fs, LocalFileSystem):
        return LocalWriter(Path(path))
    if not isinstance(fs, AsyncFileSystem):
        return MovingWriter(fs, path)
    return S3Writer(fs, path) if hasattr(fs, "call_s3") else ObjectWriter(fs, path)


class LocalWriter:
    """Objects of a folder on this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def probe(self) -> None:
        existing = next(path for path in (self.folder, *self.folder.parents) if path.exists())
        with tempfile.TemporaryFile(dir=existing):
            pass

    def put(self, name: str, buffers: Iterable[Buffer], *, overwrite: bool) -> None:
        temporary = self.folder / _temporary(name)
        try:
            with _create(temporary) as file:
                for buffer in buffers:
                    file.write(buffer)
                file.flush()
                os.fsync(file.fileno())
            if overwrite:
                temporary.replace(self.folder / name)
            else:
                _place(temporary, self.folder / name)
            _flush_folder(self.folder)
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink()
            self._tidy()

    def remove(self, name: str) -> None:
        (self.folder / name).unlink(missing_ok=True)
        self._tidy()

    def _tidy(self) -> None:
        with contextlib.suppress(OSError):
            self.folder.rmdir()  # succeeds only if nothing was published


class MovingWriter:
    """Objects on a file system whose files can be seen while they grow, but can be moved."""

    def __init__(self, fs: Any, path: str) -> None:
        self.fs, self.path = fs, path

    def probe(self) -> None:
        existing = self.path
        while existing and not self.fs.exists(existing):
            existing = self.fs._parent(existing)
        file = f"{existing}/{_temporary('probe')}"
        self.fs.pipe_file(file, b"")
        self.fs.rm_file(file)

    def put(self, name: str, buffers: Iterable[Buffer], *, overwrite: bool) -> None:
        final, temporary = f"{self.path}/{name}", f"{self.path}/{_temporary(name)}"
        self.fs.makedirs(self.path, exist_ok=True)
        try:
            _upload(self.fs, temporary, buffers)
            if not overwrite and self.fs.exists(final):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), final)
            self.fs.mv(temporary, final)
        except BaseException:
            with contextlib.suppress(Exception):
                self.fs.rm_file(temporary)
            raise

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.fs.rm_file(f"{self.path}/{name}")


class ObjectWriter:
    """Objects that appear when their upload completes."""

    def __init__(self, fs: Any, path: str) -> None:
        self.fs, self.path = fs, path

    def probe(self) -> None:
        _discard(self.fs.open(f"{self.path}/{_temporary('probe')}", "wb"))  # read-only stores refuse, none is asked

    def put(self, name: str, buffers: Iterable[Buffer], *, overwrite: bool) -> None:
        final = f"{self.path}/{name}"
        if not overwrite and self.fs.exists(final):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), final)
        _upload(self.fs, final, buffers)

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.fs.rm_file(f"{self.path}/{name}")


class S3Writer(ObjectWriter):
    """Objects on S3: in parts above 50 MiB, and created on condition that nobody else has created them."""

    def probe(self) -> None:
        # What needs the same permissions as writing, and leaves nothing.
        bucket, key, _ = self.fs.split_path(f"{self.path}/{_temporary('probe')}")
        upload = self.fs.call_s3("create_multipart_upload", Bucket=bucket, Key=key)
        self.fs.call_s3("abort_multipart_upload", Bucket=bucket, Key=key, UploadId=upload["UploadId"])

    def put(self, name: str, buffers: Iterable[Buffer], *, overwrite: bool) -> None:
        if overwrite:
            super().put(name, buffers, overwrite=True)
            return
        try:
            _upload(self.fs, f"{self.path}/{name}", buffers, mode="xb")
        except Exception as error:
            if s3_code(error) in ("PreconditionFailed", "ConditionalRequestConflict"):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), name) from error
            if s3_code(error) != "NotImplemented":
                raise
            super().put(name, buffers, overwrite=False)  # a server that knows no conditions


def _temporary(name: str) -> str:
    return f".{name}.{uuid.uuid4().hex}"


def _upload(fs: Any, path: str, buffers: Iterable[Buffer], mode: str = "wb") -> None:
    # Leaving the `with` block of a buffered fsspec file completes it, whatever the reason for leaving.
    file = fs.open(path, mode)
    try:
        for buffer in buffers:
            file.write(buffer)
    except BaseException:
        _discard(file)
        raise
    try:
        file.close()
    except BaseException:
        _discard(file)
        raise


def _discard(file: Any) -> None:
    with contextlib.suppress(Exception):
        file.discard()
    file.closed = True


def _create(path: Path) -> BinaryIO:
    """A new file in a folder that another writer may be removing because its own attempt failed."""
    for _ in range(3):
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            return path.open("xb")
    return path.open("xb")


def _place(temporary: Path, final: Path) -> None:
    """Give a file its final name, unless somebody else has it."""
    try:
        os.link(temporary, final)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        with _claimed(final):
            if final.exists():
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(final)) from error
            temporary.rename(final)


@contextlib.contextmanager
def _claimed(final: Path) -> Iterator[None]:
    """Keep other writers of `final` out, where only creating a file is atomic."""
    claim = final.parent / f".{final.name}.claim"
    with contextlib.suppress(FileNotFoundError):
        if time.time() - claim.stat().st_mtime > STALE_CLAIM_S:
            claim.unlink()
    os.close(os.open(claim, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    try:
        yield
    finally:
        claim.unlink(missing_ok=True)


def _flush_folder(folder: Path) -> None:
    """Make new names in `folder`, and the folder's own, survive a crash. Some systems cannot: Windows, some mounts."""
    for path in (folder, folder.parent):
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except OSError:
            continue
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
                raise
        finally:
            os.close(descriptor)
