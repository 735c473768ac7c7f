"""`lynxkv bench decode` on a tiny model: the rows it makes, the sizes they state, what is refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest

from lynxkv import checkpoints
from lynxkv.bench import decode
from lynxkv.bench.decode import DecodeRow, Speedup
from lynxkv.bench.state import StateFile
from lynxkv.bench.systems import CacheSystem, Timing
from lynxkv.errors import InputError
from lynxkv.store import Link
from lynxkv.testing.tiny_models import tiny_model

if TYPE_CHECKING:
    from tests.conftest import Lynx

SCHEMA = Path(__file__).parents[2] / "docs" / "schemas" / "bench-decode.schema.json"
SMALL = ("bench", "decode", "--tokens", 60, "--kth", 5, "--repeats", 2, "--link", "20mbit/2ms")
DRAFTS = ("default@draft", "default@held")
SYSTEMS = (
    "default",
    "default@whole",
    "default@exact",
    "int8@whole",
    "int8@layers",
    "raw@whole",
    "turboquant@whole",
    "byte-planes@whole",
    "prefill",
    "default@draft",
    "default@held",
)


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    monkeypatch.setattr(checkpoints, "load_model", lambda ref, **options: model)


@pytest.fixture
def document(tmp_path: Path) -> str:
    path = tmp_path / "words.txt"
    path.write_text(" ".join(f"w{3 + number * number % 44}" for number in range(80)), "utf-8")
    return f"@{path}"


def test_rows_of_all_kinds_of_systems(lynx: Lynx, document: str) -> None:
    chosen = [argument for system in SYSTEMS for argument in ("--system", system)]
    done = lynx(*SMALL, *chosen, "--document", document, "--json")
    assert done.err == ""
    result: dict[str, Any] = json.loads(done.out)
    jsonschema.validate(result, json.loads(SCHEMA.read_text("utf-8")), cls=jsonschema.Draft202012Validator)
    rows = {row["system"]: row for row in result["rows"]}
    assert list(rows) == list(SYSTEMS)
    for row in rows.values():
        assert row["text_equal"]
        assert row["first_token_s"] <= row["first_verified_s"] <= row["kth_verified_s"]
        assert (row["tokens"], row["repeats"], row["link_bit_per_s"], row["rtt_s"]) == (60, 2, 20e6, 0.002)
    default, whole, exact = rows["default"], rows["default@whole"], rows["default@exact"]
    assert default["bytes_anchor"] < default["bytes_total"] == whole["bytes_anchor"] == whole["bytes_total"]
    assert exact["bytes_anchor"] < default["bytes_total"] < exact["bytes_total"]
    assert whole["drafted"] == rows["int8@layers"]["drafted"] == 0
    assert rows["prefill"]["bytes_total"] == 0
    assert rows["byte-planes@whole"]["bytes_total"] < 1.2 * rows["raw@whole"]["bytes_total"]
    assert rows["turboquant@whole"]["bytes_total"] < rows["byte-planes@whole"]["bytes_total"]
    assert rows["default@draft"]["drafted"] == rows["default@held"]["drafted"] == 5
    assert rows["default@whole"]["bookkeeping"] is rows["prefill"]["bookkeeping"] is None
    assert 0 < rows["default@draft"]["bookkeeping"] < 1
    assert [item["system"] for item in result["speedups"]] == [name for name in SYSTEMS if name != "int8@whole"]
    assert {item["baseline"] for item in result["speedups"]} == {"int8@whole"}


def test_the_tables(lynx: Lynx, document: str) -> None:
    done = lynx(*SMALL, "--system", "default", "--system", "raw@whole", "--document", document)
    assert done.code == 0
    assert "tiny-llama, 60 tokens, 20 Mbit/s, round trip 2 ms, medians of 2; seconds" in done.out
    assert "times sooner than default, in pairs; median [least, most]" in done.out
    assert "5th" in done.out


def test_a_run_goes_on_where_it_stopped(
    lynx: Lynx, document: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, Link | None]] = []
    original = CacheSystem.answer

    def answer(
        system: CacheSystem, suffix_ids: Sequence[int], tokens: int, link: Link | None, *, check: bool
    ) -> Timing:
        if link is not None:
            asked.append((system.label, link))
        return original(system, suffix_ids, tokens, link, check=check)

    monkeypatch.setattr(CacheSystem, "answer", answer)
    state = tmp_path / "state.jsonl"
    arguments = (*SMALL, "--document", document, "--state", state, "--system", "default@draft", "--json")
    first = json.loads(lynx(*arguments).out)
    lines = state.read_text("utf-8").splitlines(keepends=True)
    state.write_text(lines[0] + lines[1][:20], "utf-8")  # as if it had been killed while it wrote
    asked.clear()
    assert json.loads(lynx(*arguments).out)["rows"][0]["repeats"] == 2
    assert [label for label, _ in asked] == ["default@draft"]
    asked.clear()
    again = json.loads(lynx(*arguments, "--system", "raw@whole").out)
    assert [label for label, _ in asked] == ["raw@whole"] * 2
    assert {row["system"]: row["drafted"] for row in again["rows"]} == {"default@draft": 5, "raw@whole": 0}
    assert again["rows"][0]["bytes_total"] == first["rows"][0]["bytes_total"]
    asked.clear()
    assert json.loads(lynx(*arguments, "--system", "raw@whole").out) == again
    assert not asked
    done = lynx(*arguments, "--link", "10mbit/2ms")
    assert [row["repeats"] for row in json.loads(done.out)["rows"]] == [2, 2]
    assert len(asked) == 2


@pytest.mark.parametrize(
    "foreign",
    [
        b"notes in one line",
        b'{"key": "of another bench", "result": {"codec": "default"}}\n',
        b'{"key": "numbers", "result": {"timing": {"first_draft_s": "soon"}, "sizes": [1, 2], "step_s": 0.1}}\n',
        b'{"key": "sizes", "result": {"sizes": "ab"}}\n',
        b'["key", "result"]\n',
        b"[" * 100_000 + b"\n",
        b"\xff\xfe\n",
        b"\n",
    ],
)
def test_a_file_of_somebody_else_is_refused_and_left_as_it_is(foreign: bytes, tmp_path: Path) -> None:
    path = tmp_path / "notes"
    path.write_bytes(foreign)
    with pytest.raises(InputError, match="is not a state file of this bench"):
        StateFile(path, decode._read)
    assert path.read_bytes() == foreign


@pytest.mark.parametrize("value", [None, "1.5", [1.5]])
@pytest.mark.parametrize("name", ["first_draft_s", "kth_verified_s", "accepted"])
def test_a_damaged_answer_is_refused_unless_there_may_be_none(name: str, value: Any, tmp_path: Path) -> None:
    timing = Timing(
        first_draft_s=0.5, first_verified_s=1.0, kth_verified_s=2.0, drafted=3, accepted=2, peak_bytes=9, equal=True
    )
    result = {"timing": {**asdict(timing), name: value}, "sizes": [1, 2], "step_s": 0.1}
    path = tmp_path / "state.jsonl"
    path.write_text(json.dumps({"key": "k", "result": result}) + "\n", "utf-8")
    if (name, value) == ("first_draft_s", None):
        kept = StateFile(path, decode._read).get("k")
        assert kept is not None
        assert kept.timing == replace(timing, first_draft_s=None)
    else:
        with pytest.raises(InputError, match="is not a state file of this bench"):
            StateFile(path, decode._read)


def test_what_cannot_be_kept_is_told_before_it_is_measured(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere" / "state.jsonl"):
        with pytest.raises(InputError, match="cannot be written"):
            StateFile(path, decode._read)


def test_the_schema_has_the_fields_of_the_rows() -> None:
    properties = json.loads(SCHEMA.read_text("utf-8"))["properties"]
    assert list(properties["rows"]["items"]["properties"]) == list(DecodeRow.__dataclass_fields__)
    assert list(properties["speedups"]["items"]["properties"]) == list(Speedup.__dataclass_fields__)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--system", "default@sometimes"), 1, "there is no system"),
        (("--state", __file__), 1, "not a state file"),
        (("--system", "best"), 1, "there is no codec"),
        (("--system", "kivi@progressive"), 1, "fetched whole"),
        (("--system", "kivi:window=x@whole"), 1, "window"),
        (("--system", "raw@whole", "--system", "raw@whole"), 1, "twice"),
        (("--system", "raw@whole", "--baseline", "int4@whole"), 2, "not among"),
        (("--link", "fast"), 2, "cannot read the link"),
        (("--tokens", "5000"), 1, "5000 are needed"),
    ],
)
def test_refusals(lynx: Lynx, document: str, arguments: tuple[str, ...], code: int, message: str) -> None:
    done = lynx("bench", "decode", "--document", document, *arguments)
    assert (done.code, done.out) == (code, "")
    assert message in done.err
