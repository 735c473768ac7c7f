"""Chains end to end on the real small model: a prompt followed while it is written, and one that has grown."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.test_commands import DOCUMENT, LYNXKV, QUESTION

if TYPE_CHECKING:
    from tests.conftest import Lynx

pytestmark = pytest.mark.model
ASK = ("--prompt", QUESTION, "--max-new-tokens", 16, "--verify", "exact", "--json")


def answer(lynx: Lynx, url: Path, *options: str) -> dict[str, Any]:
    done = lynx("generate", url, *ASK, *options)
    assert done.code == 0, done.err + done.out
    result: dict[str, Any] = json.loads(done.out)
    return result


@pytest.mark.usefixtures("one_copy_of_smollm2")
def test_a_writer_is_followed_and_its_text_is_that_of_one_cache(lynx: Lynx, tmp_path: Path) -> None:
    (tmp_path / "document.txt").write_text(DOCUMENT, "utf-8")
    prompt = ("encode", f"@{tmp_path}/document.txt", "--model", "smollm2", "--exact")
    writer = subprocess.Popen(
        [*LYNXKV, *prompt, "--out", str(tmp_path / "a.lynx"), "--span-tokens", "40"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        followed = answer(lynx, tmp_path / "a.lynx", "--follow", "--model", "smollm2")
    finally:
        _, told = writer.communicate(timeout=300)
    assert writer.returncode == 0, told
    assert "published" in told
    assert followed["caches"] > 2
    assert "Cape Varn" in followed["text"]
    assert followed["text"] == answer(lynx, tmp_path / "a.lynx")["text"]
    assert lynx(*prompt, "--out", tmp_path / "whole.lynx", "--no-continue").code == 0
    assert followed["text"] == answer(lynx, tmp_path / "whole.lynx")["text"]


@pytest.mark.usefixtures("one_copy_of_smollm2")
def test_a_text_that_has_grown_is_continued(lynx: Lynx, tmp_path: Path) -> None:
    text = DOCUMENT * 3
    for name, prompt in (("short", text), ("long", f"{text}\nThe present keeper is called Olga.")):
        done = lynx("encode", prompt, "--model", "smollm2", "--out", tmp_path / f"{name}.lynx", "--json")
        assert done.code == 0, done.out
    encoded = json.loads(done.out)
    assert encoded["tokens"] - encoded["continued_tokens"] < 20
    done = lynx("generate", tmp_path / "long.lynx", "--prompt", "What is the keeper called?", "--max-new-tokens", 16)
    assert "Olga" in done.out
