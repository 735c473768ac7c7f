"""Errors of backends that are not installed here, by their shape: what is absent, forbidden, worth trying again."""

from __future__ import annotations

import errno
import os
from typing import Any

import fsspec
import pytest

import lynxkv
from lynxkv.fetch import CacheReader, FetchOptions
from lynxkv.store import Store
from lynxkv.store.problems import hint_of, is_lasting, is_past_end, reading, words_of
from lynxkv.testing.filesystem import SimulatedFileSystem, simulated
from lynxkv.testing.kv import random_kv


class GoogleError(Exception):
    """As gcsfs.retry.HttpError: the code may be a number or text."""

    def __init__(self, code: int | str, message: str) -> None:
        super().__init__(f"{message}, {code}")
        self.code = code


class AzureError(Exception):
    """As azure.core.exceptions.HttpResponseError."""

    def __init__(self, status_code: int | None, message: str) -> None:
        super().__init__(f"{message}\nRequestId:1f2e-416\nTime:2026-01-01T00:00:00Z\nErrorCode:AnError")
        self.status_code = status_code


def raised_from(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


ABSENT = raised_from(
    FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "container/a"),
    AzureError(404, "The specified blob does not exist."),
)
UNREACHABLE = raised_from(FileNotFoundError("http://host/a"), ConnectionRefusedError("Connection refused"))
CASES: list[tuple[Exception, bool, str, str]] = [
    (GoogleError(401, "Anonymous caller does not have storage.objects.get access"), True, "Anonymous", "credentials"),
    (GoogleError("503", "We encountered an internal error. Please try again."), False, "internal error", ""),
    (GoogleError(429, "Too many requests"), False, "Too many", "overloaded"),
    (OSError("Forbidden: bucket/a\nme@example.com has no access"), True, "bucket/a me@example.com", "permissions"),
    (AzureError(403, "Server failed to authenticate the request."), True, "authenticate the request.", "AZURE_"),
    (AzureError(404, "The specified container does not exist."), True, "does not exist.", "bucket's name"),
    (AzureError(500, "Server encountered an internal error."), False, "internal error.", ""),
    (AzureError(None, "Cannot connect to host account.blob.example:443"), False, "Cannot connect", "host's name"),
    (Exception("Server returned non-2xx status code: 400 Bad Request: "), True, "400 Bad Request", ""),
    (
        Exception("Server returned non-2xx status code: 500: \n\nDebug source:\nstatus code: 404"),
        False,
        "",
        "",
    ),
]


@pytest.mark.parametrize(("error", "lasting", "words", "hint"), CASES, ids=lambda case: str(case)[:40])
def test_errors_by_their_shape(error: Exception, lasting: bool, words: str, hint: str) -> None:
    assert is_lasting(error) is lasting
    assert not is_past_end(error)
    assert words in words_of(error)
    assert "RequestId" not in words_of(error)
    assert hint in hint_of(error)


def test_an_answer_that_is_cut_off_is_worth_trying_again() -> None:
    """aiohttp gives such an error the code 400, which no server has answered."""
    aiohttp, parsing = pytest.importorskip("aiohttp"), pytest.importorskip("aiohttp.http_exceptions")
    cause = parsing.ContentLengthError("Not enough data to satisfy content length header")
    assert cause.code == 400
    assert not is_lasting(raised_from(aiohttp.ClientPayloadError("Response payload is not completed"), cause))


@pytest.mark.parametrize(("error", "absent"), [(ABSENT, True), (UNREACHABLE, False)])
def test_missing_and_unreachable_are_told_apart(error: Exception, absent: bool) -> None:
    kind = lynxkv.CacheNotFoundError if absent else lynxkv.FetchError
    with pytest.raises(lynxkv.StoreError) as caught, reading("az://container/a.lynx", "anchor.safetensors"):
        raise error
    assert type(caught.value) is kind


@pytest.mark.parametrize(
    "error",
    [
        GoogleError(416, "Request range not satisfiable"),
        AzureError(416, "The range specified is invalid for the current size of the resource."),
        raised_from(OSError("failed"), AzureError(416, "InvalidRange")),
        Exception("Server returned non-2xx status code: 416 Range Not Satisfiable"),
    ],
)
def test_a_range_behind_the_end_is_empty(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_past_end(error)
    stock = SimulatedFileSystem.cat_file

    def strict(self: SimulatedFileSystem, path: str, start: int, end: int, **options: Any) -> bytes:
        if start >= self.info(path)["size"]:
            raise error
        return stock(self, path, start, end, **options)

    with simulated("memory://strict") as far:
        lynxkv.encode(random_kv(), f"{far}/a.lynx")
        monkeypatch.setattr(SimulatedFileSystem, "cat_file", strict)
        with CacheReader(f"{far}/a.lynx", options=FetchOptions(attempts=1), header_only=True) as reader:
            size = reader.bytes_anchor
            assert reader.read("anchor.safetensors", size, size + 10) == b""
        assert Store(f"{far}/a.lynx").read("anchor.safetensors", size + 10, size + 20) == b""
        assert lynxkv.load(f"{far}/a.lynx").tokens == 70
    fsspec.filesystem("memory").rm("/strict", recursive=True)
