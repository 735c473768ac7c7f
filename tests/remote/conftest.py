"""Real servers: SeaweedFS for S3, nginx for HTTP. Where one is missing its tests are skipped and say so."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

START_S = 20.0
KEY, SECRET, BUCKET = "AKLYNXKV", "SK12345678", "caches"


@dataclass(frozen=True, kw_only=True)
class HttpServer:
    """A folder, served with and without ranges."""

    folder: Path
    url: str
    url_without_ranges: str


def _program(name: str) -> str:
    found = shutil.which(
        name, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"], "/usr/sbin"])
    )
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def _free_ports(*offsets: int) -> int:
    """A port that is free together with those at these distances from it."""
    for base in range(21_000 + os.getpid() % 500 * 16, 50_000, 16):
        with _bound([base + offset for offset in offsets]) as free:
            if free:
                return base
    pytest.skip("no free ports")


@contextmanager
def _bound(ports: list[int]) -> Iterator[bool]:
    """Whether all `ports` can be bound at once."""
    sockets = [socket.socket() for _ in ports]
    try:
        for each, port in zip(sockets, ports, strict=True):
            each.bind(("127.0.0.1", port))
        yield True
    except OSError:
        yield False
    finally:
        for each in sockets:
            each.close()


def _wait_until_up(url: str, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + START_S
    while time.monotonic() < until and process.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=1).close()
        except urllib.error.HTTPError:
            return
        except OSError:
            time.sleep(0.05)
        else:
            return
    pytest.fail(f"{process.args!r} did not start")


@contextmanager
def _running(command: list[str], url: str, log: Path, **env: str) -> Iterator[None]:
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, **env})
    try:
        _wait_until_up(url, process)
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(3)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@pytest.fixture(scope="session")
def s3_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of an S3 server with one bucket."""
    pytest.importorskip("s3fs")
    weed, folder = _program("weed"), tmp_path_factory.mktemp("seaweedfs")
    base = _free_ports(*range(5), *range(10_000, 10_005))
    identity = (
        f'{{"name": "t", "credentials": [{{"accessKey": "{KEY}", "secretKey": "{SECRET}"}}], "actions": ["Admin"]}}'
    )
    (folder / "s3.json").write_text(f'{{"identities": [{identity}]}}')
    command = [
        weed, "mini", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-master.telemetry=false",
        "-webdav=false", "-admin.ui=false", f"-s3.port={base}", f"-master.port={base + 1}", f"-volume.port={base + 2}",
        f"-filer.port={base + 3}", f"-admin.port={base + 4}", "-s3.port.iceberg=0", "-s3.port.lance=0",
        f"-filer.localSocket={folder}/f.sock", f"-s3.localSocket={folder}/s.sock", f"-s3.config={folder}/s3.json",
        f"-bucket={BUCKET}",
    ]  # fmt: skip
    endpoint = f"http://127.0.0.1:{base}"
    with _running(command, endpoint, folder / "log", GOMEMLIMIT="256MiB", GOGC="50"):
        yield endpoint


@pytest.fixture
def s3(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of a bucket, with everything in the environment that its use takes."""
    import s3fs

    for name, value in {
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_ENDPOINT_URL": s3_endpoint,
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()  # instances have read the environment of before
    yield f"s3://{BUCKET}"
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture(scope="session")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    """A folder behind nginx."""
    pytest.importorskip("aiohttp")
    nginx, folder = _program("nginx"), tmp_path_factory.mktemp("nginx")
    base = _free_ports(0, 1)
    (folder / "www").mkdir()
    paths = "\n".join(
        f"{kind}_temp_path {folder}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    (folder / "nginx.conf").write_text(
        f"""
        daemon off; master_process off; pid {folder}/pid; error_log {folder}/errors; events {{}}
        http {{
            access_log off; {paths}
            server {{ listen 127.0.0.1:{base}; root {folder}/www; autoindex on; }}
            server {{ listen 127.0.0.1:{base + 1}; root {folder}/www; max_ranges 0; }}
        }}
        """
    )
    with _running([nginx, "-c", f"{folder}/nginx.conf", "-p", str(folder)], f"http://127.0.0.1:{base}", folder / "log"):
        yield HttpServer(
            folder=folder / "www", url=f"http://127.0.0.1:{base}", url_without_ranges=f"http://127.0.0.1:{base + 1}"
        )
