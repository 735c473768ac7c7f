"""Plots are written, or refused with a hint where matplotlib is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from lynxkv.bench import plots
from lynxkv.bench.codec import CodecBench, Plan, bench_codec
from lynxkv.bench.documents import Document
from lynxkv.bench.methods import parse_methods
from lynxkv.errors import InputError
from lynxkv.testing.tiny_models import tiny_model


@pytest.fixture(scope="module")
def bench() -> CodecBench:
    text = " ".join(f"w{3 + number * number % 44}" for number in range(100))
    document = Document(name="one", kind="file", text=text, prompts=("w4 w5", "w6"))
    plan = Plan(documents=(document,), tokens=(60,), next_tokens=8, draft_tokens=4)
    return bench_codec(tiny_model(), parse_methods(["default", "int4", "raw"]), plan)


def test_plots_are_written(bench: CodecBench, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    written = plots.write_plots(bench, tmp_path / "new" / "plots")
    names = ("rate-fidelity", "accepted", "proposed", "layers")
    assert [path.name for path in written] == [f"{name}-60.png" for name in names]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)


def test_accepted_of_every_number_proposed() -> None:
    shares = plots.proposed_accepted([0, 2, 4, 4], 4)
    assert shares.sum(1).tolist() == [1.0] * 5
    assert shares[0].tolist() == [1.0, 0, 0, 0, 0]
    assert shares[3].tolist() == [0.25, 0, 0.25, 0.5, 0]
    assert shares[4].tolist() == [0.25, 0, 0.25, 0, 0.5]


def test_plots_without_matplotlib(bench: CodecBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match="matplotlib") as caught:
        plots.write_plots(bench, tmp_path / "plots")
    assert "lynxkv[bench]" in (caught.value.hint or "")
    assert not (tmp_path / "plots").exists()
