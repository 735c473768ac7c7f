"""Uploads whose first bytes are known last: what is put together is what would be written at once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fsspec.asyn import get_loop, sync

from lynxkv.encoder import encode_shards
from lynxkv.store import Store, uploads
from lynxkv.store.uploads import Upload
from lynxkv.testing.kv import random_kv


class Bucket:
    """What `Upload` asks of s3fs, for one object in memory."""

    s3_additional_kwargs: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self) -> None:
        self.loop = get_loop()
        self.parts: dict[int, bytes] = {}
        self.data: bytes | None = None
        self.started = self.ended = self.most = 0
        self._now = 0

    def split_path(self, path: str) -> tuple[str, str, None]:
        return "bucket", path, None

    def call_s3(self, method: str, settings: dict[str, Any], **what: Any) -> dict[str, Any]:
        return sync(self.loop, self._call_s3, method, settings, **what)  # type: ignore[no-any-return]

    async def _call_s3(self, method: str, settings: dict[str, Any], **what: Any) -> dict[str, Any]:
        if method == "upload_part":
            self._now += 1
            self.most = max(self.most, self._now)
            await asyncio.sleep(0.001)
            self.parts[what["PartNumber"]] = what["Body"]
            self._now -= 1
            return {"ETag": str(what["PartNumber"])}
        if method == "create_multipart_upload":
            self.started += 1
            return {"UploadId": "1"}
        if method == "complete_multipart_upload":
            numbers = [part["PartNumber"] for part in what["MultipartUpload"]["Parts"]]
            assert numbers == sorted(self.parts)
            self.data = b"".join(self.parts[number] for number in numbers)
        if method == "put_object":
            self.data = what["Body"]
        self.ended += method in ("complete_multipart_upload", "abort_multipart_upload")
        return {}

    def invalidate_cache(self, path: str) -> None: ...

    def _parent(self, path: str) -> str:
        return path


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "PART_BYTES", 5_000)
    monkeypatch.setattr(uploads, "SINGLE_BYTES", 6_000)


@pytest.mark.parametrize("codec", ["default", "fixed", "alg1", "raw", "int8"])
@pytest.mark.parametrize("windows", [(None,), (None, 12)])
def test_an_anchor_is_put_together(codec: str, windows: tuple[int | None, ...]) -> None:
    bucket = Bucket()
    upload = Upload(bucket, "a")
    sent: list[int] = []

    def look(what: str, done: int, count: int) -> None:
        if done < count:
            sent.append(len(upload._parts))

    kv = random_kv(layers=5, tokens=300, windows=windows)
    cache = encode_shards(kv, codec=codec, progress=look, on_anchor=upload.write)
    upload.complete(cache.anchor.buffers, create=True)
    assert bucket.data == b"".join(cache.anchor.buffers)
    assert max(sent) >= 2
    assert (bucket.started, bucket.ended) == (1, 1)
    assert 1 < bucket.most <= uploads.PARTS_AT_ONCE


@pytest.mark.parametrize("size", [0, 100, 4_999, 5_000, 6_000, 6_001, 12_000])
def test_objects_of_any_size(size: int) -> None:
    bucket = Bucket()
    upload = Upload(bucket, "a")
    data = bytes(number % 251 for number in range(size))
    buffers = [b"head", *(data[at : at + 700] for at in range(0, size, 700)), b"tail"]
    for buffer in buffers[1:-1]:
        upload.write(buffer)
    upload.complete(buffers, create=False)
    assert bucket.data == b"".join(buffers)
    assert bucket.started == bucket.ended == (size + 8 > 6_000)


def test_parts_grow_before_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "PARTS_OF_A_SIZE", 2)
    bucket = Bucket()
    upload = Upload(bucket, "a")
    buffers = [bytes(1_000) for _ in range(100)]
    for buffer in buffers:
        upload.write(buffer)
    upload.complete(buffers, create=False)
    assert bucket.data == bytes(100_000)
    sizes = [len(bucket.parts[number]) for number in sorted(bucket.parts)]
    assert sizes == [5_000, 5_000, 5_000, 10_000, 10_000, 20_000, 20_000, 25_000]


def test_what_is_given_up_is_ended_once() -> None:
    bucket = Bucket()
    upload = Upload(bucket, "a")
    for _ in range(3):
        upload.write(bytes(5_000))
    upload.abort()
    upload.abort()
    assert (bucket.started, bucket.ended, bucket.data) == (1, 1, None)


def test_uploads_are_for_s3_alone() -> None:
    with Store("memory://a.lynx").starting_anchor() as upload:
        assert upload is None
