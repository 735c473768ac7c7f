"""`lynxkv bench kernels`: rows for everything, beside a copy; shapes that are none are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import jsonschema
import pytest

if TYPE_CHECKING:
    from tests.conftest import Lynx

SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "schemas" / "bench-kernels.schema.json").read_text("utf-8"))
SMALL = ("bench", "kernels", "--shape", "2x8", "--mib", 1, "--repeats", 1)


def test_json(lynx: Lynx) -> None:
    done = lynx(*SMALL, "--codec", "default", "--codec", "int8", "--json")
    assert (done.code, done.err) == (0, "")
    content = json.loads(done.out)
    jsonschema.validate(content, SCHEMA, cls=jsonschema.Draft202012Validator)
    found = {(row["codec"], row["backend"], row["op"]) for row in content["rows"]}
    for backend in ("cpu", "reference"):
        assert {("default", backend, op) for op in ("quantize", "dequantize anchor", "refine")} <= found
        assert {("int8", backend, op) for op in ("quantize", "dequantize anchor")} <= found
    assert ("default", "cpu", "zstd + dequantize anchor") in found
    assert all(row["ratio_to_copy"] == 1 for row in content["rows"] if row["op"] == "copy")


def test_table(lynx: Lynx) -> None:
    done = lynx(*SMALL, "--codec", "int4", "--backend", "cpu", "--quiet")
    assert done.err == ""
    assert done.out.splitlines()[0].split() == [
        *("shape", "codec", "backend", "op", "gb_per_s", "copy_gb_per_s", "ratio_to_copy")
    ]


def test_static(lynx: Lynx, monkeypatch: pytest.MonkeyPatch) -> None:
    static = pytest.importorskip("lynxkv.kernels.triton.static")
    monkeypatch.setattr(static, "CASES", static.CASES[:1])
    content = json.loads(lynx("bench", "kernels", "--static", "--json").out)
    jsonschema.validate(content, SCHEMA, cls=jsonschema.Draft202012Validator)
    assert [row["target"] for row in content["compiled"]] == ["sm_80", "sm_90", "sm_100", "gfx942"]


@pytest.mark.parametrize("arguments", [("--shape", "8"), ("--codec", "zip"), ("--backend", "abacus"), ("--mib", 0)])
def test_refusals(lynx: Lynx, arguments: tuple[object, ...]) -> None:
    done = lynx("bench", "kernels", *arguments)
    assert done.code in (1, 2)
    assert done.out == ""
