"""The format's own files are found from the repository's root; counts of the fuzz tests end up in the summary."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

_COUNTS = pytest.StashKey[list[str]]()


@pytest.fixture(autouse=True)
def _own_home(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Bases of vectors are not kept among the user's own."""
    monkeypatch.setenv("LYNXKV_HOME", str(tmp_path_factory.mktemp("home")))


@pytest.fixture
def report(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Add a line to pytest's closing summary."""
    return request.config.stash.setdefault(_COUNTS, []).append


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print what the tests reported."""
    for line in config.stash.get(_COUNTS, []):
        terminalreporter.write_line(line)
