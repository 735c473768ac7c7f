"""Real servers: SeaweedFS for S3, nginx for HTTP. Where one is missing its tests are skipped and say so."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lynxkv.testing.servers import Server, find_program, http_server, s3_server


def _need(program: str) -> None:
    if find_program(program) is None:
        pytest.skip(f"{program} is not installed")


@pytest.fixture(scope="session")
def s3_running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """An S3 server with one bucket."""
    pytest.importorskip("s3fs")
    _need("weed")
    with s3_server(tmp_path_factory.mktemp("seaweedfs")) as server:
        yield server


@pytest.fixture
def s3(s3_running: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of a bucket, with everything in the environment that its use takes."""
    import s3fs

    for name, value in s3_running.environment.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()  # instances have read the environment of before
    yield s3_running.url
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture(scope="session")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A folder behind nginx, served with and without ranges."""
    pytest.importorskip("aiohttp")
    _need("nginx")
    with http_server(tmp_path_factory.mktemp("nginx")) as server:
        yield server
