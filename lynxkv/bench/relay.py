"""Joins two network namespaces by a pair of TUN devices, and holds every packet back for a time: a link's delay.

Run as `python -m lynxkv.bench.relay DELAY_MS NAMESPACE ADDRESS/BITS NAMESPACE ADDRESS/BITS`; it says `ready` and goes
on until it is killed. Linux has netem for this, which not every kernel comes with.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import subprocess
import sys
import time
from collections import deque

_SET_INTERFACE = 0x400454CA
_TUN, _NO_HEADER = 0x0001, 0x1000
# Packets held in one direction: as many as 1 Gbit/s brings in 100 ms. More would be an endless buffer.
_MOST = 8192
_BATCH = 64
PACKET_BYTES = 65_536


def attach(namespace: str, device: str, address: str) -> int:
    """A TUN device with `address` in a namespace, as a descriptor to read and write its packets."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, _SET_INTERFACE, struct.pack("16sH", device.encode(), _TUN | _NO_HEADER))
    for command in (
        f"ip link set {device} netns {namespace}",
        f"ip -n {namespace} addr add {address} dev {device}",
        f"ip -n {namespace} link set {device} txqueuelen 1000 up",
    ):
        subprocess.run(command.split(), check=True)
    return descriptor


class Direction:
    """Packets on their way from one device to the other, each with the time it is due."""

    def __init__(self, source: int, target: int, delay_s: float) -> None:
        self.source, self.target, self.delay_s = source, target, delay_s
        self.held: deque[tuple[float, bytes]] = deque()

    def receive(self) -> None:
        """Take what has come; what there is no room for is lost, as on any link."""
        due = time.monotonic() + self.delay_s
        for _ in range(_BATCH):
            try:
                packet = os.read(self.source, PACKET_BYTES)
            except BlockingIOError:
                return
            if len(self.held) < _MOST:
                self.held.append((due, packet))

    def deliver(self, now: float) -> None:
        """Hand on what is due."""
        while self.held and self.held[0][0] <= now:
            try:
                os.write(self.target, self.held.popleft()[1])
            except BlockingIOError:
                return


def relay(one: int, other: int, delay_s: float) -> None:
    """Carry packets both ways, for ever."""
    directions = {one: Direction(one, other, delay_s), other: Direction(other, one, delay_s)}
    while True:
        due = [direction.held[0][0] for direction in directions.values() if direction.held]
        wait = max(0.0, min(due) - time.monotonic()) if due else None
        for descriptor in select.select(list(directions), (), (), wait)[0]:
            directions[descriptor].receive()
        now = time.monotonic()
        for direction in directions.values():
            direction.deliver(now)


def main(arguments: list[str]) -> None:
    """Set up the link and carry its packets."""
    delay_ms, one, one_address, other, other_address = arguments
    ends = attach(one, "lynxkv0", one_address), attach(other, "lynxkv1", other_address)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    relay(*ends, float(delay_ms) / 1e3)


if __name__ == "__main__":
    main(sys.argv[1:])
