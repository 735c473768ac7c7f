"""Stand before a store and let some of its answers go wrong, the way networks and servers do.

    python examples/faulty_store.py 127.0.0.1:8333 --port 8334 --share 0.05

Requests go on to the store as they are, one connection to it for each that comes. Of GET requests a share is refused,
not answered, cut, stalled, falsified in a bit, or answered 503. On Ctrl-C it says how many of each there were.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import signal
import socket
import struct
import sys
from collections import Counter
from collections.abc import AsyncIterator

from lynxkv.testing.faults import FAULTS, Fault

OVERLOADED = b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
LENGTH = re.compile(rb"^content-length: *(\d+)", re.IGNORECASE | re.MULTILINE)
CHUNK_BYTES = 1 << 16


class Closed(Exception):
    """This connection is not used any more."""


class FaultyStore:
    """Passes requests on to `host:port`; of GET requests the share `share` goes wrong."""

    def __init__(self, host: str, port: int, share: float, seed: int) -> None:
        self._host, self._port, self._share = host, port, share
        self._random = random.Random(seed)
        self.counts: Counter[str] = Counter()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        store_reader, store_writer = await asyncio.open_connection(self._host, self._port, limit=1 << 20)
        try:
            while True:
                await self._exchange(reader, writer, store_reader, store_writer)
        except (Closed, asyncio.CancelledError, asyncio.IncompleteReadError, OSError):
            pass
        finally:
            for each in (writer, store_writer):
                each.close()

    async def _exchange(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        store_reader: asyncio.StreamReader,
        store_writer: asyncio.StreamWriter,
    ) -> None:
        """A request and its answer, or what happens to it."""
        head = await reader.readuntil(b"\r\n\r\n")
        method = head.partition(b" ")[0]
        fault: Fault | None = None
        if method == b"GET" and self._random.random() < self._share:
            fault = self._random.choice(FAULTS)
        self.counts[fault or "well"] += 1
        if fault == "refused":
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            raise Closed
        if fault == "overloaded":
            writer.write(OVERLOADED)
            await writer.drain()
            raise Closed
        if fault == "missing_answer":
            await reader.read()  # until whoever asks gives up
            raise Closed
        store_writer.write(head)
        async for data in _body(head, reader):
            store_writer.write(data)
        answer = await store_reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        length = 0 if method == b"HEAD" else _length(answer)
        left = self._random.randrange(length + 1) if fault in ("cut", "stall") else length
        wrong = self._random.randrange(length) if fault == "corrupt" and length else None
        done = 0
        async for chunk in _read(store_reader, left):
            if wrong is not None and done <= wrong < done + len(chunk):
                at, bit = wrong - done, 1 << self._random.randrange(8)
                chunk = chunk[:at] + bytes([chunk[at] ^ bit]) + chunk[at + 1 :]
            writer.write(chunk)
            await writer.drain()
            done += len(chunk)
        if fault == "stall":
            await reader.read()
        if fault in ("cut", "stall"):
            raise Closed


def _length(head: bytes) -> int:
    found = LENGTH.search(head)
    return int(found[1]) if found else 0


async def _body(head: bytes, reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    async for chunk in _read(reader, _length(head)):
        yield chunk


async def _read(reader: asyncio.StreamReader, count: int) -> AsyncIterator[bytes]:
    while count:
        chunk = await reader.read(min(count, CHUNK_BYTES))
        if not chunk:
            raise Closed
        count -= len(chunk)
        yield chunk


async def run(store: FaultyStore, port: int) -> None:
    """Serve until this process is told to stop."""
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    server = await asyncio.start_server(store.serve, "127.0.0.1", port, limit=1 << 20)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await stopped.wait()
    server.close()


def main() -> int:
    """Run it and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", metavar="HOST:PORT")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--share", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    host, _, port = options.store.rpartition(":")
    store = FaultyStore(host, int(port), options.share, options.seed)
    asyncio.run(run(store, options.port))
    print(dict(store.counts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
