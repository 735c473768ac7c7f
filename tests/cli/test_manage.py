"""`lynxkv ls`, `rm`, `prune` and `export`: their tables, JSON and refusals."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest

import lynxkv
from lynxkv.kv import kv_from_safetensors
from lynxkv.testing.kv import random_kv

if TYPE_CHECKING:
    from tests.conftest import Finished, Lynx

SCHEMAS = Path(__file__).parents[2] / "docs" / "schemas"


def valid(done: Finished, name: str) -> dict[str, Any]:
    """The object a command printed, after checking it against its schema."""
    assert (done.code, done.err) == (0, "")
    content: dict[str, Any] = json.loads(done.out)
    schema = json.loads((SCHEMAS / f"{name}.schema.json").read_text("utf-8"))
    jsonschema.validate(content, schema, cls=jsonschema.Draft202012Validator)
    return content


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a", "b"):
        lynxkv.encode(random_kv(layers=1), tmp_path / f"{name}.lynx")
    return tmp_path


def test_ls(lynx: Lynx, folder: Path) -> None:
    done = lynx("ls", folder)
    header, first, second = done.out.splitlines()
    assert header.split() == ["tokens", "bytes", "written", "model", "cache"]
    assert first.endswith(f"unknown  {folder}/a.lynx")
    assert second.split()[0] == "70"
    assert done.err.startswith("2 caches, ")
    assert lynx("ls", folder, "--quiet").out.split() == [f"{folder}/a.lynx", f"{folder}/b.lynx"]
    (folder / "b.lynx" / "anchor.safetensors").write_bytes(b"")
    listed = valid(lynx("ls", folder, "--json"), "ls")
    assert [entry["problem"] is None for entry in listed["caches"]] == [True, False]
    assert "too few for a header" in lynx("ls", folder).out


def test_ls_of_nothing(lynx: Lynx, tmp_path: Path) -> None:
    done = lynx("ls", tmp_path)
    assert (done.code, done.out, done.err) == (0, "", "0 caches, 0 B\n")
    assert lynx("ls", tmp_path / "absent").code == 1


def test_rm(lynx: Lynx, folder: Path) -> None:
    removed = valid(lynx("rm", folder / "a.lynx", folder / "b.lynx", "--json"), "rm")["removed"]
    assert [item["reason"] for item in removed] == ["asked for"] * 2
    assert list(folder.iterdir()) == []
    done = lynx("rm", folder / "a.lynx")
    assert done.code == 1
    assert "a.lynx: there is no" in done.err
    assert lynx("rm", folder).code == 1
    assert lynx("rm").code == 2


def test_prune(lynx: Lynx, folder: Path) -> None:
    for path in (folder / "a.lynx").iterdir():
        os.utime(path, (0, 0))
    planned = valid(lynx("prune", folder, "--older-than", "30d", "--dry-run", "--json"), "prune")
    assert [(item["url"], item["reason"]) for item in planned["removed"]] == [(f"{folder}/a.lynx", "too old")]
    assert (folder / "a.lynx").exists()
    done = lynx("prune", folder, "--older-than", "30d", "--max-bytes", "1GB")
    assert "a.lynx: too old, 2 objects" in done.out
    assert "1 caches" in done.err
    assert not (folder / "a.lynx").exists()
    assert lynx("prune", folder, "--max-bytes", "0", "--grace", "0s").code == 0
    assert not (folder / "b.lynx").exists()


@pytest.mark.parametrize(
    "arguments", [("--older-than", "30"), ("--older-than", "d"), ("--max-bytes", "much"), ("--grace", "-1h")]
)
def test_prune_refuses_what_it_cannot_read(lynx: Lynx, folder: Path, arguments: tuple[str, str]) -> None:
    done = lynx("prune", folder, *arguments)
    assert done.code == 2
    assert "hint: " in done.err


@pytest.mark.parametrize(
    ("text", "size"), [("0", 0), ("500MB", 500_000_000), ("1.5gb", 1_500_000_000), ("64GiB", 64 << 30), ("7k", 7000)]
)
def test_sizes(text: str, size: int) -> None:
    from lynxkv_cli._options import parse_size

    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("text", "age"), [("90s", 90), ("15m", 900), ("12h", 43_200), ("30d", 2_592_000), ("2w", 1_209_600)]
)
def test_ages(text: str, age: float) -> None:
    from lynxkv_cli.prune import parse_age

    assert parse_age(text) == age


def test_export(lynx: Lynx, folder: Path) -> None:
    target = folder / "kv.safetensors"
    report = valid(lynx("export", folder / "a.lynx", "--out", target, "--json"), "export")
    assert kv_from_safetensors(target).tokens == report["tokens"] == 70
    done = lynx("export", folder / "a.lynx", "--out", target)
    assert done.code == 1
    assert "--force" in done.err
    done = lynx("export", folder / "a.lynx", "--out", target, "--force", "--precision", "anchor")
    assert done.out.strip() == str(target)
    assert "at anchor precision" in done.err
    assert lynx("export", folder / "a.lynx", "--out", target, "--precision", "exact", "--force").code == 1


def test_export_without_residual_says_what_it_is(lynx: Lynx, folder: Path) -> None:
    next((folder / "a.lynx").glob("residual-*")).unlink()
    arguments = ("export", folder / "a.lynx", "--out", folder / "kv.safetensors")
    assert lynx(*arguments).code == 1
    done = lynx(*arguments, "--if-residual-unavailable", "anchor-only")
    assert done.code == 0
    assert "the Residual is not to be had: values have anchor precision" in done.err
    report = valid(lynx(*arguments, "--if-residual-unavailable", "anchor-only", "--force", "--json"), "export")
    assert report["precision"] == "anchor"


def test_residuals_elsewhere(lynx: Lynx, folder: Path) -> None:
    lynx("export", folder / "a.lynx", "--out", folder / "kv.safetensors")
    made = (
        "encode",
        "--from",
        folder / "kv.safetensors",
        "--out",
        folder / "hot.lynx",
        "--residual-out",
        folder / "cold",
    )
    assert lynx(*made).code == 0
    assert lynx("check", folder / "hot.lynx").code == 1
    assert lynx("check", folder / "hot.lynx", "--residual-url", folder / "cold").code == 0
    against = ("--against", folder / "kv.safetensors")
    found = valid(
        lynx("inspect", folder / "hot.lynx", "--residual-url", folder / "cold", *against, "--json"), "inspect"
    )
    assert found["residual_problem"] is None
    assert {error["precision"] for error in found["errors"]} == {"anchor", "full"}
