"""What `--json` prints is what the schemas in docs/schemas say."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest

from lynxkv.choices import CODEC_NAMES
from lynxkv.kv import kv_to_safetensors
from lynxkv.testing.kv import random_kv
from lynxkv_cli._output import Output

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
@pytest.mark.parametrize("codec", [name for name in CODEC_NAMES if name != "compact"])
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
    assert (inspected["errors"], inspected["queries"]) == (None, None)
    assert (inspected["codec"], inspected["codec_params"]) == (encoded["codec"], encoded["codec_params"])
    assert (inspected["residual_problem"], inspected["orphans"]) == (None, [])


def test_inspect_against_the_original(lynx: Lynx, tmp_path: Path, dump: Path) -> None:
    url = str(tmp_path / "small.lynx")
    lynx("encode", "--from", dump, "--out", url)
    report = valid(lynx("inspect", url, "--against", dump, "--json"), "inspect")
    assert report["queries"] == "keys"
    rows = {(row["layer"], row["tensor"], row["precision"]): row for row in report["errors"]}
    assert len(rows) == 2 * 2 * 2
    assert all(rows[layer, name, "full"]["nmse"] < rows[layer, name, "anchor"]["nmse"] for layer, name, _ in rows)


@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_inspect_describes_a_cache_whose_residual_cannot_be_read(
    lynx: Lynx, tmp_path: Path, dump: Path, damage: str
) -> None:
    url = tmp_path / "small.lynx"
    lynx("encode", "--from", dump, "--out", url)
    whole = valid(lynx("inspect", url, "--json"), "inspect")
    (residual,) = url.glob("residual-*")
    if damage == "missing":
        residual.unlink()
    else:
        residual.write_bytes(residual.read_bytes()[:100])
    report = valid(lynx("inspect", url, "--against", dump, "--json"), "inspect")
    assert residual.name in report["residual_problem"]
    assert {row["precision"] for row in report["errors"]} == {"anchor"}
    told = ("residual_problem", "queries", "errors", "parts")
    assert {**report, **dict.fromkeys(told)} == {**whole, **dict.fromkeys(told)}
    assert report["parts"] == [part for part in whole["parts"] if part["shard"] == "anchor"]
    assert f"Residual    cannot be read: {report['residual_problem']}" in lynx("inspect", url).out
    assert lynx("check", url).code == 1


def test_superseded_residuals_are_named(lynx: Lynx, tmp_path: Path, dump: Path) -> None:
    url = tmp_path / "small.lynx"
    lynx("encode", "--from", dump, "--out", url)
    (old,) = url.glob("residual-*")
    size = old.stat().st_size
    kv_to_safetensors(random_kv(seed=1), dump)
    lynx("encode", "--from", dump, "--out", url, "--force")
    for command in ("check", "inspect"):
        report = valid(lynx(command, url, "--json"), command)
        assert (report["orphans"], report["orphan_bytes"]) == ([old.name], size)
        assert f"beside it a Residual of earlier encodes, {size / 1000:.2f} kB: {old.name}" in lynx(command, url).out


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
def test_json_survives_any_locale(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    value = {"text": "grüße \N{SNOWMAN} \udcff"}
    stream = io.TextIOWrapper(io.BytesIO(), encoding, errors="backslashreplace")
    monkeypatch.setattr("sys.stdout", stream)
    Output("json").result(value)
    stream.flush()
    assert json.loads(stream.buffer.getvalue().decode(encoding)) == value


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
