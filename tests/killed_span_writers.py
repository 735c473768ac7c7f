"""Kill writers of spans at random moments: `python killed_span_writers.py FOLDER MOMENTS`, from tests in a process of
their own, since it forks. Fails if what is left is not a chain that loads, or a later writer does not go on from it.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

import lynxkv
from lynxkv.integrations.hf import Model
from lynxkv.testing.tiny_models import tiny_model
from tests.killed_writers import ended, forked

IDS = torch.randint(3, 48, (480,), generator=torch.Generator().manual_seed(0)).tolist()
SPAN_TOKENS = 60


def check_left(folder: Path, model: Model) -> int:
    """What a killed writer has left: how many of the first tokens, in caches that all load and continue each other."""
    caches = sorted(entry.url for entry in lynxkv.list_caches(folder) if entry.problem is None)
    stops = []
    for url in caches:
        lynxkv.check(url)
        loaded = lynxkv.load(url)
        assert loaded.token_ids == IDS[: loaded.stop]
        stops.append(loaded.stop)
    assert stops == [min(len(IDS), SPAN_TOKENS * (number + 1)) for number in range(len(stops))]
    if stops:
        with lynxkv.open(caches[-1]) as reader:
            assert lynxkv.generate(reader, model, [5, 6], max_new_tokens=4).token_ids
    return stops[-1] if stops else 0


def main(folder: Path, moments: int) -> None:
    """Write, kill and look, `moments` times, the chain growing from one writer to the next until it is complete."""
    torch.set_num_threads(1)
    model, url = tiny_model(), folder / "a.lynx"
    lynxkv.encode_prompt(model, IDS, "memory://warm/a.lynx", span_tokens=SPAN_TOKENS)

    def write() -> int:
        lynxkv.encode_prompt(model, IDS, url, span_tokens=SPAN_TOKENS)
        return 0

    began = time.monotonic()
    assert ended(forked(write)) == 0
    takes = time.monotonic() - began
    chance, killed, left = random.Random(0), 0, len(IDS)
    for _ in range(moments):
        if left == len(IDS):
            lynxkv.remove_chain(url)
            left = check_left(folder, model)
            assert left == 0
        child = forked(write)
        # As if the writer had still all to do, less what it finds done.
        time.sleep(chance.uniform(0, takes * (1 - left / len(IDS))))
        os.kill(child, signal.SIGKILL)
        killed += ended(child) == -signal.SIGKILL
        before, left = left, check_left(folder, model)
        assert left >= before
    assert killed, "none was killed"
    if left < len(IDS):
        assert ended(forked(write)) == 0
    assert check_left(folder, model) == len(IDS)
    sys.stdout.write(f"{killed} killed\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
