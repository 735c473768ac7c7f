"""The contract of stores, held by those that need no server; `remote/test_contracts.py` has the others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lynxkv.store import Link
from lynxkv.testing.contract import StoreContract
from lynxkv.testing.filesystem import simulated


class TestLocal(StoreContract):
    """Folders of this machine."""

    @pytest.fixture
    def root(self, tmp_path: Path) -> str:
        return str(tmp_path / "store")


class TestMemory(StoreContract):
    """fsspec's memory."""

    exclusive = False

    @pytest.fixture
    def root(self) -> str:
        return "memory://contract"


class TestSimulated(StoreContract):
    """Memory, from afar."""

    exclusive = False

    @pytest.fixture
    def root(self) -> Iterator[str]:
        with simulated("memory://far-contract", link=Link.parse("1gbit/1ms")) as url:
            yield url
