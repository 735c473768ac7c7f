"""How fast a cache is fetched and decoded, beside a bare parallel download of the same bytes."""

from __future__ import annotations

import asyncio
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from fsspec.asyn import get_loop

from lynxkv.choices import TransportName
from lynxkv.decoder import CacheDecoder, KVDestination
from lynxkv.fetch import CacheReader, FetchOptions
from lynxkv.fetch.options import RANGE_BYTES
from lynxkv.format.document import ANCHOR_NAME
from lynxkv.store import Store, Url
from lynxkv.store.transport import Transport, transport_for


@dataclass(frozen=True, kw_only=True)
class FetchRow:
    """Seconds, medians over the repeats, of one transport with so many requests in flight.

    `header_s` is opening the cache; `anchor_s` the Anchor decoded, opening included; `overlapped_s` the same while the
    Residual has been asked for; `residual_s` is from there to the refined cache. The plain ones only download.
    """

    transport: TransportName
    concurrency: int
    repeats: int
    header_s: float
    anchor_s: float
    anchor_plain_s: float
    anchor_ratio: float
    overlapped_s: float
    residual_s: float | None
    residual_plain_s: float | None
    bytes_anchor: int
    bytes_residual: int


def measure_fetch(
    url: Url,
    *,
    transports: Sequence[TransportName],
    concurrencies: Sequence[int],
    repeats: int,
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> list[FetchRow]:
    """Measure every transport with every number of requests. All take turns, and the first turn is not counted.

    Raises:
        StoreError, FormatError: the cache cannot be fetched.
        InputError: a transport does not reach it.
    """
    cells = [(name, count) for name in transports for count in concurrencies]
    seconds: dict[tuple[TransportName, int], list[dict[str, float]]] = {cell: [] for cell in cells}
    with CacheReader(url, header_only=True) as reader:
        bytes_anchor, bytes_residual = reader.bytes_anchor, reader.bytes_residual
    for turn in range(repeats + 1):
        for at, (name, count) in enumerate(cells):
            measured = _turn(url, FetchOptions(transport=name, concurrency=count), reader)
            if turn:
                seconds[name, count].append(measured)
            progress("fetch", turn * len(cells) + at + 1, (repeats + 1) * len(cells))

    def median(cell: tuple[TransportName, int], what: str) -> float:
        return statistics.median(measured[what] for measured in seconds[cell])

    return [
        FetchRow(
            transport=cell[0],
            concurrency=cell[1],
            repeats=repeats,
            header_s=median(cell, "header"),
            anchor_s=median(cell, "anchor"),
            anchor_plain_s=median(cell, "anchor_plain"),
            anchor_ratio=statistics.median(m["anchor"] / m["anchor_plain"] for m in seconds[cell]),
            overlapped_s=median(cell, "overlapped"),
            residual_s=median(cell, "residual") if bytes_residual else None,
            residual_plain_s=median(cell, "residual_plain") if bytes_residual else None,
            bytes_anchor=bytes_anchor,
            bytes_residual=bytes_residual,
        )
        for cell in cells
    ]


def _turn(url: Url, options: FetchOptions, opened: CacheReader) -> dict[str, float]:
    """One measurement of everything, each beside what it is compared with."""
    residual = opened.header.residual
    seconds = {"anchor_plain": _download(url, ANCHOR_NAME, opened.bytes_anchor, options)}
    for what in ("anchor", "overlapped"):
        destination = KVDestination(opened.extent)  # not part of what is measured
        gc.collect()
        began = time.perf_counter()
        with CacheReader(url, options=options) as reader:
            seconds["header"] = time.perf_counter() - began
            decoder = CacheDecoder(reader.extent, destination, bases=reader.bases())
            anchor = reader.stream_anchor()
            early = reader.start_residual() if what == "overlapped" and residual else None
            decoder.anchor_all(anchor)
            seconds[what] = time.perf_counter() - began
            if early is not None:
                began = time.perf_counter()
                decoder.refine_all(early)
                seconds["residual"] = time.perf_counter() - began
    if residual is not None:
        size = opened.bytes_residual
        seconds["residual_plain"] = _download(url, residual.name, size, options)
    return seconds


def _download(url: Url, name: str, size: int, options: FetchOptions) -> float:
    """Seconds that a bare download takes: ranges of equal size, so many at a time, nothing checked or kept."""
    with ThreadPoolExecutor(options.concurrency) as workers:
        transport = transport_for(Store(url), options.transport, workers)
        began = time.perf_counter()
        work = _download_ranges(transport, name, size, options.concurrency)
        asyncio.run_coroutine_threadsafe(work, get_loop()).result()
        return time.perf_counter() - began


async def _download_ranges(transport: Transport, name: str, size: int, concurrency: int) -> None:
    starts: Iterator[int] = iter(range(0, size, RANGE_BYTES))

    async def work() -> None:
        for start in starts:
            async with transport.get(name, start, min(size, start + RANGE_BYTES)) as answer:
                async for _ in answer.chunks:
                    pass

    await asyncio.gather(*(work() for _ in range(concurrency)))
