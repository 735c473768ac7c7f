"""Memory that ranges arrive in is used again, and never while something shows it."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from lynxkv.fetch.memory import MAPPED_BYTES, Blocks
from lynxkv.fetch.options import RANGE_BYTES


def address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)


def test_memory_is_used_again_once_nothing_refers_to_it() -> None:
    blocks = Blocks()
    kept, first = blocks.take(RANGE_BYTES), blocks.take(RANGE_BYTES)
    place = address(first)
    del first
    again = blocks.take(RANGE_BYTES // 2 + 1)
    assert address(again) == place != address(kept)
    assert (len(again), len(kept)) == (RANGE_BYTES // 2 + 1, RANGE_BYTES)


@pytest.mark.parametrize("show", [lambda view: view[5:9], lambda view: np.frombuffer(view[5:9], np.uint8)])
def test_a_part_that_is_shown_keeps_its_memory(show: object) -> None:
    blocks = Blocks()
    kept, first = blocks.take(RANGE_BYTES), blocks.take(RANGE_BYTES)
    first[:] = bytes(range(256)) * (RANGE_BYTES // 256)
    part = show(first)  # type: ignore[operator]
    del first
    others = [blocks.take(RANGE_BYTES) for _ in range(4)]
    for other in [*others, kept]:
        other[:] = b"x" * RANGE_BYTES
    assert bytes(part) == bytes(range(5, 9))


def test_what_is_free_is_never_more_than_what_is_in_use() -> None:
    blocks = Blocks()
    taken = [blocks.take(RANGE_BYTES) for _ in range(8)]
    while taken:
        taken.pop()
        assert len(blocks._free) <= len(taken)
    assert not blocks._free


@pytest.mark.parametrize("size", [0, 1, MAPPED_BYTES, RANGE_BYTES // 2, RANGE_BYTES + 1, 3 * RANGE_BYTES])
def test_other_sizes_are_memory_of_their_own(size: int) -> None:
    blocks = Blocks()
    taken = blocks.take(size)
    taken[:] = b"y" * size
    assert hashlib.sha256(taken).digest() == hashlib.sha256(b"y" * size).digest()
    del taken
    assert not blocks._free


def test_memory_outlives_what_lent_it() -> None:
    blocks = Blocks()
    view = blocks.take(RANGE_BYTES)
    view[-3:] = b"abc"
    del blocks
    assert bytes(view[-3:]) == b"abc"
