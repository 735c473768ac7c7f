"""Kill writers of one cache at random moments: `python killed_writers.py URL MOMENTS TOKENS`, from tests in a process
of their own, since it forks. Fails if a reader ever took a part for the whole, or a later writer could not complete it.
"""

from __future__ import annotations

import importlib
import os
import random
import signal
import sys
import time
from collections.abc import Callable

import torch

import lynxkv
from lynxkv.store import Store
from lynxkv.store.uploads import unfinished
from lynxkv.testing.kv import random_kv

ABSENT, WHOLE = 10, 11


def forked(work: Callable[[], int]) -> int:
    """The process id of a child that does `work` and exits with what it returns; 1 if it raises."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        code = work()
    finally:
        os._exit(code)


def ended(child: int) -> int:
    """The exit code of a child, the negative signal if it was killed."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main(url: str, moments: int, tokens: int) -> None:
    """Write, kill and look, `moments` times; then let one writer finish."""
    torch.set_num_threads(1)
    kv = random_kv(layers=4, heads=3, tokens=tokens, head_dim=64)
    lynxkv.encode(kv, "memory://warm.lynx")  # children find everything compiled and loaded
    if url.startswith("s3://"):
        importlib.import_module("s3fs")
        importlib.import_module("obstore")

    def write() -> int:
        lynxkv.encode(kv, url, codec="raw" if tokens > 5000 else "default", overwrite=True)
        return 0

    def look() -> int:
        try:
            lynxkv.check(url)
        except lynxkv.CacheNotFoundError as error:
            return ABSENT if "anchor" in str(error) else 1
        return WHOLE

    def clear() -> int:
        lynxkv.remove(url)
        return 0

    def tidy() -> int:
        lynxkv.prune(url, grace_s=0, now_s=lambda: time.time() + 60)
        store = Store(url)
        return len(list(unfinished(store.fs, store.path))) + len(lynxkv.check(url).orphans)

    began = time.monotonic()
    assert ended(forked(write)) == 0
    takes = time.monotonic() - began
    assert ended(forked(look)) == WHOLE
    chance = random.Random(0)
    killed = 0
    for moment in range(moments):
        if moment % 2 == 0:  # half of them replace nothing
            ended(forked(clear))
        child = forked(write)
        time.sleep(chance.uniform(0, takes))
        os.kill(child, signal.SIGKILL)
        killed += ended(child) == -signal.SIGKILL
        assert ended(forked(look)) in (ABSENT, WHOLE)
    assert killed, "none was killed"
    assert ended(forked(write)) == 0
    assert ended(forked(look)) == WHOLE
    assert ended(forked(tidy)) == 0
    sys.stdout.write(f"{killed} killed\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
