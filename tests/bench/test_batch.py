"""`lynxkv bench batch` on a tiny model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest

from lynxkv import checkpoints
from lynxkv.batch import BatchResult, generate_batch
from lynxkv.bench import batch
from lynxkv.bench.batch import BatchBenchRow
from lynxkv.fetch import CacheReader, open_cache
from lynxkv.store import Link
from lynxkv.testing.tiny_models import tiny_model

if TYPE_CHECKING:
    from tests.conftest import Finished, Lynx

SCHEMA = Path(__file__).parents[2] / "docs" / "schemas" / "bench-batch.schema.json"


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    monkeypatch.setattr(checkpoints, "load_model", lambda ref, **options: model)


@pytest.fixture
def documents(tmp_path: Path) -> tuple[str, ...]:
    """Arguments that name three documents."""
    out: list[str] = []
    for name in ("words", "other", "third"):
        path = tmp_path / f"{name}.txt"
        path.write_text(" ".join(f"w{3 + number * number % (44 - len(out))}" for number in range(80)), "utf-8")
        out += ["--document", f"@{path}"]
    return tuple(out)


@pytest.fixture
def arguments(documents: tuple[str, ...]) -> tuple[Any, ...]:
    small = ("--tokens", 60, "--new-tokens", 5, "--repeats", 2, "--link", "20mbit/2ms")
    return ("bench", "batch", *documents[:2], *small)


def checked(done: Finished) -> dict[str, Any]:
    """What `--json` printed, held against its schema."""
    assert done.err == ""
    result: dict[str, Any] = json.loads(done.out)
    jsonschema.validate(result, json.loads(SCHEMA.read_text("utf-8")), cls=jsonschema.Draft202012Validator)
    return result


def test_the_schema_has_the_fields_of_the_rows() -> None:
    rows = json.loads(SCHEMA.read_text("utf-8"))["properties"]["rows"]
    assert list(rows["items"]["properties"]) == list(BatchBenchRow.__dataclass_fields__)


def test_rows_by_batch_size(lynx: Lynx, arguments: tuple[Any, ...]) -> None:
    result = checked(lynx(*arguments, "--batch", 1, "--batch", 3, "--json"))
    assert result["documents"] == ["words.txt"]
    one, three = result["rows"]
    assert (one["batch"], three["batch"], one["caches"], three["caches"], one["repeats"]) == (1, 3, 1, 1, 2)
    assert three["cache_bytes"] >= 3 * one["cache_bytes"]
    for row in (one, three):
        assert row["accepted"] <= row["drafted"]
        assert row["first_verified_s"] <= row["total_s"]


def test_prompts_take_turns_among_caches_of_different_documents(
    lynx: Lynx, arguments: tuple[Any, ...], documents: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[list[int], int, int]] = []

    def decode(prompts: Sequence[tuple[CacheReader, Sequence[int]]], *rest: Any, **options: Any) -> BatchResult:
        readers = list(dict.fromkeys(reader for reader, _ in prompts))
        texts = {tuple(ids) for reader in readers if (ids := reader.token_ids()) is not None}
        seen.append(([readers.index(reader) for reader, _ in prompts], len(readers), len(texts)))
        return generate_batch(prompts, *rest, **options)

    monkeypatch.setattr(batch, "generate_batch", decode)
    sizes = ("--batch", 1, "--batch", 3, "--batch", 4)
    result = checked(lynx(*arguments, *documents[2:], *sizes, "--caches", 1, "--caches", 3, "--json"))
    assert result["documents"] == ["words.txt", "other.txt", "third.txt"]
    assert [(row["caches"], row["batch"]) for row in result["rows"]] == [(1, 1), (1, 3), (1, 4), (3, 3), (3, 4)]
    rounds = [([0], 1, 1), ([0] * 3, 1, 1), ([0] * 4, 1, 1), ([0, 1, 2], 3, 3), ([0, 1, 2, 0], 3, 3)]
    assert seen == rounds * 3  # two repeats, and what warms up before them


def test_caches_share_the_link(
    lynx: Lynx, arguments: tuple[Any, ...], documents: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    links: list[Link | None] = []

    def open_one(url: str, *, link: Link | None) -> CacheReader:
        links.append(link)
        return open_cache(url, link=link)

    monkeypatch.setattr(batch, "open_cache", open_one)
    result = checked(lynx(*arguments, *documents[2:4], "--batch", 2, "--json"))
    assert [row["caches"] for row in result["rows"]] == [2]  # as many as documents
    assert links[:2] == [None, None]
    assert links[2] is links[3] is not links[4]
    assert links[4] is links[5] is not None


def test_the_table(lynx: Lynx, arguments: tuple[Any, ...], documents: tuple[str, ...]) -> None:
    done = lynx(*arguments, *documents[2:4], "--batch", 2, "--caches", 1, "--caches", 2)
    assert done.code == 0
    assert [line.split()[:3] for line in done.out.splitlines()[3:]] == [["2", "1", "cache"], ["2", "2", "caches"]]
    assert done.out.startswith("tiny-llama, 60 tokens, default, 20mbit/2ms, 5 tokens a prompt; medians\n")
    assert "tokens/s" in done.out


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--tokens", 5000), "5000 are needed"),
        (("--caches", 3), "3 caches need as many documents, there are 1"),
        (("--document", "more words", "--caches", 2, "--batch", 1), "no batch has a prompt for each of 2 caches"),
    ],
)
def test_refusals(lynx: Lynx, arguments: tuple[Any, ...], more: tuple[Any, ...], message: str) -> None:
    done = lynx(*arguments, *more)
    assert (done.code, done.out) == (1, "")
    assert message in done.err
