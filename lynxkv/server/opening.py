"""Opening caches: a few at a time of each, so that one whose store hangs takes no more threads than that."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from weakref import WeakValueDictionary

from lynxkv.fetch import CacheReader, FetchOptions, closing_after
from lynxkv.store import Link

AT_ONCE = 4


class Openings:
    """Opens caches on up to `threads` threads, `AT_ONCE` of them for one cache, whoever leaves meanwhile."""

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="lynxkv-open")
        self._places: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    @asynccontextmanager
    async def open(self, url: str, *, link: Link | None, options: FetchOptions) -> AsyncIterator[CacheReader]:
        """An open cache, which is closed, with all its requests, when this is left. It may be left open for long
        before it is loaded, so little is asked for ahead.

        Raises:
            As `open_cache`.
        """
        places = self._places.setdefault(url, asyncio.Semaphore(AT_ONCE))
        await places.acquire()
        opening = asyncio.get_running_loop().run_in_executor(
            self._pool, partial(CacheReader, url, link=link, options=options, at_once=False)
        )
        opening.add_done_callback(lambda _: places.release())
        async with closing_after(opening) as reader:
            yield reader

    def close(self) -> None:
        """Open nothing more."""
        self._pool.shutdown(wait=False)
