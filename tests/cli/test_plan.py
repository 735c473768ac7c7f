"""`lynxkv plan` and `encode --codec auto`: the same choice, said why, without torch where no cache is made."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest

import lynxkv
from lynxkv.kv import kv_to_safetensors
from lynxkv.testing.kv import random_kv
from lynxkv.testing.tiny_models import tiny_config, tiny_model

if TYPE_CHECKING:
    from tests.conftest import Lynx

SCHEMA = Path(__file__).parents[2] / "docs" / "schemas" / "plan.schema.json"


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(tiny_config("llama", num_hidden_layers=32, head_dim=128).to_dict()), "utf-8")
    return str(path)


def planned(lynx: Lynx, *arguments: object) -> dict[str, Any]:
    done = lynx("plan", *arguments, "--json")
    assert (done.code, done.err) == (0, "")
    result: dict[str, Any] = json.loads(done.out)
    jsonschema.validate(result, json.loads(SCHEMA.read_text("utf-8")), cls=jsonschema.Draft202012Validator)
    return result


def test_json_and_table(lynx: Lynx, config: str) -> None:
    arguments = ("--model", config, "--tokens", 4000, "--link", "10mbit/20ms", "--prefill-rate", 3000)
    result = planned(lynx, *arguments)
    assert (result["elements"], result["rtt_s"], result["target"]) == (4000 * 32 * 512, 0.02, "default")
    assert (result["choice"], result["latent"]) == ("default", False)
    assert [item["name"] for item in result["estimates"]][-3:] == ["int8", "raw", "prefill"]
    done = lynx("plan", *arguments)
    assert f"\ndefault: {result['why']}\n" in done.out
    assert "prefill is expected to be sooner" in done.out
    assert all(f"\n{item['name']} " in done.out for item in result["estimates"])
    assert not result["calibrated"]


def test_speeds_can_be_given(lynx: Lynx, config: str) -> None:
    arguments = ("--model", config, "--tokens", 4000, "--link", "40gbit", "--token-ms", 5)
    fast = planned(lynx, *arguments, "--entropy-rate", 50, "--fixed-rate", 50)
    slow = planned(lynx, *arguments, "--entropy-rate", 0.5, "--fixed-rate", 50)
    assert (fast["speeds"]["token_s"], slow["speeds"]["entropy_byte_s"]) == (0.005, 5e8)
    assert slow["choice"] == "fixed" != fast["choice"]


def test_a_calibrated_model(lynx: Lynx, config: str) -> None:
    arguments = ("--model", config, "--tokens", 4000, "--link", "10mbit/20ms")
    result = planned(lynx, *arguments, "--calibrated")
    assert (result["choice"], result["calibrated"]) == ("compact", True)
    assert "\ncompact (calibrated) " in lynx("plan", *arguments).out


def test_a_plan_loads_no_torch(config: str) -> None:
    arguments = ["plan", "--model", config, "--tokens", "100", "--link", "1gbit"]
    code = f"""
import sys
from lynxkv_cli.main import run
assert run({arguments!r}) == 0
heavy = {{"torch", "numba", "triton", "transformers"}} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.parametrize("target", ["int8", "exact"])
@pytest.mark.parametrize("link", ["1mbit", "10gbit/50ms"])
def test_encode_takes_the_planned_codec(lynx: Lynx, tmp_path: Path, link: str, target: str) -> None:
    kv_to_safetensors(random_kv(tokens=500), tmp_path / "kv.safetensors")
    url = str(tmp_path / "auto.lynx")
    arguments = ("--from", tmp_path / "kv.safetensors", "--codec", "auto", "--link", link, "--target", target)
    encoded = json.loads(lynx("encode", *arguments, "--out", url, "--json").out)
    header = lynxkv.inspect(url)
    assert encoded["codec"] == header.codec
    assert encoded["codec_why"].startswith("in one shard" if "/" in link else "of all that is as close")
    assert (encoded["bytes_residual"] == 0) is ("/" in link)
    assert (encoded["bytes_exact"] > 0) is (target == "exact" and "/" not in link)
    again = lynx("encode", *arguments, "--out", url, "--force")
    assert encoded["codec_why"] in again.err
    plain = json.loads(lynx("encode", *arguments[:2], "--out", tmp_path / "plain.lynx", "--json").out)
    assert plain["codec_why"] is None


@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral"])
def test_encode_reckons_with_what_windows_keep(
    lynx: Lynx, tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lynxkv import planning

    model, usual, workloads = tiny_model(family), planning.plan, []

    def observed(workload: planning.Workload, *arguments: Any, **options: Any) -> planning.Plan:
        workloads.append(workload)
        return usual(workload, *arguments, **options)

    monkeypatch.setattr("lynxkv.checkpoints.load_model", lambda ref, **options: model)
    monkeypatch.setattr(planning, "plan", observed)
    text = " ".join(f"w{3 + number % 40}" for number in range(60))
    options = ("--model", "tiny", "--codec", "auto", "--link", "1mbit", "--json")
    encoded = json.loads(lynx("encode", text, *options, "--out", tmp_path / "a.lynx").out)
    assert [load.original_bytes for load in workloads] == [encoded["bytes_original"]]


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        (("plan", "--model", "no-such-model", "--tokens", 10, "--link", "1gbit"), 1, "no-such-model"),
        (("plan", "--model", "smollm2", "--tokens", 0, "--link", "1gbit"), 2, "--tokens"),
        (("plan", "--model", "smollm2", "--tokens", 10, "--link", "fast"), 2, "fast"),
        (("plan", "--model", "smollm2", "--tokens", 10), 2, "--link"),
        (("plan", "--model", "smollm2", "--tokens", 10, "--link", "1gbit", "--target", "best"), 2, "--target"),
        (("encode", "text", "--model", "smollm2", "--codec", "auto"), 2, "--link"),
        (("encode", "text", "--model", "smollm2", "--codec", "auto", "--link", "fast"), 2, "fast"),
        (("encode", "text", "--model", "smollm2", "--link", "1gbit"), 2, "--codec auto"),
        (("encode", "text", "--model", "smollm2", "--target", "exact"), 2, "--codec auto"),
        (
            ("encode", "text", "--model", "smollm2", "--codec", "auto", "--link", "1gbit", "--dtype", "fp32"),
            1,
            "fp32",
        ),
    ],
)
def test_refusals(lynx: Lynx, tmp_path: Path, arguments: tuple[object, ...], code: int, word: str) -> None:
    extra = ("--out", tmp_path / "x.lynx") if arguments[0] == "encode" else ()
    done = lynx(*arguments, *extra)
    assert done.code == code
    assert word in done.err
    assert "hint: " in done.err
    assert not (tmp_path / "x.lynx").exists()
