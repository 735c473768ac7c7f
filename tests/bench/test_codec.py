"""The codec bench end to end on a tiny model, its documents, methods, state file and reports."""

from __future__ import annotations

import csv
import json
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import fsspec
import pytest

from lynxkv.bench.cells import CellFile
from lynxkv.bench.codec import CodecBench, Plan, bench_codec
from lynxkv.bench.documents import GENERAL_PROMPTS, Document, standard_documents
from lynxkv.bench.methods import DEFAULT_METHODS, parse_methods
from lynxkv.bench.report import Row, as_json, comparisons, front, rows, write_csv
from lynxkv.bench.sweeps import SWEEPS
from lynxkv.errors import InputError
from lynxkv.integrations.hf import Model
from lynxkv.testing.tiny_models import tiny_model

REQUIRED = [
    *("codec", "model", "tokens", "anchor_bits", "full_bits", "total_bits", "attn_nmse_anchor", "attn_nmse_full"),
    *("kl_full", "top1_full", "accepted_mean", "accepted_low", "accepted_high", "draft_tokens"),
]
CODECS = ("default", "default:exact=true", "int8", "int4", "raw")


def words(seed: int, count: int = 200) -> str:
    return " ".join(f"w{3 + (seed * number * number + 5 * number) % 44}" for number in range(count))


def tiny_plan() -> Plan:
    documents = (
        Document(name="one", kind="prose", text=words(7), prompts=("w4 w5", "w6", "w7 w8 w9")),
        Document(name="two", kind="code", text=words(11), prompts=("w10", "w11 w12", "w13")),
    )
    return Plan(documents=documents, tokens=(80, 150), next_tokens=16, draft_tokens=8)


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_model("mistral")


@pytest.fixture(scope="module")
def bench(model: Model) -> CodecBench:
    return bench_codec(model, parse_methods(CODECS), tiny_plan())


def test_rows_have_the_documented_fields_first() -> None:
    assert [field.name for field in fields(Row)][: len(REQUIRED)] == REQUIRED


def test_a_row_a_codec_and_length(bench: CodecBench) -> None:
    table = rows(bench)
    assert [(row.tokens, row.codec) for row in table] == [(tokens, codec) for tokens in (80, 150) for codec in CODECS]
    for row in table:
        assert (row.documents, row.prompts, row.positions) == (2, 6, 32)
        assert 0 <= row.accepted_low <= row.accepted_mean <= row.accepted_high <= 8
        assert row.accepted_mean <= row.target_tokens_mean
        assert row.anchor_bits <= row.full_bits <= row.total_bits
        assert (row.total_bits > row.full_bits) == (row.exact_identical is not None)
        assert row.attn_nmse_full <= row.attn_nmse_anchor
        assert row.accepted_by_full_mean <= min(row.accepted_mean, row.accepted_full_mean)


def test_codecs_stand_in_their_known_order(bench: CodecBench) -> None:
    table = {row.codec: row for row in rows(bench) if row.tokens == 150}
    assert table["raw"].attn_nmse_full == 0
    assert table["raw"].top1_full == 1
    assert table["default:exact=true"].exact_identical
    assert table["default:exact=true"].attn_nmse_full == table["default"].attn_nmse_full
    assert table["raw"].accepted_mean == table["raw"].target_tokens_mean
    assert table["default"].attn_nmse_full < table["default"].attn_nmse_anchor
    assert table["int8"].attn_nmse_full < table["int4"].attn_nmse_full / 50
    assert table["default"].attn_nmse_full < table["int4"].attn_nmse_full / 20
    assert table["int8"].attn_nmse_anchor == table["int8"].attn_nmse_full


