"""The command line end to end on the real small model: what a newcomer types, and what comes out."""

from __future__ import annotations

import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import pyte
import pytest

from lynxkv_cli import bench_fetch, check, encode, export, generate, inspect, ls, plan, prune, rm

if TYPE_CHECKING:
    from tests.conftest import Finished, Lynx

pytestmark = pytest.mark.model

SCHEMAS = Path(__file__).parents[2] / "docs" / "schemas"
DOCUMENT = """The lighthouse at Cape Varn was built in 1871 by Ada Thornquist, an engineer from Bergen. It stands 41
metres tall and its lamp can be seen from 22 nautical miles away. The keeper lived on the second floor until 1954, when
the light was made automatic. Today the building is a small museum, open from May to September. Visitors climb 188
steps to the gallery, from where they can see the islands of Holm and Sker. On clear days the mainland is visible too.
"""
LYNXKV = [sys.executable, "-m", "lynxkv_cli"]
QUESTION = "Who built the lighthouse, and when?"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The document's cache, made by the real command in a process of its own."""
    folder = tmp_path_factory.mktemp("e2e")
    (folder / "document.txt").write_text(DOCUMENT, "utf-8")
    url = folder / "document.lynx"
    arguments = ["encode", f"@{folder}/document.txt", "--model", "smollm2", "--out", str(url)]
    done = subprocess.run([*LYNXKV, *arguments], capture_output=True, text=True, check=True)
    assert done.stdout == f"{url}\n"
    assert "tokens: Anchor" in done.stderr
    return str(url)


def answer(done: Finished) -> dict[str, Any]:
    """The object that `generate --json` printed, checked against its schema."""
    assert (done.code, done.err) == (0, "")
    result: dict[str, Any] = json.loads(done.out)
    schema = json.loads((SCHEMAS / "generate.schema.json").read_text("utf-8"))
    jsonschema.validate(result, schema, cls=jsonschema.Draft202012Validator)
    return result


def test_the_examples_of_the_help_run(
    lynx: Lynx, one_copy_of_smollm2: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "README.md").write_text(DOCUMENT, "utf-8")
    for module in (encode, inspect, check, generate, plan, ls, export, prune, bench_fetch, rm):
        example = module.HELP.splitlines()[0].removeprefix("Example: lynxkv ")
        done = lynx(*shlex.split(example))
        assert done.code == 0, (example, done.err)
        assert done.out or module in (prune, rm)  # which tell of it on stderr


