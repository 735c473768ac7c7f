"""What a file system raised, in words for people: every backend has errors of its own."""

from __future__ import annotations

import contextlib
import difflib
import errno
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fsspec.registry import available_protocols

from lynxkv.errors import CacheExistsError, CacheNotFoundError, FetchError, InputError, LynxError, StoreError

# Packages that pyproject.toml has an extra for.
EXTRAS = {"s3": "s3", "s3a": "s3", "http": "http", "https": "http"}
USUAL = ("s3", "http", "https", "gs", "az", "sftp", "memory")

# Request timeout, too early, too many requests; 5xx are retried anyway.
WORTH_RETRYING = frozenset({408, 425, 429})
LASTING = (
    FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError,
    ValueError, TypeError, AttributeError, ImportError, NotImplementedError,
)  # fmt: skip
OF_PATHS = (errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP, errno.EISDIR, errno.ENOTDIR, errno.EINVAL, errno.ENODEV)
# What the errors of obstore and of Azure's client go on with is for their authors.
QUOTED_UNTIL = re.compile(r"(?s)(.*?)(?:Debug source:|\nRequestId:|\Z)")
_XML = re.compile(r"<(Code|Message)>([^<]*)</")
# As obstore says it.
_STATUS = re.compile(r"status code: (\d{3})\b")
# Names that clients have for the HTTP status: aiohttp, Azure's, and gcsfs's and urllib's.
_STATUS_NAMES = ("status", "status_code", "code")
# Their errors, such as of answers that are cut off, have the status that a server would give them; none has.
_PARSERS = ("aiohttp.http_exceptions",)
# In the names and words of errors that backends raise beside these.
LASTING_MARKS = (
    "credential", "certificate", "permissiondenied", "unauthenticated", "notsupported", "invalidpath", "forbidden:",
)  # fmt: skip

# The first row one of whose words is in the error's text counts.
HINTS: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("nosuchbucket", "bucket does not exist", "invalidbucketname", "container does not exist"),
        "check the bucket's name, region and endpoint",
    ),
    (("requesttimetooskewed", "request time"), "set this machine's clock"),
    (
        (
            "signaturedoesnotmatch",
            "invalidaccesskeyid",
            "access key id",
            "credential",
            "expiredtoken",
            "unauthorized",
            "anonymous caller",
            "invalid_grant",
            "server failed to authenticate",
        ),
        "check the credentials: for S3, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or the profile; for Google Cloud, "
        "GOOGLE_APPLICATION_CREDENTIALS; for Azure, AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
    ),
    (("accessdenied", "forbidden", "permission", "not authorized"), "check credentials and permissions"),
    (("permanentredirect", "authorizationheadermalformed", "region"), "check the region: for S3, AWS_REGION"),
    (
        ("certificate", "sslerror", "ssl_error", "wrong version number"),
        "check TLS certificates and the machine's clock",
    ),
    (
        (
            "could not connect",
            "cannot connect",
            "connection refused",
            "name or service",
            "name resolution",
            "resolve",
            "error sending request",
        ),
        "check the host's name, the port and the network; for S3, AWS_ENDPOINT_URL",
    ),
    (
        ("slowdown", "slow down", "too many requests", "service unavailable"),
        "the server is overloaded; try again later",
    ),
)


def unknown_scheme(url: str, error: Exception) -> InputError:
    """No file system takes `url`: which package to install, or which scheme was perhaps meant."""
    scheme = url.partition("://")[0]
    if isinstance(error, ImportError):
        extra = EXTRAS.get(scheme)
        hint = f"pip install 'lynxkv[{extra}]'" if extra else "install the fsspec package for this scheme"
        return InputError(f"cannot open {url}: {error}", hint=hint)
    close = difflib.get_close_matches(scheme, (*USUAL, *available_protocols()), n=1, cutoff=0.5)
    meant = f"did you mean {close[0]}://? " if close else ""
    known = ", ".join(f"{name}://" for name in USUAL)
    return InputError(f"cannot open {url}: {error}", hint=f"{meant}a path, {known} and more are known")


def words_of(error: BaseException) -> str:
    """What the error, or the server behind it, says."""
    stated = _s3_error(error)
    if stated.get("Message"):
        return f"{stated.get('Code')}: {stated['Message']}"
    if isinstance(error, FileNotFoundError) and error.__cause__ is not None:
        return words_of(error.__cause__)
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, TimeoutError) and not str(error):
        return "no answer in time"
    if isinstance(error, NotImplementedError):
        return "this kind of store cannot do that"
    return " ".join(_told(error).split()) or type(error).__name__


