"""What a file system raised, in words for people: every backend has errors of its own."""

from __future__ import annotations

import contextlib
import difflib
import errno
from collections.abc import Iterator
from pathlib import Path

from fsspec.registry import available_protocols

from lynxkv.errors import CacheExistsError, CacheNotFoundError, FetchError, InputError, StoreError

# Packages that pyproject.toml has an extra for.
EXTRAS = {"s3": "s3", "s3a": "s3", "http": "http", "https": "http"}
USUAL = ("s3", "http", "https", "gs", "az", "sftp", "memory")

# The first row one of whose words is in the error's text counts.
HINTS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("nosuchbucket", "bucket does not exist", "invalidbucketname"), "check the bucket's name, region and endpoint"),
    (("requesttimetooskewed", "request time"), "set this machine's clock"),
    (
        ("signaturedoesnotmatch", "invalidaccesskeyid", "access key id", "credential", "expiredtoken", "unauthorized"),
        "check the credentials: for S3, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or the profile",
    ),
    (("accessdenied", "forbidden", "permission", "401", "403"), "check credentials and permissions"),
    (("permanentredirect", "authorizationheadermalformed", "region"), "check the region: for S3, AWS_REGION"),
    (("certificate", "ssl"), "check TLS certificates and the machine's clock"),
    (
        ("could not connect", "cannot connect", "connection refused", "name or service", "name resolution", "resolve"),
        "check the host's name, the port and the network; for S3, AWS_ENDPOINT_URL",
    ),
    (("slowdown", "too many requests", "429", "503"), "the server is overloaded; try again later"),
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
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, NotImplementedError):
        return "this kind of store cannot do that"
    return str(error) or type(error).__name__


def hint_of(error: BaseException) -> str:
    """What to look at next."""
    if isinstance(error, NotImplementedError):
        return "this kind of store can only be read; write elsewhere and copy the files there"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "the disk is full; free space or write elsewhere"
    text = f"{type(error).__name__} {error}".lower()
    if isinstance(error, PermissionError):
        text += " permission"
    return next(
        (hint for marks, hint in HINTS if any(mark in text for mark in marks)),
        "check the URL, the endpoint and the network",
    )


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
    except FileNotFoundError as error:
        cause = error.__cause__
        if cause is not None and not isinstance(cause, FileNotFoundError) and not _says_not_found(cause):
            # fsspec's HTTP says "not found" of servers it cannot reach, too.
            raise FetchError(f"{url}/{name}: {words_of(cause)}", hint=hint_of(cause)) from error
        raise CacheNotFoundError(
            f"{url}: there is no {name or 'such prefix'}", hint="check the URL with your store's own tools"
        ) from error
    except Exception as error:
        raise FetchError(f"{url}/{name}: {words_of(error)}", hint=hint_of(error)) from error


@contextlib.contextmanager
def writing(url: str) -> Iterator[None]:
    """Turn what a file system raises while a cache is written to `url` into errors of ours.

    Raises:
        StoreError: the write failed.
    """
    try:
        yield
    except StoreError:
        raise
    except Exception as error:
        raise StoreError(f"cannot write {url}: {words_of(error)}", hint=hint_of(error)) from error


def exists_already(url: str, hint: str) -> CacheExistsError:
    """There is a cache at `url`."""
    return CacheExistsError(f"{url} exists already", hint=hint)


def in_the_way(url: str, path: Path) -> StoreError:
    """A file is where a folder should be."""
    return StoreError(f"cannot write {url}: {path} is a file", hint=f"give another name, or move {path.name} away")


def _says_not_found(error: BaseException) -> bool:
    response = getattr(error, "response", None)  # botocore's errors carry the server's answer
    code = response.get("Error", {}).get("Code") if isinstance(response, dict) else None
    return code in ("404", "NoSuchKey", "NotFound")