@pytest.mark.usefixtures("one_copy_of_smollm2")
class TestGenerate:
    """One short answer, in many ways."""

    def test_the_text_is_that_of_the_full_cache(self, lynx: Lynx, cache: str) -> None:
        ask = ("generate", cache, "--prompt", QUESTION, "--max-new-tokens", 24)
        waiting = answer(lynx(*ask, "--speculate", "off", "--json"))
        progressive = answer(lynx(*ask, "--link", "4mbit", "--json"))
        fixed = answer(lynx(*ask, "--speculate", 8, "--json"))
        assert "Thornquist" in waiting["text"]
        assert progressive["token_ids"] == fixed["token_ids"] == waiting["token_ids"]
        assert progressive["text"] == fixed["text"] == waiting["text"]
        assert waiting["drafted"] == 0
        assert waiting["first_draft_s"] is None
        assert fixed["drafted"] == 8
        assert progressive["drafted"] > 0
        assert progressive["first_draft_s"] < progressive["first_verified_s"]
        assert progressive["accepted"] <= progressive["drafted"]

    def test_a_pipe_gets_the_text_and_the_terminal_the_summary(self, lynx: Lynx, cache: str) -> None:
        ask = ("generate", cache, "--prompt", QUESTION, "--max-new-tokens", 16)
        text = answer(lynx(*ask, "--json"))["text"]
        done = lynx(*ask)
        assert done.out == f"{text}\n"
        for word in (
            "drafted",
            "accepted",
            "first draft token",
            "first verified token",
            "Anchor",
            "buffers at their largest",
        ):
            assert word in done.err
        quiet = lynx(*ask, "--quiet")
        assert (quiet.out, quiet.err) == (f"{text}\n", "")

    def test_a_stop_string_ends_the_text(self, lynx: Lynx, cache: str) -> None:
        ask = ("generate", cache, "--prompt", QUESTION, "--max-new-tokens", 24, "--json")
        result = answer(lynx(*ask, "--stop", "Thornquist"))
        assert result["stopped"] == "stop"
        assert result["text"] == answer(lynx(*ask))["text"].partition("Thornquist")[0]

    def test_sampling_follows_its_seed(self, lynx: Lynx, cache: str) -> None:
        # With a draft the text also depends on when the Residual came.
        ask = ("generate", cache, "--prompt", QUESTION, "--max-new-tokens", 12, "--speculate", "off", "--json")
        warm = (*ask, "--temperature", 1.5, "--top-p", 0.9, "--repetition-penalty", 1.1)
        texts = [answer(lynx(*warm, "--seed", seed))["text"] for seed in (1, 1, 2)]
        assert texts[0] == texts[1] != texts[2]

    def test_without_verification_the_residual_stays_where_it_is(self, lynx: Lynx, cache: str) -> None:
        ask = ("generate", cache, "--prompt", QUESTION, "--max-new-tokens", 8, "--json")
        result = answer(lynx(*ask, "--verify", "none"))
        assert result["precision"] == "anchor"
        assert result["bytes_residual"] == 0
        assert result["full_s"] is None

    def test_the_question_can_come_from_a_file_or_stdin(self, lynx: Lynx, cache: str, tmp_path: Path) -> None:
        (tmp_path / "question.txt").write_text(QUESTION, "utf-8")
        rest = ("--max-new-tokens", 8, "--json")
        by_file = answer(lynx("generate", cache, "--prompt", f"@{tmp_path}/question.txt", *rest))
        by_stdin = answer(lynx("generate", cache, "--prompt", "-", *rest, stdin=QUESTION.encode()))
        direct = answer(lynx("generate", cache, "--prompt", QUESTION, *rest))
        assert by_file["text"] == by_stdin["text"] == direct["text"]

    def test_inspect_compares_with_the_model(self, lynx: Lynx, cache: str) -> None:
        report = json.loads(lynx("inspect", cache, "--model", "smollm2", "--json").out)
        schema = json.loads((SCHEMAS / "inspect.schema.json").read_text("utf-8"))
        jsonschema.validate(report, schema, cls=jsonschema.Draft202012Validator)
        full = [row for row in report["errors"] if row["precision"] == "full"]
        assert len(full) == 2 * report["layers"]
        # Layers whose values hardly vary get coarse steps, the first above all; what counts is what attention puts out.
        assert max(row["nmse"] for row in full if row["layer"] > 0) < 1e-3
        assert max(row["attention_nmse_both"] for row in full) < 2e-3

    def test_a_damaged_residual_gives_no_text(self, lynx: Lynx, cache: str, tmp_path: Path) -> None:
        copy = tmp_path / "damaged.lynx"
        copy.mkdir()
        for path in Path(cache).iterdir():
            data = bytearray(path.read_bytes())
            if path.name.startswith("residual"):
                data[len(data) // 2] ^= 1
            (copy / path.name).write_bytes(data)
        done = lynx("generate", copy, "--prompt", QUESTION, "--quiet")
        assert (done.code, done.out) == (1, "")
        assert "residual" in done.err
        assert "hint: " in done.err

    def test_another_model_is_refused_by_name(self, lynx: Lynx, cache: str, tmp_path: Path) -> None:
        from lynxkv.testing.tiny_models import tiny_model

        tiny = tiny_model()
        tiny.hf.save_pretrained(tmp_path / "tiny")
        tiny.tokenizer.save_pretrained(tmp_path / "tiny")
        done = lynx("generate", cache, "--prompt", QUESTION, "--model", tmp_path / "tiny", "--quiet")
        assert (done.code, done.out) == (1, "")
        assert "fingerprint" in done.err
        assert "hint: " in done.err


def test_a_terminal_shows_the_draft_dimmed_and_ends_with_the_text(cache: str) -> None:
    command = ["generate", cache, "--prompt", QUESTION, "--max-new-tokens", "24", "--link", "4mbit"]
    shown = terminal_output(command)
    assert "\x1b[2m" in shown, "no dimmed draft"
    assert "fetching the Anchor" in shown
    screen = pyte.Screen(80, 40)
    pyte.Stream(screen).feed(shown)
    seen = re.sub(r"\s+", "", "".join(screen.display))
    done = subprocess.run([*LYNXKV, *command, "--json"], capture_output=True, text=True, check=True)
    text = re.sub(r"\s+", "", json.loads(done.stdout)["text"])
    assert seen.partition("drafted")[0] == f"loadingsmollm2{text}"


def terminal_output(arguments: list[str]) -> str:
    """What a command writes to a terminal of 80 columns."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80", "LINES": "40"}
    environment.pop("NO_COLOR", None)
    process = subprocess.Popen(
        [*LYNXKV, *arguments],
        stdin=theirs, stdout=theirs, stderr=theirs, env=environment, close_fds=True,
    )  # fmt: skip
    os.close(theirs)
    chunks = []
    while True:
        try:
            chunk = os.read(ours, 65536)
        except OSError:  # Linux says EIO when the other side has closed.
            break
        if not chunk:
            break
        chunks.append(chunk)
    os.close(ours)
    assert process.wait() == 0, b"".join(chunks)
    return b"".join(chunks).decode()


def heed_interrupts() -> None:
    """A shell lets its background jobs ignore them, and they pass that on to their children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_an_interrupt_leaves_quietly(cache: str) -> None:
    """While the model loads, or the Anchor arrives: at 64 kbit/s that takes minutes."""
    command = [*LYNXKV, "generate", cache, "--prompt", QUESTION, "--link", "64kbit"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heed_interrupts
    )
    assert process.stderr is not None
    assert "loading" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (130, ""), err
    # An interrupt within the writing of a line lets Python's buffer write it again.
    assert err.removeprefix("loading smollm2\n") == "error: interrupted\n"
