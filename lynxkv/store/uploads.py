"""Objects on S3 that are uploaded while they come into being: several parts at a time, the first one last.

A shard begins with a header that holds the digests of all that follows. So what follows is sent as soon as it is there,
but for its first piece, which waits for the header and goes with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

from lynxkv.format.write import Buffer
from lynxkv.store.problems import s3_code

# S3 wants parts of at least 5 MiB, and takes 10,000; so they grow, to over 1 TiB together.
PART_BYTES = 8 << 20
PARTS_OF_A_SIZE = 1200
PARTS_AT_ONCE = 4
# S3 takes this much in one request, but one that fails is sent again as a whole.
SINGLE_BYTES = 16 << 20
UNKNOWN = ("AccessDenied", "MethodNotAllowed", "NotImplemented")
REFUSED = ("PreconditionFailed", "ConditionalRequestConflict")


class Upload:
    """One object on S3, which appears when `complete` returns; takes the memory of `PARTS_AT_ONCE` parts meanwhile."""

    def __init__(self, fs: Any, path: str) -> None:
        self.fs, self.path = fs, path
        bucket, key, _ = fs.split_path(path)
        self._object = {"Bucket": bucket, "Key": key}
        self._id: str | None = None
        self._parts: list[Future[dict[str, Any]]] = []
        self._written: list[Buffer] = []
        self._first: list[Buffer] = []  # goes with what is before it
        self._next: list[Buffer] = []

    def write(self, buffer: Buffer) -> None:
        """Add bytes behind those before; waits while enough parts are on their way.

        Raises what the server answers to an earlier part.
        """
        self._written.append(buffer)
        if _size(self._first) < PART_BYTES:
            self._first.append(buffer)
            return
        self._next.append(buffer)
        if _size(self._next) >= PART_BYTES << len(self._parts) // PARTS_OF_A_SIZE:
            self._send(len(self._parts) + 2, self._next)
            self._next = []

    def complete(self, buffers: Sequence[Buffer], *, create: bool) -> None:
        """Let the object appear. `buffers` are all of it: what was written is among them, in one piece.

        Raises:
            FileExistsError: `create`, and there is one already.
        """
        before = len(buffers)
        if self._written:
            before = next(number for number, buffer in enumerate(buffers) if buffer is self._written[0])
        behind = before + len(self._written)
        assert all(len(one) == len(other) for one, other in zip(buffers[before:behind], self._written, strict=True))
        for buffer in buffers[behind:]:
            self.write(buffer)
        first = [*buffers[:before], *self._first]
        try:
            if self._id is None and _size(first) + _size(self._next) <= SINGLE_BYTES:
                self._conditionally("put_object", create=create, Body=b"".join([*first, *self._next]))
            else:
                if self._next:
                    self._send(len(self._parts) + 2, self._next)
                self._send(1, first)
                self._finish(create=create)
        except BaseException:
            self.abort()
            raise
        self._id = None
        self.fs.invalidate_cache(self.fs._parent(self.path))

    def abort(self) -> None:
        """Give it up, and what has been sent; nothing once it is complete."""
        for part in self._parts:
            part.cancel()
        if self._id is not None:
            with contextlib.suppress(Exception):
                self._call("abort_multipart_upload", UploadId=self._id)
            self._id = None

    def _send(self, number: int, buffers: list[Buffer]) -> None:
        if self._id is None:
            self._id = self._call("create_multipart_upload")["UploadId"]
        under_way = [part for part in self._parts if not part.done()]
        if len(under_way) >= PARTS_AT_ONCE:
            wait(under_way, return_when="FIRST_COMPLETED")
        for part in self._parts:
            if part.done():
                part.result()
        work = self._send_part(number, self._id, b"".join(buffers))
        self._parts.append(asyncio.run_coroutine_threadsafe(work, self.fs.loop))

    async def _send_part(self, number: int, upload_id: str, body: bytes) -> dict[str, Any]:
        what = {**self._object, "UploadId": upload_id, "PartNumber": number, "Body": body}
        answer = await self.fs._call_s3("upload_part", self.fs.s3_additional_kwargs, **what)
        sums = {name: value for name, value in answer.items() if name.startswith("Checksum") and name != "ChecksumType"}
        return {"PartNumber": number, "ETag": answer["ETag"], **sums}

    def _finish(self, *, create: bool) -> None:
        parts = sorted((part.result() for part in self._parts), key=lambda part: int(part["PartNumber"]))
        self._conditionally(
            "complete_multipart_upload", create=create, UploadId=self._id, MultipartUpload={"Parts": parts}
        )

    def _conditionally(self, method: str, *, create: bool, **what: Any) -> None:
        """Call S3; with `create` on condition that there is no such object yet."""
        if not create:
            self._call(method, **what)
            return
        try:
            self._call(method, **what, IfNoneMatch="*")
        except Exception as error:
            if s3_code(error) in REFUSED:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), self.path) from error
            if s3_code(error) != "NotImplemented":
                raise
            if self.fs.exists(self.path):  # of a server that knows no conditions
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), self.path) from error
            self._call(method, **what)

    def _call(self, method: str, **what: Any) -> dict[str, Any]:
        """Call S3 with what s3fs was told to send along."""
        answer: dict[str, Any] = self.fs.call_s3(method, self.fs.s3_additional_kwargs, **self._object, **what)
        return answer


@dataclass(frozen=True, kw_only=True)
class Unfinished:
    """An upload to S3 that has been started and not completed; `path` as fsspec has it, `started_s` since the epoch."""

    path: str
    upload_id: str
    started_s: float

    def bytes(self, fs: Any) -> int:
        """What has been sent of it, and is stored for nobody to read."""
        bucket, key, _ = fs.split_path(self.path)
        parts = fs.call_s3("list_parts", Bucket=bucket, Key=key, UploadId=self.upload_id).get("Parts", [])
        return sum(int(part["Size"]) for part in parts)

    def abort(self, fs: Any) -> None:
        """End it, whoever has started it."""
        bucket, key, _ = fs.split_path(self.path)
        fs.call_s3("abort_multipart_upload", Bucket=bucket, Key=key, UploadId=self.upload_id)


def unfinished(fs: Any, path: str) -> Iterator[Unfinished]:
    """Uploads at or below `path` that have not been completed; none where a store has, or tells of, no such thing."""
    if not hasattr(fs, "call_s3"):
        return
    bucket, prefix, _ = fs.split_path(path)
    page: dict[str, Any] = {}
    while True:
        try:
            answer = fs.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=prefix, **page)
        except Exception as error:
            if s3_code(error) in UNKNOWN:
                return
            raise
        for item in answer.get("Uploads", []):
            if prefix and item["Key"] != prefix and not item["Key"].startswith(f"{prefix}/"):
                continue
            yield Unfinished(
                path=f"{bucket}/{item['Key']}", upload_id=item["UploadId"], started_s=item["Initiated"].timestamp()
            )
        if not answer.get("IsTruncated"):
            return
        page = {"KeyMarker": answer["NextKeyMarker"], "UploadIdMarker": answer["NextUploadIdMarker"]}


def _size(buffers: Sequence[Buffer]) -> int:
    return sum(map(len, buffers))
