"""`lynxkv bench codec` as a command: its table, JSON, files and refusals, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest

from lynxkv import checkpoints
from lynxkv.bench.report import Row
from lynxkv.testing.tiny_models import tiny_model

if TYPE_CHECKING:
    from tests.conftest import Lynx

SCHEMA = Path(__file__).parents[2] / "docs" / "schemas" / "bench-codec.schema.json"
SMALL = ("bench", "codec", "--tokens", 60, "--draft-tokens", 6, "--codec", "default", "--codec", "int8")


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    monkeypatch.setattr(checkpoints, "load_model", lambda ref, **options: model)


@pytest.fixture
def document(tmp_path: Path) -> str:
    path = tmp_path / "words.txt"
    path.write_text(" ".join(f"w{3 + number * number % 44}" for number in range(250)), "utf-8")
    return f"@{path}"


def test_the_table(lynx: Lynx, document: str) -> None:
    done = lynx(*SMALL, "--document", document)
    assert done.code == 0
    assert "tiny-llama, 60 tokens; documents: 1, prompts: 8, next tokens: 128" in done.out
    lines = done.out.splitlines()
    assert sum(line.startswith("default  ") for line in lines) == 3  # its row, on the front, and against int8
    assert "against int8, paired; 95 % intervals" in lines
    assert "2 of 2 cells" in done.err


def test_json_is_as_documented(lynx: Lynx, document: str, tmp_path: Path) -> None:
    state, csv = tmp_path / "state.jsonl", tmp_path / "rows.csv"
    arguments = (*SMALL, "--document", document, "--json", "--state", state, "--csv", csv)
    done = lynx(*arguments)
    assert done.err == ""
    result: dict[str, Any] = json.loads(done.out)
    jsonschema.validate(result, json.loads(SCHEMA.read_text("utf-8")), cls=jsonschema.Draft202012Validator)
    assert [row["codec"] for row in result["rows"]] == ["default", "int8"]
    assert [item["baseline"] for item in result["comparisons"]] == ["int8"]
    assert csv.read_text("utf-8").startswith("codec,model,tokens,anchor_bits,full_bits,total_bits,attn_nmse_anchor,")
    assert len(state.read_text("utf-8").splitlines()) == 2
    assert lynx(*arguments).out == done.out


def test_the_schema_has_the_fields_of_a_row() -> None:
    row = json.loads(SCHEMA.read_text("utf-8"))["properties"]["rows"]["items"]
    assert list(row["properties"]) == list(Row.__dataclass_fields__)
    assert row["required"] == list(row["properties"])


def test_a_sweep_beside_other_codecs(lynx: Lynx, document: str) -> None:
    arguments = ("--tokens", 60, "--draft-tokens", 2, "--prompts", 2, "--document", document, "--json")
    result = json.loads(lynx("bench", "codec", "--sweep", "page", "--codec", "fixed", *arguments).out)
    assert {row["prompts"] for row in result["rows"]} == {2}
    assert [row["codec"] for row in result["rows"]] == [
        "fixed", "alg1:page_tokens=128", "alg1", "alg1:page_tokens=512", "fixed:page_tokens=128",
        "fixed:page_tokens=256",
    ]  # fmt: skip


def test_a_standard_document_by_its_name(lynx: Lynx) -> None:
    # All its words are padding to the tiny model, whose keys and values are then all zero: no error, whatever the code.
    arguments = ("--tokens", 60, "--draft-tokens", 2, "--document", "statements", "--json")
    result = json.loads(lynx("bench", "codec", "--codec", "int4", *arguments).out)
    assert [(item["name"], item["kind"]) for item in result["documents"]] == [("statements", "prose")]
    assert result["rows"][0]["v_nmse_full"] == 0


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("--codec", "best"), 1),
        (("--codec", "default:radix"), 1),
        (("--codec", "default", "--baseline", "int4"), 2),
        (("--sweep", "everything"), 2),
        (("--document", "@missing.txt"), 2),
        (("--tokens", "3"), 2),
        (("--tokens", "100000"), 1),
        ((), 1),  # the standard documents have other words than the tiny model, but enough: its context is short
    ],
)
def test_refusals_have_a_hint(lynx: Lynx, arguments: tuple[str, ...], code: int) -> None:
    done = lynx("bench", "codec", *arguments, "--json")
    assert done.code == code
    assert json.loads(done.out)["error"]["hint"]
