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
from lynxkv.store.uploads import Upload

try:
    import fcntl
except ImportError:
    fcntl = None  # type: ignore[assignment]

# What `os.link` fails with where hard links are not to be had: FAT, some network and container mounts.
NO_LINKS = frozenset({errno.EPERM, errno.EACCES, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})
# A claim is held for one rename.
CLAIM_S = 10.0


class Writer(Protocol):
    """Writes the objects of one cache."""

    def probe(self) -> None:
        """Fail with what writing would fail with, as far as that shows beforehand."""
        ...

    def put(self, name: str, buffers: Iterable[Buffer], *, overwrite: bool) -> None:
        """Write one object, whole or not at all; FileExistsError if it is there and `overwrite` is false."""
        ...

    def start(self, name: str) -> Upload | None:
        """Start to write an object whose first bytes are not known yet, where that is of use."""
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

    def start(self, name: str) -> Upload | None:
        return None

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

    def start(self, name: str) -> Upload | None:
        return None

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

    def start(self, name: str) -> Upload | None:
        return None

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.fs.rm_file(f"{self.path}/{name}")


class S3Writer(ObjectWriter):
    """Objects on S3: large ones in parts, and created on condition that nobody else has created them."""

    def probe(self) -> None:
        # What needs the same permissions as writing, and leaves nothing.
        bucket, key, _ = self.fs.split_path(f"{self.path}/{_temporary('probe')}")
        upload = self.fs.call_s3("create_multipart_upload", Bucket=bucket, Key=key)
        self.fs.call_s3("abort_multipart_upload", Bucket=bucket, Key=key, UploadId=upload["UploadId"])

    def start(self, name: str) -> Upload | None:
        if self.fs.fixed_upload_size:  # a server that wants parts of one size: what comes first would have another
            return None
        return Upload(self.fs, f"{self.path}/{name}")

    def put(self, name: str, buffers: Iterable[Buffer], *, overwrite: bool) -> None:
        upload = self.start(name)
        if upload is None:
            super().put(name, buffers, overwrite=overwrite)
            return
        buffers = list(buffers)
        try:
            for buffer in buffers:
                upload.write(buffer)
        except BaseException:
            upload.abort()
            raise
        upload.complete(buffers, create=not overwrite)


def _temporary(name: str) -> str:
    return f".{name}.{uuid.uuid4().hex}"


def _upload(fs: Any, path: str, buffers: Iterable[Buffer]) -> None:
    # Leaving the `with` block of a buffered fsspec file completes it, whatever the reason for leaving.
    file = fs.open(path, "wb")
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
    """Keep other writers of `final` out. The claim is a lock, which ends with whoever holds it, however that is.

    Raises:
        TimeoutError: another writer holds it, for longer than a rename takes.
    """
    if fcntl is None:  # where renaming does not replace what is there
        yield
        return
    claim, until = final.parent / f".{final.name}.claim", time.monotonic() + CLAIM_S
    while True:
        with claim.open("ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > until:
                    raise TimeoutError(f"another writer holds {claim} and does not go on") from None
                time.sleep(0.005)
                continue
            try:
                if not _is_at(file, claim):  # the one before has removed it
                    continue
                yield
                return
            finally:
                if _is_at(file, claim):
                    claim.unlink()


def _is_at(file: BinaryIO, path: Path) -> bool:
    """Whether an open file still has this name."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    return False


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
