"""How fast a cache is fetched and decoded, beside a bare parallel download of the same bytes."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import fsspec
from fsspec.asyn import get_loop

from lynxkv.bench.network import SERVER_ADDRESS, Network
from lynxkv.choices import TransportName
from lynxkv.decoder import CacheDecoder, KVDestination
from lynxkv.errors import FetchError, InputError, StoreError
from lynxkv.fetch import CacheReader, FetchOptions
from lynxkv.fetch.options import RANGE_BYTES
from lynxkv.fetch.ranges import FIRST_PAUSE_S, all_of
from lynxkv.format.document import ANCHOR_NAME
from lynxkv.store import Link, Store, Url
from lynxkv.store.problems import is_lasting, reading
from lynxkv.store.transport import Transport, transport_for
from lynxkv.testing.servers import http_server, s3_server

Over = Literal["http", "s3"]
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, kw_only=True)
class FetchRow:
    """Seconds, medians over the repeats, of one transport with so many requests in flight.

    `header_s` is opening the cache; `anchor_s` the Anchor decoded, opening included; `overlapped_s` the same while the
    Residual has been asked for, `contended_s` while another reader takes that Residual again and again; `residual_s` is
    from the decoded Anchor to the refined cache. The plain ones only download. Ratios are medians of ratios within a
    turn: the Anchor's time to its plain download, and, overlapped, to the Anchor's alone.
    """

    transport: TransportName
    concurrency: int
    repeats: int
    header_s: float
    anchor_s: float
    anchor_plain_s: float
    anchor_ratio: float
    overlapped_s: float
    overlapped_ratio: float
    contended_s: float | None
    residual_s: float | None
    residual_plain_s: float | None
    bytes_anchor: int
    bytes_residual: int


@dataclass(frozen=True, kw_only=True)
class FetchSettings:
    """What is measured, and how often: every transport with every number of requests, `repeats` times.

    `link` simulates a slower one; `dscp` marks packets.
    """

    transports: Sequence[TransportName]
    concurrencies: Sequence[int]
    repeats: int
    link: Link | None = None
    dscp: bool = False


def measure_fetch(
    url: Url, settings: FetchSettings, progress: Progress = lambda stage, done, total: None
) -> list[FetchRow]:
    """Measure every transport with every number of requests. All take turns, and the first turn is not counted.

    Raises:
        StoreError, FormatError: the cache cannot be fetched.
        InputError: a transport does not reach it.
    """
    cells = [(name, count) for name in settings.transports for count in settings.concurrencies]
    seconds: dict[tuple[TransportName, int], list[dict[str, float]]] = {cell: [] for cell in cells}
    with CacheReader(url, header_only=True) as reader:
        bytes_anchor, bytes_residual = reader.bytes_anchor, reader.bytes_residual
    for turn in range(settings.repeats + 1):
        for at, (name, count) in enumerate(cells):
            options = FetchOptions(transport=name, concurrency=count, dscp=settings.dscp)
            measured = _Turn(url, options, settings.link, reader).measure(reverse=turn % 2 == 1)
            if turn:
                seconds[name, count].append(measured)
            progress("fetch", turn * len(cells) + at + 1, (settings.repeats + 1) * len(cells))

    def median(cell: tuple[TransportName, int], what: str) -> float:
        return statistics.median(measured[what] for measured in seconds[cell])

    def ratio(cell: tuple[TransportName, int], what: str, to: str) -> float:
        return statistics.median(measured[what] / measured[to] for measured in seconds[cell])

    return [
        FetchRow(
            transport=cell[0],
            concurrency=cell[1],
            repeats=settings.repeats,
            header_s=median(cell, "header"),
            anchor_s=median(cell, "anchor"),
            anchor_plain_s=median(cell, "anchor_plain"),
            anchor_ratio=ratio(cell, "anchor", "anchor_plain"),
            overlapped_s=median(cell, "overlapped"),
            overlapped_ratio=ratio(cell, "overlapped", "anchor"),
            contended_s=median(cell, "contended") if bytes_residual else None,
            residual_s=median(cell, "residual") if bytes_residual else None,
            residual_plain_s=median(cell, "residual_plain") if bytes_residual else None,
            bytes_anchor=bytes_anchor,
            bytes_residual=bytes_residual,
        )
        for cell in cells
    ]


def measure_over_link(
    url: Url, over: Over, settings: FetchSettings, progress: Progress = lambda stage, done, total: None
) -> list[FetchRow]:
    """Measure a local cache behind a real server and a real link, both made for that: nginx or SeaweedFS, and tc.

    Raises:
        InputError: the cache is not a local folder, there is no link to make, or this machine cannot make one.
        StoreError: the server is not installed or does not start; others as for `measure_fetch`.
    """
    store = Store(url)
    if not store.is_local:
        raise InputError(f"{url} is served elsewhere", hint="give a folder of this machine to serve it over a link")
    if settings.link is None:
        raise InputError("there is no link to make", hint="say which: --link 200mbit/20ms")
    source = Path(store.path)
    serve = {"http": http_server, "s3": s3_server}[over]
    with (
        tempfile.TemporaryDirectory() as folder,
        Network(settings.link) as network,
        serve(Path(folder), host=SERVER_ADDRESS, within=network.within(network.server)) as server,
    ):
        if over == "http":
            shutil.copytree(source, server.folder / source.name)
        task = {
            "source": str(source) if over == "s3" else None,
            "url": f"{server.url}/{source.name}",
            "settings": asdict(replace(settings, link=None)),
        }
        command = [*network.within(network.client), sys.executable, "-m", "lynxkv.bench.fetch"]
        return _measure_elsewhere(command, task, server.environment, progress)


def _measure_elsewhere(
    command: list[str], task: dict[str, Any], environment: dict[str, str], progress: Progress
) -> list[FetchRow]:
    """Measure in another process, which tells how far it is, then the rows."""
    env = {**os.environ, **environment, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(task))
            process.stdin.close()
            for line in process.stdout:
                told = json.loads(line)
                if isinstance(told, list):
                    return [FetchRow(**row) for row in told]
                progress("fetch", told["done"], told["total"])
        finally:
            process.kill()
    raise StoreError("measuring has failed", hint="its errors are above")


def _measure_here() -> None:
    """The other end of `_measure_elsewhere`."""
    task = json.load(sys.stdin)
    if task["source"] is not None:
        fs, path = fsspec.core.url_to_fs(task["url"])
        fs.put(task["source"], path, recursive=True)

    def tell(what: Any) -> None:
        sys.stdout.write(json.dumps(what) + "\n")
        sys.stdout.flush()

    rows = measure_fetch(
        task["url"], FetchSettings(**task["settings"]), lambda stage, done, total: tell({"done": done, "total": total})
    )
    tell([asdict(row) for row in rows])


class _Turn:
    """One measurement of everything, each beside what it is compared with."""

    def __init__(self, url: Url, options: FetchOptions, link: Link | None, opened: CacheReader) -> None:
        self.url, self.options, self.opened = url, options, opened
        # The same for all that goes over it.
        self.link = link and Link(bit_per_s=link.bit_per_s, rtt_s=link.rtt_s)
        self.seconds: dict[str, float] = {}

    def measure(self, *, reverse: bool) -> dict[str, float]:
        """Seconds of everything; those that are compared in this order, or in the reverse one."""
        residual = self.opened.header.residual
        steps: list[Callable[[], None]] = [
            lambda: self._download("anchor_plain", ANCHOR_NAME, self.opened.bytes_anchor),
            lambda: self._load("anchor", overlapped=False),
            lambda: self._load("overlapped", overlapped=True),
        ]
        # Connections that were idle start slowly; none of those that are compared is to be the first.
        steps[0]()
        for step in reversed(steps) if reverse else steps:
            step()
        if residual is not None:
            with self._rival():
                self._load("contended", overlapped=False)
            # What the rival has left on the link is not in the way of anything that is compared with something else.
            self._download("residual_plain", residual.name, self.opened.bytes_residual)
        return self.seconds

    def _load(self, what: str, *, overlapped: bool) -> None:
        """Open the cache and decode its Anchor; then, if the Residual was asked for, refine it."""
        destination = KVDestination(self.opened.extent)  # not part of what is measured
        gc.collect()
        began = time.perf_counter()
        with CacheReader(self.url, link=self.link, options=self.options) as reader:
            if what == "anchor":
                self.seconds["header"] = time.perf_counter() - began
            decoder = CacheDecoder(reader.extent, destination, bases=reader.bases())
            anchor = reader.stream_anchor()
            early = reader.start_residual() if overlapped and reader.bytes_residual else None
            decoder.anchor_all(anchor)
            self.seconds[what] = time.perf_counter() - began
            if early is not None:
                began = time.perf_counter()
                decoder.refine_all(early)
                self.seconds["residual"] = time.perf_counter() - began

    @contextmanager
    def _rival(self) -> Iterator[None]:
        """Another reader that fetches the Residual, as often as it can, until the block ends."""
        arriving, over = threading.Event(), threading.Event()

        def fetch() -> None:
            while not over.is_set():
                with CacheReader(self.url, link=self.link, options=self.options) as reader:
                    for _ in reader.start_residual():
                        arriving.set()
                        if over.is_set():
                            break

        with ThreadPoolExecutor(1) as workers:
            work = workers.submit(fetch)
            while not arriving.wait(0.01) and not work.done():
                pass
            try:
                yield
            finally:
                over.set()
            work.result()

    def _download(self, what: str, name: str, size: int) -> None:
        """A bare download: ranges of equal size, so many at a time, nothing checked or kept."""
        store = Store(self.url)
        with ThreadPoolExecutor(self.options.concurrency) as workers:
            transport = transport_for(store, self.options.transport, workers)
            began = time.perf_counter()
            work = _download_ranges(store.url, transport, name, size, self.options, self.link)
            try:
                asyncio.run_coroutine_threadsafe(work, get_loop()).result()
            finally:
                transport.close()
            self.seconds[what] = time.perf_counter() - began


async def _download_ranges(
    url: str, transport: Transport, name: str, size: int, options: FetchOptions, link: Link | None
) -> None:
    starts: Iterator[int] = iter(range(0, size, RANGE_BYTES))

    async def download(start: int, stop: int) -> None:
        with reading(url, name):
            async with transport.get(name, start, stop) as answer:
                async for _ in answer.chunks:
                    pass

    async def work() -> None:
        for start in starts:
            stop = min(size, start + RANGE_BYTES)
            for left in reversed(range(options.attempts)):
                try:
                    await download(start, stop)
                    break
                except FetchError as error:  # servers fail now and then, and the loader asks again, too
                    if not left or is_lasting(error.__cause__ or error):
                        raise
                    await asyncio.sleep(FIRST_PAUSE_S)
            if link is not None:
                await asyncio.sleep(link.delay_s(stop - start))

    await all_of(work() for _ in range(options.concurrency))


if __name__ == "__main__":
    _measure_here()
