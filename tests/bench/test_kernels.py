"""`lynxkv bench kernels`: rows for everything, beside a copy; shapes that are none are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import jsonschema
import pytest

from lynxkv.bench.kernels import ENCODE_PARTS, KernelRow, device_seconds, larger_part

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
        assert {
            ("default", backend, op) for op in ("quantize", "dequantize anchor", "dequantize full, refine")
        } <= found
        assert {("int8", backend, op) for op in ("quantize", "dequantize anchor")} <= found
    for op in (
        "zstd + dequantize anchor",
        "encode",
        *ENCODE_PARTS,
        "fetch and decode, anchor",
        "fetch and decode, full",
    ):
        assert ("default", "cpu", op) in found
    assert {("default", "zstd", "decompress anchor"), ("int8", "safetensors", "load")} <= found
    assert all(row["ratio_to_copy"] == 1 for row in content["rows"] if row["op"] == "copy")


def test_table(lynx: Lynx) -> None:
    done = lynx(*SMALL, "--codec", "int4", "--backend", "cpu", "--quiet")
    assert done.err == ""
    assert done.out.splitlines()[0].split() == [
        *("shape", "codec", "device", "backend", "op", "gb_per_s", "copy_gb_per_s", "ratio_to_copy", "gb_per_core_s")
    ]


def test_the_larger_part_bounds_the_overlap() -> None:
    row = KernelRow(
        heads=1,
        head_dim=8,
        codec="default",
        device="cpu",
        backend="cpu",
        op="encode",
        gb_per_s=0.5,
        low=0.5,
        high=0.5,
        copy_gb_per_s=5,
        ratio_to_copy=0.1,
        gb_per_core_s=0.3,
        data_bytes=1,
    )
    parts = [replace(row, op=op, gb_per_s=rate) for op, rate in zip(ENCODE_PARTS, (0.6, 0.45), strict=True)]
    assert larger_part([row, *parts]) == pytest.approx(0.9)
    assert larger_part(parts) is None


def test_transfers_are_no_time_of_kernels() -> None:
    times = {"dequantize_entropy_kernel": 30.0, "Memcpy DtoD (Device -> Device)": 5.0, "Memcpy HtoD (Pageable)": 900.0}
    events = [SimpleNamespace(key=key, self_device_time_total=time) for key, time in times.items()]
    assert device_seconds(events) == pytest.approx(35e-6)


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
