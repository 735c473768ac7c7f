"""`lynxkv bench fetch` as a command and as a function, on a small cache."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest

import lynxkv
from lynxkv.bench.fetch import FetchRow, FetchSettings, measure_fetch
from lynxkv.errors import FetchError
from lynxkv.testing.filesystem import filesystem_of, simulated
from lynxkv.testing.kv import random_kv

if TYPE_CHECKING:
    from tests.conftest import Lynx

SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "schemas" / "bench-fetch.schema.json").read_text("utf-8"))


@pytest.mark.parametrize("codec", ["default", "int8"])
def test_json_is_as_documented(codec: str, lynx: Lynx, tmp_path: Path) -> None:
    url = str(tmp_path / "a.lynx")
    report = lynxkv.encode(random_kv(), url, codec=codec)
    done = lynx("bench", "fetch", url, "--repeats", 1, "--concurrency", 1, "--concurrency", 3, "--json")
    assert done.err == ""
    result: dict[str, Any] = json.loads(done.out)
    jsonschema.validate(result, SCHEMA, cls=jsonschema.Draft202012Validator)
    assert [row["concurrency"] for row in result["rows"]] == [1, 3]
    assert {row["bytes_anchor"] for row in result["rows"]} == {report.bytes_anchor}
    assert all((row["residual_s"] is None) is (codec == "int8") for row in result["rows"])


def test_the_schema_has_the_fields_of_a_row() -> None:
    described = SCHEMA["properties"]["rows"]["items"]["properties"]
    assert list(described) == [field.name for field in fields(FetchRow)]


def test_the_table(lynx: Lynx, tmp_path: Path) -> None:
    lynxkv.encode(random_kv(), tmp_path / "a.lynx")
    done = lynx("bench", "fetch", tmp_path / "a.lynx", "--repeats", 1, "--link", "1gbit/1ms")
    assert done.code == 0
    header, row = done.out.splitlines()
    assert header.split()[:4] == ["transport", "requests", "header", "Anchor"]
    assert row.startswith("fsspec ")
    assert "fastest here: fsspec, 8 requests" in done.err


def test_a_store_that_fails_now_and_then_is_measured(tmp_path: Path) -> None:
    lynxkv.encode(random_kv(), tmp_path / "a.lynx")
    settings = FetchSettings(transports=["fsspec"], concurrencies=[2], repeats=2)
    with simulated(str(tmp_path), share=0.2, faults=("refused", "overloaded"), seed=3) as far:
        (row,) = measure_fetch(f"{far}/a.lynx", settings)
        failed = [fault for fault in filesystem_of(far).injected if fault in ("refused", "overloaded")]
    assert len(failed) > 5
    assert row.anchor_plain_s > 0


def test_a_download_that_keeps_failing_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lynxkv.encode(random_kv(), tmp_path / "a.lynx")
    settings = FetchSettings(transports=["fsspec"], concurrencies=[2], repeats=1)

    @asynccontextmanager
    async def broken(*_: object) -> AsyncIterator[None]:
        raise ConnectionResetError("reset by peer")
        yield

    class Broken:
        get = broken

        def close(self) -> None: ...

    monkeypatch.setattr("lynxkv.bench.fetch.transport_for", lambda *_: Broken())
    with pytest.raises(FetchError, match="reset by peer"):
        measure_fetch(tmp_path / "a.lynx", settings)


def test_what_cannot_be_measured_is_refused(lynx: Lynx, tmp_path: Path) -> None:
    assert lynx("bench", "fetch", tmp_path / "absent.lynx").code == 1
    lynxkv.encode(random_kv(), tmp_path / "a.lynx")
    done = lynx("bench", "fetch", tmp_path / "a.lynx", "--transport", "obstore")
    assert done.code == 1
    assert "hint: " in done.err
    assert lynx("bench", "fetch", tmp_path / "a.lynx", "--transport", "pigeon").code == 2
