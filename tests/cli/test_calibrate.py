"""`lynxkv calibrate`, and what encode makes of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import Lynx


@pytest.mark.model
def test_calibrate_then_encode_and_answer(
    lynx: Lynx, tmp_path: Path, one_copy_of_smollm2: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LYNXKV_HOME", str(tmp_path / "home"))
    url, text = tmp_path / "a.lynx", "The lamp of Cape Varn was lit in 1871 by Mara Quill. " * 8
    refused = lynx("encode", text, "--model", "smollm2", "--codec", "compact", "--out", url)
    assert refused.code == 1
    assert "lynxkv calibrate --model" in refused.err
    documents = [option for topic in ("one", "two") for option in ("--document", f"@{_text(tmp_path, topic)}")]
    done = lynx("calibrate", "--model", "smollm2", *documents, "--tokens", 128, "--json", "--out", tmp_path / "b.basis")
    assert done.code == 0, done.err
    report = json.loads(done.out)
    assert Path(report["path"]).stat().st_size == report["bytes"]
    for options in ((), ("--basis", tmp_path / "b.basis", "--force")):
        encoded = lynx("encode", text, "--model", "smollm2", "--codec", "compact", "--out", url, "--json", *options)
        assert encoded.code == 0, encoded.err
    inspected = json.loads(lynx("inspect", url, "--json").out)
    assert inspected["basis"] == f"basis-{report['sha256'][:16]}.safetensors"
    assert inspected["basis"] in lynx("inspect", url).out
    assert lynx("check", url).code == 0
    answer = lynx("generate", url, "--prompt", "Who lit the lamp?", "--model", "smollm2", "--max-new-tokens", 8)
    assert answer.code == 0, answer.err
    assert lynx("encode", text, "--model", "smollm2", "--codec", "int8", "--basis", tmp_path / "b.basis",
                "--out", tmp_path / "c.lynx").code == 1  # fmt: skip


def _text(folder: Path, name: str) -> Path:
    from lynxkv.standard_texts import source

    path = folder / f"{name}.txt"
    path.write_text(source({"one": "zipfile", "two": "inspect"}[name])[:4000])
    return path


@pytest.mark.parametrize(("home", "out"), [("file/home", "b.basis"), ("home", "file/b.basis"), ("home", ".")])
def test_what_cannot_be_written_is_refused_before_the_work(
    lynx: Lynx, tmp_path: Path, home: str, out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("LYNXKV_HOME", str(tmp_path / home))
    monkeypatch.setattr("lynxkv.checkpoints.load_model", lambda ref, **options: pytest.fail("the model is loaded"))
    done = lynx("calibrate", "--model", "smollm2", "--out", tmp_path / out)
    assert done.code == 1
    assert "cannot write the basis" in done.err
    assert ("--out" if home == "home" else "LYNXKV_HOME") in done.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "no model"),
        (("--model", "smollm2", "--document", "@/no/such/file"), "cannot read"),
        (("--model", "smollm2", "--tokens", "3"), "greater than or equal to 64"),
    ],
)
def test_wrong_usage(lynx: Lynx, options: tuple[str, ...], message: str) -> None:
    done = lynx("calibrate", *options)
    assert done.code == 2
    assert message in done.err