def hint_of(error: BaseException) -> str:
    """What to look at next."""
    if isinstance(error, NotImplementedError):
        return "this kind of store can only be read; write elsewhere and copy the files there"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "the disk is full; free space or write elsewhere"
    if isinstance(error, OSError) and error.errno in OF_PATHS:
        return "check the path and what is there"
    text = f"{type(error).__name__} {_told(error)} {error.__cause__} {s3_code(error)}".lower()
    if isinstance(error, PermissionError):
        text += " permission"
    return next(
        (hint for marks, hint in HINTS if any(mark in text for mark in marks)),
        "check the URL, the endpoint and the network",
    )


def is_lasting(error: BaseException) -> bool:
    """Whether trying again cannot help: what is missing stays missing, what is forbidden stays forbidden."""
    status = _status(error)
    if status is not None:
        return 400 <= status < 500 and status not in WORTH_RETRYING
    text = f"{type(error).__name__} {_told(error)}".lower()
    return isinstance(error, LASTING) or any(mark in text for mark in LASTING_MARKS)


@contextlib.contextmanager
def reading(url: str, name: str) -> Iterator[None]:
    """Turn what a file system raises while `name` under `url` is read into errors of ours.

    Raises:
        CacheNotFoundError: there is no such object.
        FetchError: anything else.
    """
    try:
        yield
    except StoreError:
        raise
    except NotADirectoryError as error:
        raise CacheNotFoundError(
            f"{url} is not a folder", hint="a cache is a folder or prefix with an Anchor in it"
        ) from error
    except Exception as error:
        if _is_absent(error):
            raise CacheNotFoundError(
                f"{url}: there is no {name or 'such prefix'}",
                hint="`lynxkv ls` of the folder or prefix it should be in shows which caches there are",
            ) from error
        raise FetchError(f"{url}/{name}: {words_of(error)}", hint=hint_of(error)) from error


@contextlib.contextmanager
def writing(url: str) -> Iterator[None]:
    """Turn what a file system raises while a cache is written to `url` into errors of ours.

    Raises:
        StoreError: the write failed.
    """
    try:
        yield
    except LynxError:
        raise
    except Exception as error:
        raise StoreError(f"cannot write {url}: {words_of(error)}", hint=hint_of(error)) from error


def exists_already(url: str, hint: str) -> CacheExistsError:
    """There is a cache at `url`."""
    return CacheExistsError(f"{url} exists already", hint=hint)


def in_the_way(url: str, path: Path) -> StoreError:
    """A file is where a folder should be."""
    return StoreError(f"cannot write {url}: {path} is a file", hint=f"give another name, or move {path.name} away")


def _is_absent(error: BaseException) -> bool:
    """Whether the server was there and has no such object."""
    code = s3_code(error)
    if code is not None:
        return code in ("404", "NoSuchKey", "NotFound")
    status = _status(error)
    if status is not None:
        return status == 404
    # fsspec's HTTP says "not found" of servers it cannot reach, too.
    return isinstance(error, FileNotFoundError) and (
        error.__cause__ is None or isinstance(error.__cause__, (FileNotFoundError, KeyError))
    )


def _answer(error: BaseException | None) -> dict[str, Any]:
    """The server's answer that an error of botocore, or its translation by s3fs, carries."""
    while error is not None:
        response = getattr(error, "response", None)
        if isinstance(response, dict):
            return response
        error = error.__cause__
    return {}


def s3_code(error: BaseException) -> str | None:
    """What S3 calls the error."""
    code = _s3_error(error).get("Code")
    return None if code is None else str(code)


def _s3_error(error: BaseException) -> dict[str, Any]:
    """Code and message of S3's answer, which obstore quotes as it came."""
    stated: dict[str, Any] = _answer(error).get("Error", {})
    return stated or dict(_XML.findall(_told(error)))


def is_past_end(error: BaseException) -> bool:
    """Whether the server says that the object ends before the range begins (416)."""
    return s3_code(error) in ("InvalidRange", "416") or _status(error) == 416


def _status(error: BaseException) -> int | None:
    """The HTTP status that an error, or what it was raised from, stands for."""
    status = _answer(error).get("ResponseMetadata", {}).get("HTTPStatusCode")
    if isinstance(status, int):
        return status
    cause: BaseException | None = error
    while cause is not None and type(cause).__module__ not in _PARSERS:
        stated = _STATUS.search(_told(cause))
        found = (
            stated[1] if stated else next(filter(None, (getattr(cause, name, None) for name in _STATUS_NAMES)), None)
        )
        if str(found).isdigit() and 100 <= int(str(found)) < 600:
            return int(str(found))
        cause = cause.__cause__
    return None


def _told(error: BaseException) -> str:
    """The text of an error, without what is for the authors of its client."""
    match = QUOTED_UNTIL.match(str(error))
    return match[1] if match else str(error)
