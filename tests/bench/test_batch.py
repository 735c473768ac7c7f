"""`lynxkv bench batch` on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest

from lynxkv import checkpoints
from lynxkv.bench.batch import BatchBenchRow
from lynxkv.testing.tiny_models import tiny_model

if TYPE_CHECKING:
    from tests.conftest import Lynx

SCHEMA = Path(__file__).parents[2] / "docs" / "schemas" / "bench-batch.schema.json"


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    monkeypatch.setattr(checkpoints, "load_model", lambda ref, **options: model)


@pytest.fixture
def arguments(tmp_path: Path) -> tuple[Any, ...]:
    path = tmp_path / "words.txt"
    path.write_text(" ".join(f"w{3 + number * number % 44}" for number in range(80)), "utf-8")
    small = ("--tokens", 60, "--new-tokens", 5, "--repeats", 2, "--link", "20mbit/2ms")
    return ("bench", "batch", "--document", f"@{path}", *small)


def test_rows_by_batch_size(lynx: Lynx, arguments: tuple[Any, ...]) -> None:
    done = lynx(*arguments, "--batch", 1, "--batch", 3, "--json")
    assert done.err == ""
    result: dict[str, Any] = json.loads(done.out)
    schema = json.loads(SCHEMA.read_text("utf-8"))
    jsonschema.validate(result, schema, cls=jsonschema.Draft202012Validator)
    assert list(schema["properties"]["rows"]["items"]["properties"]) == list(BatchBenchRow.__dataclass_fields__)
    one, three = result["rows"]
    assert (one["batch"], three["batch"], one["repeats"]) == (1, 3, 2)
    assert three["cache_bytes"] >= 3 * one["cache_bytes"]
    for row in (one, three):
        assert row["accepted"] <= row["drafted"]
        assert row["first_verified_s"] <= row["total_s"]


def test_the_table(lynx: Lynx, arguments: tuple[Any, ...]) -> None:
    done = lynx(*arguments, "--batch", 2)
    assert done.code == 0
    assert done.out.startswith("tiny-llama, 60 tokens, default, 20mbit/2ms, 5 tokens a prompt; medians\n")
    assert "tokens/s" in done.out


def test_a_short_document_is_refused(lynx: Lynx, arguments: tuple[Any, ...]) -> None:
    done = lynx(*arguments[:-8], "--tokens", 5000)
    assert (done.code, done.out) == (1, "")
    assert "5000 are needed" in done.err
