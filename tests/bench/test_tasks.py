"""Planting, asking and counting, on a tiny model whose answers are known because it gave them before."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import jsonschema
import pytest

from lynxkv import checkpoints
from lynxkv.bench.documents import Document
from lynxkv.bench.measure import continue_greedily, live_cache, rounded
from lynxkv.bench.methods import parse_methods
from lynxkv.bench.tasks import ANSWER_TOKENS, NEEDLES, Needle, TaskRow, bench_tasks, plant
from lynxkv.errors import InputError
from lynxkv.integrations.hf import Model
from lynxkv.integrations.hf.templates import open_turn, suffix
from lynxkv.models import prefill
from lynxkv.testing.tiny_models import tiny_model

if TYPE_CHECKING:
    from tests.conftest import Lynx

TOKENS = 60
TEXT = "\n".join(f"w{3 + number * number % 44}" for number in range(400))
DOCUMENT = Document(name="words", kind="prose", text=TEXT, prompts=())
SCHEMA = Path(__file__).parents[2] / "docs" / "schemas" / "bench-tasks.schema.json"


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_model()


def answer(model: Model, needle: Needle, depth: float) -> str:
    share = TEXT[: int(len(TEXT) * TOKENS / len(open_turn(model.tokenizer, TEXT)))]
    ids = open_turn(model.tokenizer, plant(share, needle.sentence, depth))[:TOKENS]
    question = suffix(model.tokenizer, needle.question)
    cache = live_cache(model, rounded(prefill(model, ids)), len(question) + ANSWER_TOKENS)
    return model.to_text(continue_greedily(model, cache, question, ANSWER_TOKENS))


def test_right_answers_are_counted_against_the_original(model: Model) -> None:
    asked = Needle(kind="fact", sentence="w5 w6", question="w7 w8", answer="")
    known = Needle(kind="fact", sentence="w5 w6", question="w7 w8", answer=answer(model, asked, 0.5).upper())
    unknown = Needle(kind="passkey", sentence="w9", question="w7", answer="48213")
    found = bench_tasks(
        model, parse_methods(["raw", "default"]), [DOCUMENT], tokens=(TOKENS,), needles=(known, unknown), depths=(0.5,)
    )
    rows = {(row.codec, row.precision, row.kind): row for row in found}
    assert rows["original", "full", "fact"] == TaskRow(
        codec="original", precision="full", kind="fact", tokens=TOKENS, right=1, kept=1, asked=1, bits=16.0
    )
    assert (rows["raw", "full", "fact"].right, rows["raw", "full", "fact"].kept) == (1, 1)
    assert {key[1] for key in rows if key[0] == "default"} == {"anchor", "full"}
    assert all(row.right == row.kept == 0 for row in found if row.kind == "passkey")


def test_a_run_goes_on_where_it_stopped(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*codecs: str, depths: tuple[float, ...] = (0.5,)) -> list[TaskRow]:
        return bench_tasks(
            model, parse_methods(codecs), [DOCUMENT], tokens=(TOKENS,), depths=depths, state=tmp_path / "state.jsonl"
        )

    first = run("int4")
    with_more = run("int4", "raw")
    assert [row for row in with_more if row.codec != "raw"] == first
    assert len((tmp_path / "state.jsonl").read_text().splitlines()) == 3 * len(NEEDLES)
    monkeypatch.setattr("lynxkv.bench.tasks.prefill", lambda *arguments: pytest.fail("asked again"))
    assert run("int4", "raw") == with_more
    with pytest.raises(pytest.fail.Exception):
        run("int4", depths=(0.7,))


def test_a_sparse_fetch_is_charged_for_what_its_answer_fetched(model: Model) -> None:
    found = bench_tasks(
        model, parse_methods(["sparq:components=1,top_tokens=4", "raw"]), [DOCUMENT], tokens=(TOKENS,), depths=(0.5,)
    )
    bits = {row.codec: row.bits for row in found}
    assert 0 < bits["sparq:components=1,top_tokens=4"] < bits["original"] == 16 < bits["raw"]
    assert live_cache(model, rounded(prefill(model, [5, 6])), 4).tokens == 2  # the model attends as before


def test_a_needle_is_a_paragraph_at_its_depth() -> None:
    text = "".join(f"line {number}\n" for number in range(100))
    for depth in (0.1, 0.5, 0.9):
        planted = plant(text, "HERE.", depth)
        before, after = planted.split("\n\nHERE.\n\n")
        assert f"{before}\n{after}" == text
        assert len(before) / len(text) == pytest.approx(depth, abs=0.02)
    assert plant("no line end", "HERE.", 0.5) == "no line end\n\nHERE.\n\n"


def test_the_needles_say_what_is_asked() -> None:
    for needle in NEEDLES:
        assert needle.answer in needle.sentence
        assert needle.answer not in needle.question


@pytest.mark.parametrize("tokens", [500, 100_000])
def test_lengths_that_do_not_fit_are_refused(model: Model, tokens: int) -> None:
    with pytest.raises(InputError, match="tokens"):
        bench_tasks(model, parse_methods(["raw"]), [DOCUMENT], tokens=(tokens,))


def test_the_command(lynx: Lynx, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "load_model", lambda ref, **options: model)
    done = lynx("bench", "tasks", "--quick", "--tokens", 64, "--codec", "int8", "--json")
    assert done.code == 0
    content = json.loads(done.out)
    jsonschema.validate(content, json.loads(SCHEMA.read_text("utf-8")), cls=jsonschema.Draft202012Validator)
    assert {(row["codec"], row["kind"], row["asked"]) for row in content["rows"]} == {
        (codec, kind, 4) for codec in ("original", "int8") for kind in ("passkey", "fact")
    }
    row = TaskRow(codec="int8", precision="full", kind="fact", tokens=64, right=0, kept=0, asked=4, bits=9.0)
    assert asdict(row).keys() == content["rows"][0].keys()
    table = lynx("bench", "tasks", "--tokens", 64, "--codec", "int8", "--depth", 0.3).out
    assert "of 2" in table
    assert table.splitlines()[0].split() == ["codec", "precision", "task", "tokens", "right", "kept", "bits"]
    assert sum(line.startswith("int8") for line in table.splitlines()) == 2
