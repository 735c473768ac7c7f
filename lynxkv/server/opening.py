"""Opening caches: a few at a time of each, so that one whose store hangs takes no more threads than that."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from weakref import WeakValueDictionary

from lynxkv.fetch import CacheReader, FetchOptions, open_cache
from lynxkv.store import Link

AT_ONCE = 4


class Openings:
    """Opens caches on up to `threads` threads, `AT_ONCE` of them for one cache, whoever leaves meanwhile."""

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="lynxkv-open")
        self._places: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    @asynccontextmanager
    async def open(self, url: str, *, link: Link | None, options: FetchOptions) -> AsyncIterator[CacheReader]:
        """An open cache, which is closed, with all its requests, when this is left.

        Raises:
            As `open_cache`.
        """
        places = self._places.setdefault(url, asyncio.Semaphore(AT_ONCE))
        await places.acquire()
        opening = asyncio.get_running_loop().run_in_executor(
            self._pool, partial(open_cache, url, link=link, options=options)
        )
        opening.add_done_callback(lambda _: places.release())
        try:
            reader = await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(_close_opened)
            raise
        try:
            yield reader
        finally:
            await asyncio.shield(asyncio.to_thread(reader.close))

    def close(self) -> None:
        """Open nothing more."""
        self._pool.shutdown(wait=False)


def _close_opened(opening: asyncio.Future[CacheReader]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()
