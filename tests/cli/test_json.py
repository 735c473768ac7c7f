"""What `--json` prints is what the schemas in docs/schemas say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest

from lynxkv.kv import kv_to_safetensors
from lynxkv.testing.kv import random_kv

if TYPE_CHECKING:
    from tests.conftest import Finished, Lynx

SCHEMAS = Path(__file__).parents[2] / "docs" / "schemas"


def schema(name: str) -> dict[str, Any]:
    """One of the documented schemas."""
    content: dict[str, Any] = json.loads((SCHEMAS / f"{name}.schema.json").read_text("utf-8"))
    return content


def valid(done: Finished, name: str) -> dict[str, Any]:
    """The object a command printed, after checking it against its schema and that nothing else was printed."""
    assert done.err == ""
    content: dict[str, Any] = json.loads(done.out)
    jsonschema.validate(content, schema(name), cls=jsonschema.Draft202012Validator)
    return content


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    kv_to_safetensors(random_kv(), tmp_path / "kv.safetensors")
    return tmp_path / "kv.safetensors"


@pytest.mark.parametrize("path", sorted(SCHEMAS.iterdir()), ids=lambda path: path.name)
def test_schemas_are_schemas(path: Path) -> None:
    jsonschema.Draft202012Validator.check_schema(json.loads(path.read_text("utf-8")))


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("codec", ["default", "alg1", "alg1-shift", "raw", "int8", "int4"])
def test_encode_check_and_inspect(lynx: Lynx, tmp_path: Path, dump: Path, codec: str, exact: bool) -> None:
    url = str(tmp_path / "small.lynx")
    options = ["--exact"] if exact else []
    done = lynx("encode", "--from", dump, "--codec", codec, *options, "--out", url, "--json")
    encoded = valid(done, "encode")
    assert (encoded["bytes_exact"] > 0) is (exact and codec != "raw")
    checked = valid(lynx("check", url, "--json"), "check")
    inspected = valid(lynx("inspect", url, "--json"), "inspect")
    assert {report["cache_id"] for report in (encoded, checked, inspected)} == {encoded["cache_id"]}
    assert checked["bytes"] == sum(encoded[name] for name in ("bytes_anchor", "bytes_residual", "bytes_exact"))
    assert sum(part["bytes"] for part in inspected["parts"]) == checked["bytes"]
    assert inspected["errors"] is None


def test_inspect_against_the_original(lynx: Lynx, tmp_path: Path, dump: Path) -> None:
    url = str(tmp_path / "small.lynx")
    lynx("encode", "--from", dump, "--out", url)
    report = valid(lynx("inspect", url, "--against", dump, "--json"), "inspect")
    rows = {(row["layer"], row["tensor"], row["precision"]): row for row in report["errors"]}
    assert len(rows) == 2 * 2 * 2
    assert all(rows[layer, name, "full"]["nmse"] < rows[layer, name, "anchor"]["nmse"] for layer, name, _ in rows)


@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "missing.lynx"),
        ("inspect", "missing.lynx"),
        ("generate", "missing.lynx", "--prompt", "Why?"),
        ("encode", "--out", "x.lynx"),
        ("encode", "--out"),
        ("check", "--fast"),
    ],
)
def test_errors(lynx: Lynx, arguments: tuple[str, ...]) -> None:
    done = lynx(*arguments, "--json")
    assert done.code in (1, 2)
    valid(done, "error")


def test_quiet_prints_data_only(lynx: Lynx, tmp_path: Path, dump: Path) -> None:
    url = str(tmp_path / "small.lynx")
    assert lynx("encode", "--from", dump, "--out", url, "--quiet").out == f"{url}\n"
    assert lynx("check", url, "--quiet").out == ""
    assert url in lynx("inspect", url, "--quiet").out
    assert lynx("inspect", url, "--quiet").err == ""
