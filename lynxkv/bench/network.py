"""A real link on one machine: two network namespaces, with a delay between them and tc's shaping, in two priorities.

What the client asks for with the Anchor's mark (see `store.marks`) goes first: the server's kernel answers with the
mark it was asked with, and the shaper takes what is so marked before all else.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from lynxkv.errors import InputError
from lynxkv.store import Link
from lynxkv.store.marks import ANCHOR_TOS

SERVER_ADDRESS, CLIENT_ADDRESS = "10.213.77.1", "10.213.77.2"
# Of a link that is not slowed down by half a round trip, what packets wait for at the shaper.
QUEUE_BYTES = 1 << 20
BURST_BYTES = 128 << 10


def check_network() -> None:
    """Refuse, with an InputError, what a link of this kind cannot be made with."""
    missing = [name for name in ("ip", "tc", "sysctl") if shutil.which(name, path=_PATH) is None]
    if sys.platform != "linux" or missing or not Path("/dev/net/tun").exists():
        raise InputError(
            "a real link takes Linux with ip, tc, sysctl and /dev/net/tun",
            hint="leave --over out: the link is then simulated in this process",
        )
    if os.geteuid() != 0:
        raise InputError(
            "only root may set up a real link", hint="use sudo, or leave --over out: the link is then simulated"
        )


class Network:
    """Two namespaces and the link between them, as a `with` block; answers are shaped, requests are not.

    In it SIGTERM interrupts as Ctrl-C does, so that nothing of them is left.

    Raises:
        InputError: there is no way to make it; see `check_network`, or the kernel lacks htb or u32.
    """

    def __init__(self, link: Link) -> None:
        check_network()
        self.link = link
        self.server, self.client = (f"lynxkv-{os.getpid()}-{end}" for end in ("server", "client"))
        self._relay: subprocess.Popen[str] | None = None
        self._on_term: Any = None

    def within(self, namespace: str) -> tuple[str, ...]:
        """What a command begins with to run in a namespace."""
        return (shutil.which("ip", path=_PATH) or "ip", "netns", "exec", namespace)

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            # Else namespaces would stay, and the servers in them.
            self._on_term = signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            for namespace in (self.server, self.client):
                _run(f"ip netns add {namespace}")
                _run(f"ip -n {namespace} link set lo up")
            ends = (self.server, f"{SERVER_ADDRESS}/24", self.client, f"{CLIENT_ADDRESS}/24")
            self._relay = subprocess.Popen(
                [sys.executable, "-m", "lynxkv.bench.relay", f"{self.link.rtt_s * 500:g}", *ends],
                stdout=subprocess.PIPE,
                text=True,
                env={**_environment(), "PYTHONPATH": os.pathsep.join(sys.path)},
            )
            assert self._relay.stdout is not None
            if self._relay.stdout.readline() != "ready\n":
                raise InputError("the link could not be set up", hint="its errors are above; containers need NET_ADMIN")
            self._shape()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def _shape(self) -> None:
        rate = f"{self.link.bit_per_s:.0f}bit"
        burst = f"burst {BURST_BYTES} cburst {BURST_BYTES} quantum 60000"
        tc = f"ip netns exec {self.server} tc"
        device = "dev lynxkv0"
        _run(f"{tc} qdisc add {device} root handle 1: htb default 20")
        _run(f"{tc} class add {device} parent 1: classid 1:1 htb rate {rate} ceil {rate} {burst}")
        _run(f"{tc} class add {device} parent 1:1 classid 1:10 htb rate {rate} ceil {rate} prio 0 {burst}")
        # What is guaranteed to the others is all that the Anchor does not get.
        least = f"{self.link.bit_per_s / 200:.0f}bit"
        _run(f"{tc} class add {device} parent 1:1 classid 1:20 htb rate {least} ceil {rate} prio 1 {burst}")
        for number in (10, 20):
            _run(f"{tc} qdisc add {device} parent 1:{number} bfifo limit {QUEUE_BYTES}")
        mark = f"match ip dsfield {ANCHOR_TOS:#04x} 0xfc"
        _run(f"{tc} filter add {device} parent 1: protocol ip prio 1 u32 {mark} flowid 1:10")
        _run(f"ip netns exec {self.server} sysctl -qw net.ipv4.tcp_reflect_tos=1")

    def _remove(self) -> None:
        if self._on_term is not None:
            signal.signal(signal.SIGTERM, self._on_term)
        if self._relay is not None:
            self._relay.kill()
            self._relay.wait()
            assert self._relay.stdout is not None
            self._relay.stdout.close()
        for namespace in (self.server, self.client):
            subprocess.run(
                ["ip", "netns", "del", namespace], check=False, stderr=subprocess.DEVNULL, env=_environment()
            )


_PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


def _environment() -> dict[str, str]:
    return {**os.environ, "PATH": _PATH}


def _run(command: str) -> None:
    done = subprocess.run(command.split(), check=False, capture_output=True, text=True, env=_environment())
    if done.returncode:
        raise InputError(f"{command}: {done.stderr.strip()}", hint="the kernel needs htb, u32 and network namespaces")
