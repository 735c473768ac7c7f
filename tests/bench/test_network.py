"""A real link: packets held back, marks on them, and a measurement over it where the user may make one."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import jsonschema
import pytest

import lynxkv
from lynxkv.bench import network
from lynxkv.bench.fetch import FetchSettings, measure_over_link
from lynxkv.bench.network import Network, check_network
from lynxkv.bench.relay import Direction
from lynxkv.store import Link
from lynxkv.store.marks import ANCHOR_TOS, RESIDUAL_TOS, marked_sockets
from lynxkv.testing.kv import random_kv
from lynxkv.testing.servers import find_program

if TYPE_CHECKING:
    from tests.conftest import Lynx

SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "schemas" / "bench-fetch.schema.json").read_text("utf-8"))


def refused() -> str:
    """Why this machine cannot have a real link; empty if it can."""
    try:
        check_network()
    except lynxkv.InputError as error:
        return str(error)
    return ""


def test_packets_are_held_back_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr("lynxkv.bench.relay._MOST", 3)
    with_ends = [socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(2)]
    (sender, source), (target, receiver) = with_ends
    for end in (source, receiver):
        end.setblocking(False)
    try:
        direction = Direction(source.fileno(), target.fileno(), 0.01)
        for number in range(5):
            sender.send(bytes([number]))
        direction.receive()
        direction.deliver(100.009)
        with pytest.raises(BlockingIOError):
            receiver.recv(10)
        direction.deliver(100.011)
        assert [receiver.recv(10) for _ in range(3)] == [b"\0", b"\1", b"\2"]
        with pytest.raises(BlockingIOError):  # there was no room for the others
            receiver.recv(10)
    finally:
        for pair in with_ends:
            for end in pair:
                end.close()


@pytest.mark.parametrize("tos", [ANCHOR_TOS, RESIDUAL_TOS])
def test_sockets_carry_marks(tos: int) -> None:
    with marked_sockets(tos)((socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", 80))) as made:
        assert made.getsockopt(socket.IPPROTO_IP, socket.IP_TOS) == tos
    if socket.has_ipv6:
        with marked_sockets(tos)((socket.AF_INET6, socket.SOCK_STREAM, 0, "", ("::1", 80, 0, 0))) as made:
            assert made.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS) == tos


def test_what_a_link_takes_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lynxkv.encode(random_kv(), tmp_path / "a.lynx")
    settings = FetchSettings(transports=["fsspec"], concurrencies=[8], repeats=1, link=Link.parse("200mbit"))
    with pytest.raises(lynxkv.InputError, match="served elsewhere"):
        measure_over_link("memory://a.lynx", "http", settings)
    monkeypatch.setattr(network, "_PATH", "/nowhere")
    with pytest.raises(lynxkv.InputError, match="ip, tc"):
        measure_over_link(tmp_path / "a.lynx", "http", settings)
    monkeypatch.undo()
    if not refused() or "root" in refused():
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
        with pytest.raises(lynxkv.InputError, match="only root"):
            measure_over_link(tmp_path / "a.lynx", "http", settings)


def test_a_link_is_needed(lynx: Lynx, tmp_path: Path) -> None:
    assert lynx("bench", "fetch", tmp_path / "a.lynx", "--over", "http").code == 2


@pytest.mark.slow
@pytest.mark.parametrize(("over", "program"), [("http", "nginx"), ("s3", "weed")])
def test_measuring_over_a_real_link(over: str, program: str, lynx: Lynx, tmp_path: Path) -> None:
    if why := refused():
        pytest.skip(why)
    if find_program(program) is None:
        pytest.skip(f"{program} is not installed")
    lynxkv.encode(random_kv(), tmp_path / "a.lynx")
    link = ("--link", "100mbit/10ms", "--over", over, "--dscp", "--repeats", 1)
    done = lynx("bench", "fetch", tmp_path / "a.lynx", *link, "--json")
    assert done.code == 0, done.out + done.err
    result = json.loads(done.out)
    jsonschema.validate(result, SCHEMA, cls=jsonschema.Draft202012Validator)
    assert (result["link"], result["over"], result["dscp"]) == ("100mbit/10ms", over, True)
    assert result["rows"][0]["header_s"] > 0.01  # a round trip, at least
    left = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True).stdout
    assert f"lynxkv-{os.getpid()}" not in left


@pytest.mark.slow
def test_what_is_marked_goes_first() -> None:
    """Two streams over one link at once, of equal size: the marked one has the link until it is through."""
    if why := refused():
        pytest.skip(why)
    size = 1_500_000
    serve = f"""
import socket, threading
listener = socket.create_server(("{network.SERVER_ADDRESS}", 7000))
print("ready", flush=True)
def answer(one):
    one.recv(1)
    one.sendall(bytes({size}))
    one.close()
while True:
    threading.Thread(target=answer, args=(listener.accept()[0],)).start()
"""
    fetch = f"""
import socket, threading
from lynxkv.store.marks import ANCHOR_TOS, RESIDUAL_TOS, marked_sockets
made = []
for tos in (RESIDUAL_TOS, ANCHOR_TOS):
    one = marked_sockets(tos)((socket.AF_INET, socket.SOCK_STREAM, 0, "", None))
    one.connect(("{network.SERVER_ADDRESS}", 7000))
    made.append(one)
left = [{size}, {size}]
def read(number):
    while left[number] and (data := made[number].recv(1 << 16)):
        left[number] -= len(data)
    if number:
        print(left[0] / {size})
for one in made:
    one.send(b"x")
threads = [threading.Thread(target=read, args=(number,)) for number in (0, 1)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with Network(Link.parse("20mbit/2ms")) as made:
        server = subprocess.Popen(
            [*made.within(made.server), sys.executable, "-c", serve], stdout=subprocess.PIPE, text=True
        )
        try:
            assert server.stdout is not None
            assert server.stdout.readline() == "ready\n"
            command = [*made.within(made.client), sys.executable, "-c", fetch]
            done = subprocess.run(command, check=True, capture_output=True, text=True, env=env, timeout=60)
        finally:
            server.kill()
            server.communicate()
    assert float(done.stdout) > 0.5  # of the other stream was still to come; without marks about nothing