def test_the_front_has_what_nothing_beats(bench: CodecBench) -> None:
    table = rows(bench)
    points = front(table, 150)
    assert [point.bits for point in points] == sorted(point.bits for point in points)
    assert [point.attn_nmse for point in points] == sorted((point.attn_nmse for point in points), reverse=True)
    everything = [
        pair
        for row in table
        if row.tokens == 150
        for pair in ((row.anchor_bits, row.attn_nmse_anchor), (row.full_bits, row.attn_nmse_full))
    ]
    for point in points:
        assert not any(bits < point.bits and error < point.attn_nmse for bits, error in everything)
    assert {(point.codec, point.precision) for point in points} == {("int4", "full"), ("raw", "full")}  # so few tokens
    assert {point.tokens for point in points} == {150}


def test_both_precisions_of_a_codec_may_lie_on_the_front(bench: CodecBench) -> None:
    row = next(row for row in rows(bench) if row.exact_identical is None)
    sizes: dict[str, Any] = {"tokens": 99, "total_bits": 8.0}

    def errors(anchor: float, full: float) -> dict[str, Any]:
        return {"attn_nmse_anchor": anchor, "attn_nmse_full": full}

    split = replace(row, codec="split", anchor_bits=4.0, full_bits=7.0, **errors(1e-3, 1e-5), **sizes)
    whole = replace(row, codec="whole", anchor_bits=8.0, full_bits=8.0, **errors(1e-4, 1e-4), **sizes)
    assert [(point.codec, point.precision) for point in front([whole, split], 99)] == [
        ("split", "anchor"),
        ("split", "full"),
    ]
    exact = replace(split, codec="exact", anchor_bits=5.0, full_bits=7.5, total_bits=11.0, exact_identical=True)
    assert [(point.codec, point.precision, point.bits) for point in front([exact, whole, split], 99)][2:] == [
        ("exact", "exact", 11.0)
    ]
    assert front([split], 100) == []


def test_comparisons_are_paired(bench: CodecBench) -> None:
    found = comparisons(bench, ["int8", "not measured"])
    assert [(item.tokens, item.codec) for item in found] == [
        (tokens, codec) for tokens in (80, 150) for codec in CODECS if codec != "int8"
    ]
    accepted = {(row.tokens, row.codec): row.accepted_mean for row in rows(bench)}
    for item in found:
        assert item.accepted_difference is not None
        expected = accepted[item.tokens, item.codec] - accepted[item.tokens, "int8"]
        assert item.accepted_difference.value == pytest.approx(expected)
        assert item.attn_ratio_full is not None
    raw = next(item for item in comparisons(bench, ["raw"]) if item.codec == "int8")
    assert raw.attn_ratio_full is None  # raw has no error to compare with


def test_json_and_csv(bench: CodecBench, tmp_path: Path) -> None:
    result = as_json(bench, ["int8"])
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    write_csv(rows(bench), tmp_path / "rows.csv")
    with (tmp_path / "rows.csv").open(newline="") as file:
        read = list(csv.DictReader(file))
    assert [row["codec"] for row in read] == [row["codec"] for row in result["rows"]]
    assert float(read[0]["anchor_bits"]) == result["rows"][0]["anchor_bits"]


def test_nothing_is_left_in_memory(bench: CodecBench) -> None:
    assert not fsspec.filesystem("memory").glob("/lynxkv-bench-*")


def test_a_run_goes_on_where_it_stopped(model: Model, bench: CodecBench, tmp_path: Path) -> None:
    state, seen = tmp_path / "state.jsonl", []
    plan, methods = tiny_plan(), parse_methods(CODECS)
    first = bench_codec(model, methods[:1], plan, state=state)
    with state.open("a") as file:
        file.write('{"key": "cut sho')
    again = bench_codec(model, methods, plan, state=state, progress=lambda *step: seen.append(step))
    assert ("codecs", 4, 20) in seen
    assert ("codecs", 0, 20) not in seen
    assert [cell for cell in again.cells if cell.codec == methods[0].label] == list(first.cells)
    assert rows(again) == rows(bench)
    seen.clear()
    assert bench_codec(model, methods, plan, state=state, progress=lambda *step: seen.append(step)).cells == again.cells
    assert not seen
    longer = replace(plan, draft_tokens=9)
    bench_codec(model, methods[:1], longer, state=state, progress=lambda *step: seen.append(step))
    assert ("codecs", 0, 4) in seen  # another plan shares nothing


