"""Chains and first tokens on the command line: encode, generate, ls, rm, inspect, check and export."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest

from lynxkv.integrations.hf import Model
from lynxkv.kv import kv_from_safetensors
from lynxkv.testing.tiny_models import tiny_model

if TYPE_CHECKING:
    from tests.conftest import Finished, Lynx

SCHEMAS = Path(__file__).parents[2] / "docs" / "schemas"
WORDS = [f"w{3 + (number * number + 5 * number) % 44}" for number in range(450)]


def valid(done: Finished, name: str) -> dict[str, Any]:
    """The object a command printed, after checking it against its schema."""
    assert (done.code, done.err) == (0, "")
    content: dict[str, Any] = json.loads(done.out)
    schema = json.loads((SCHEMAS / f"{name}.schema.json").read_text("utf-8"))
    jsonschema.validate(content, schema, cls=jsonschema.Draft202012Validator)
    return content


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> Model:
    """The model that every command loads."""
    model = tiny_model()
    monkeypatch.setattr("lynxkv.checkpoints.load_model", lambda ref, **options: model)
    monkeypatch.setattr("lynxkv.fetch.follow.FIRST_PAUSE_S", 0.002)
    return model


def encode(lynx: Lynx, url: Path, words: int, *options: object) -> Finished:
    return lynx("encode", " ".join(WORDS[:words]), "--model", "tiny", "--out", url, *options)


def test_encode_continues_what_is_there(lynx: Lynx, tmp_path: Path) -> None:
    assert valid(encode(lynx, tmp_path / "a.lynx", 300, "--json"), "encode")["continues"] == []
    done = valid(encode(lynx, tmp_path / "b.lynx", 400, "--json"), "encode")
    assert [span["name"] for span in done["continues"]] == ["a.lynx"]
    assert (done["tokens"], done["continued_tokens"], done["spans"][0]["tokens"]) == (400, 300, 100)
    note = encode(lynx, tmp_path / "c.lynx", 450).err
    assert "continues b.lynx: 400 of 450 tokens were there" in note
    done = valid(encode(lynx, tmp_path / "d.lynx", 450, "--no-continue", "--json"), "encode")
    assert done["continued_tokens"] == 0


def test_spans(lynx: Lynx, tmp_path: Path) -> None:
    done = encode(lynx, tmp_path / "a.lynx", 450, "--span-tokens", 200)
    assert done.out == f"{tmp_path}/a.lynx\n"
    assert f"published {tmp_path}/a.0001.lynx, 200 tokens" in done.err
    assert "450 tokens in 3 caches" in done.err
    listed = valid(lynx("ls", tmp_path, "--json"), "ls")["caches"]
    assert [(entry["tokens"], entry["part_of"]) for entry in listed] == [(200, "a.lynx"), (400, "a.lynx"), (450, None)]
    assert "a.lynx (50 of its own, continues a.0001.lynx)" in lynx("ls", tmp_path).out
    checked = valid(lynx("check", tmp_path / "a.lynx", "--json"), "check")
    assert (checked["tokens"], len(checked["spans"])) == (450, 3)
    assert "450 tokens in 3 caches" in lynx("check", tmp_path / "a.lynx").out
    inspected = valid(lynx("inspect", tmp_path / "a.lynx", "--json"), "inspect")
    assert [span["stop"] for span in inspected["parent"]["spans"]] == [200, 400]
    assert (
        "a.0000.lynx to 200, a.0001.lynx to 400; prefilled on them as computed"
        in lynx("inspect", tmp_path / "a.lynx").out
    )
    assert valid(lynx("inspect", tmp_path / "a.lynx", "--model", "tiny", "--json"), "inspect")["errors"]


def test_generate_on_chains_and_first_tokens(lynx: Lynx, tmp_path: Path) -> None:
    encode(lynx, tmp_path / "a.lynx", 450, "--span-tokens", 200, "--codec", "raw", "--dtype", "fp32")
    encode(lynx, tmp_path / "b.lynx", 400, "--no-continue", "--codec", "raw", "--dtype", "fp32")
    ask = ("--prompt", "w5 w6", "--model", "tiny", "--max-new-tokens", 8)
    part = valid(lynx("generate", tmp_path / "a.lynx", *ask, "--tokens", 400, "--prove", "--json"), "generate")
    whole = valid(lynx("generate", tmp_path / "b.lynx", *ask, "--json"), "generate")
    assert part["token_ids"] == whole["token_ids"]
    assert (part["cached_tokens"], part["caches"], whole["caches"]) == (400, 2, 1)
    assert part["proof"]["equal"]
    assert "on the first 400 tokens, in 2 caches" in lynx("generate", tmp_path / "a.lynx", *ask, "--tokens", 400).err
    done = lynx("generate", tmp_path / "a.lynx", *ask, "--tokens", 451)
    assert (done.code, "the cache has 450" in done.err) == (1, True)


def test_generate_follows_a_writer(lynx: Lynx, tmp_path: Path, tiny: Model) -> None:
    import lynxkv

    ids = list(tiny.tokenizer(" ".join(WORDS))["input_ids"])
    begun, go_on = threading.Event(), threading.Event()

    def on_span(report: Any) -> None:
        begun.set()
        go_on.wait(20)

    def write() -> None:
        lynxkv.encode_prompt(tiny, ids, tmp_path / "a.lynx", span_tokens=200, on_span=on_span)

    writer = threading.Thread(target=write)
    writer.start()
    assert begun.wait(20)
    assert not (tmp_path / "a.lynx").exists()
    threading.Timer(0.05, go_on.set).start()
    ask = ("generate", tmp_path / "a.lynx", "--prompt", "w5 w6", "--model", "tiny", "--max-new-tokens", 8, "--json")
    followed = valid(lynx(*ask, "--follow"), "generate")
    writer.join(20)
    assert followed["cached_tokens"] == 450
    assert followed["token_ids"] == valid(lynx(*ask), "generate")["token_ids"]


def test_generate_tells_when_nobody_writes(lynx: Lynx, tmp_path: Path) -> None:
    ask = ("generate", tmp_path / "a.lynx", "--prompt", "w5", "--model", "tiny", "--follow", "--follow-timeout", 0.05)
    done = lynx(*ask)
    assert (done.code, done.out) == (1, "")
    assert "nobody has begun to write it within 0.05 s" in done.err
    assert json.loads(lynx(*ask, "--json").out)["error"]["type"] == "WriterStoppedError"


def test_rm_keeps_chains_whole(lynx: Lynx, tmp_path: Path) -> None:
    encode(lynx, tmp_path / "a.lynx", 450, "--span-tokens", 200)
    done = lynx("rm", tmp_path / "a.0000.lynx")
    assert (done.code, "is continued by a.0001.lynx, a.lynx" in done.err) == (1, True)
    removed = valid(lynx("rm", tmp_path / "a.lynx", "--chain", "--json"), "rm")["removed"]
    assert [Path(item["url"]).name for item in removed] == ["a.lynx", "a.0001.lynx", "a.0000.lynx"]
    assert list(tmp_path.iterdir()) == []


def test_export_first_tokens(lynx: Lynx, tmp_path: Path) -> None:
    encode(lynx, tmp_path / "a.lynx", 450, "--span-tokens", 200)
    out = tmp_path / "kv.safetensors"
    assert (
        valid(lynx("export", tmp_path / "a.lynx", "--out", out, "--tokens", 250, "--json"), "export")["tokens"] == 250
    )
    assert kv_from_safetensors(out).tokens == 250


@pytest.mark.parametrize(
    "arguments",
    [
        ("generate", "a.lynx", "--follow", "--tokens", 5),
        ("generate", "a.lynx", "--tokens", 0),
        ("encode", "--from", "kv.safetensors", "--out", "a.lynx", "--span-tokens", 5),
        ("encode", "w5", "--model", "tiny", "--out", "a.lynx", "--span-tokens", 0),
    ],
)
def test_wrong_usage(arguments: tuple[object, ...], lynx: Lynx) -> None:
    assert lynx(*arguments).code == 2


def test_windows_are_refused_by_name(lynx: Lynx, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("mistral")
    monkeypatch.setattr("lynxkv.checkpoints.load_model", lambda ref, **options: model)
    done = encode(lynx, tmp_path / "a.lynx", 100, "--span-tokens", 20)
    assert (done.code, "layer 0 of the model has a sliding window of 8" in done.err) == (1, True)