def test_a_file_that_is_no_state_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("first\nsecond\n")
    with pytest.raises(InputError, match="not a state file"):
        CellFile(tmp_path / "notes.txt")


@pytest.mark.parametrize("tokens", [(190,), (80, 500)])
def test_documents_and_contexts_that_are_too_short_are_refused(model: Model, tokens: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match="tokens"):
        bench_codec(model, parse_methods(["raw"]), replace(tiny_plan(), tokens=tokens))


def test_sweeps_are_settings_that_no_default_hides() -> None:
    for name, codecs in SWEEPS.items():
        assert len(codecs) == len(set(codecs)) > 2, name
    together = list(dict.fromkeys(codec for codecs in SWEEPS.values() for codec in codecs))
    methods = parse_methods(together)  # which refuses two names of one setting
    assert [method.label for method in methods] == together


def test_a_sparse_fetch_has_the_bits_it_fetched(model: Model) -> None:
    label = "sparq:components=2,top_tokens=8"
    found = rows(bench_codec(model, parse_methods([label, "raw"]), replace(tiny_plan(), tokens=(80,))))
    (sparse,) = [row for row in found if row.codec == label]
    assert 0 < sparse.anchor_bits == sparse.full_bits < sparse.total_bits == 16
    assert sparse.attn_nmse_full > 0
    assert sparse.k_nmse_full == sparse.v_nmse_full == 0
    raw = next(row for row in found if row.codec == "raw")
    assert raw.attn_nmse_full == 0
    assert raw.accepted_mean == raw.target_tokens_mean  # measured after it, by the model's own attention


def test_the_standard_documents() -> None:
    documents = standard_documents()
    assert [document.kind for document in documents] == ["prose", "code", "prose", "code"]
    assert documents == standard_documents()
    assert len({document.sha256 for document in documents}) == len(documents)
    for document in documents:
        assert len(document.text) > 40_000
        assert len(set(document.prompts)) == 8
    assert len(set(GENERAL_PROMPTS)) == 8


def test_methods_from_text() -> None:
    methods = parse_methods(DEFAULT_METHODS)
    assert [method.label for method in methods] == list(DEFAULT_METHODS)
    settings = {method.label: dict(method.settings) for method in methods}
    assert settings["alg1:alpha=100,chunk_dtype=f32"].items() >= {"alpha": 100, "chunk_dtype": "f32"}.items()
    assert settings["int8:compress=true"]["compress"] is True
    assert settings["default:exact=true"]["exact"] is True
    assert dict(parse_methods(["default:radix=5"])[0].settings)["radix"] == 5


@pytest.mark.parametrize(
    "texts",
    [
        ["no-such-codec"],
        ["default:no_such_parameter=1"],
        ["default:radix"],
        ["default:radix="],
        ["default:=5"],
        ["default:radix=5,radix=6"],
        ["default:radix=many"],
        ["default:exact=1"],
        ["default", "default:radix=8"],
    ],
)
def test_methods_that_are_refused(texts: list[str]) -> None:
    with pytest.raises(InputError):
        parse_methods(texts)


def test_cells_survive_the_state_file(bench: CodecBench, tmp_path: Path) -> None:
    file = CellFile(tmp_path / "state.jsonl")
    for number, cell in enumerate(bench.cells):
        file.add(str(number), cell)
    read = CellFile(tmp_path / "state.jsonl")
    assert [read.get(str(number)) for number in range(len(bench.cells))] == list(bench.cells)
    assert asdict(bench.cells[0])["anchor"]["accepted"] == bench.cells[0].anchor.accepted
