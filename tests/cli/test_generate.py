"""`generate` and `inspect --model` on tiny models: no question, no verification, a model with attention of its own."""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING, Any

import pytest
import torch

from lynxkv.events import Verified
from lynxkv.integrations.hf import Model
from lynxkv.testing.tiny_models import tiny_model
from lynxkv_cli._views import PlainView

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Lynx

PROMPT = " ".join(f"w{3 + number * number % 44}" for number in range(90))
TEMPLATE = "w3 {% for message in messages %}{{ message['content'] }} w4 {% endfor %}w5"


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Model:
    """The model that every command loads."""
    return loaded(tiny_model(), monkeypatch)


def loaded(model: Model, monkeypatch: pytest.MonkeyPatch) -> Model:
    monkeypatch.setattr("lynxkv.checkpoints.load_model", lambda ref, **options: model)
    return model


def greedy(model: Model, text: str, count: int) -> list[int]:
    """What the model itself says after `text`."""
    ids = list(model.tokenizer(text)["input_ids"])
    for _ in range(count):
        with torch.inference_mode():
            ids.append(int(model.hf(torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] in model.eos_token_ids:
            break
    return ids[len(model.tokenizer(text)["input_ids"]) :]


def encoded(lynx: Lynx, url: Path, *options: str) -> None:
    done = lynx("encode", PROMPT, "--model", "tiny", "--out", url, "--exact", "--logits", *options)
    assert done.code == 0, done.err


def test_without_a_question_the_cached_text_goes_on(lynx: Lynx, tmp_path: Path, tiny: Model) -> None:
    # In float32 raw holds the model's very own cache, so the text is the model's own, too.
    encoded(lynx, tmp_path / "a.lynx", "--codec", "raw", "--dtype", "fp32")
    for options in ((), ("--verify", "exact"), ("--speculate", "off")):
        ask = ("generate", tmp_path / "a.lynx", "--model", "tiny", "--max-new-tokens", 12, "--json")
        answer = json.loads(lynx(*ask, *options).out)
        assert answer["token_ids"] == greedy(tiny, PROMPT, 12)
        # Stored logits give the first token before any key or value is there.
        by_logits = options == ("--verify", "exact")
        assert (answer["first_verified_s"] < answer["anchor_s"]) is by_logits


def test_without_a_question_an_open_turn_is_closed(lynx: Lynx, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    model.tokenizer.chat_template = TEMPLATE
    chat = loaded(Model.wrap(model.hf, model.tokenizer), monkeypatch)
    encoded(lynx, tmp_path / "a.lynx", "--codec", "raw", "--dtype", "fp32")
    ask = ("generate", tmp_path / "a.lynx", "--model", "tiny", "--max-new-tokens", 12, "--json")
    answer = json.loads(lynx(*ask).out)
    assert answer["token_ids"] == greedy(chat, f"w3 {PROMPT} w4 w5", 12)


@pytest.mark.usefixtures("tiny")
def test_text_that_was_not_verified_says_so(lynx: Lynx, tmp_path: Path) -> None:
    encoded(lynx, tmp_path / "a.lynx")
    encoded(lynx, tmp_path / "raw.lynx", "--codec", "raw")
    ask = ("--model", "tiny", "--max-new-tokens", 4)
    done = lynx("generate", tmp_path / "a.lynx", *ask, "--verify", "none")
    assert [line.split(":")[0] for line in done.err.splitlines()].count("unverified") == 2  # before and after it
    assert "unverified" not in done.out
    assert "first token" in done.err
    assert "verified token" not in done.err
    assert "unverified" not in lynx("generate", tmp_path / "a.lynx", *ask).err
    # There is no Residual, so that nothing is missing.
    assert "unverified" not in lynx("generate", tmp_path / "raw.lynx", *ask, "--verify", "none").err


@pytest.mark.parametrize("family", ["mistral", "gemma2"])
def test_inspect_measures_the_models_own_attention(
    lynx: Lynx, tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"attn_implementation": "eager"} if family == "gemma2" else {}
    loaded(tiny_model(family, **settings), monkeypatch)
    encoded(lynx, tmp_path / "a.lynx")
    report = json.loads(lynx("inspect", tmp_path / "a.lynx", "--model", "tiny", "--json").out)
    assert report["queries"] == "model"
    errors = {
        precision: [row["attention_nmse_both"] for row in report["errors"] if row["precision"] == precision]
        for precision in ("anchor", "full", "exact")
    }
    assert all(anchor > full > exact == 0 for anchor, full, exact in zip(*errors.values(), strict=True))
    assert "attention of the model itself" in lynx("inspect", tmp_path / "a.lynx", "--model", "tiny").out


def test_an_interrupt_while_the_model_is_loaded(lynx: Lynx, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(ref: str, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("lynxkv.checkpoints.load_model", load)
    done = lynx("encode", PROMPT, "--model", "tiny", "--out", tmp_path / "a.lynx")
    assert (done.code, done.out, done.err) == (130, "", "loading tiny\nerror: interrupted\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("terminal", [True, False])
def test_escape_sequences_reach_no_terminal(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: terminal)
    view = PlainView(stream)
    view.on_event(Verified([1], "a\x1b[2Jb\n"))
    view.on_event(Verified([2], "\x07"))
    view.finish()
    assert stream.getvalue() == ("a[2Jb\n" if terminal else "a\x1b[2Jb\n\x07\n")


def test_the_model_is_loaded_as_it_is_asked_for(lynx: Lynx, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def load_model(ref: str, **options: Any) -> Model:
        asked.append({"ref": ref, "dtype": options["dtype"], "device": options["device"]})
        return tiny_model()

    monkeypatch.setattr("lynxkv.checkpoints.load_model", load_model)
    named = ("--model", "tiny", "--model-dtype", "bfloat16", "--device", "cuda:1")
    assert lynx("encode", PROMPT, "--out", tmp_path / "a.lynx", *named).code == 0
    assert lynx("generate", tmp_path / "a.lynx", "--max-new-tokens", 2, *named).code == 0
    assert lynx("inspect", tmp_path / "a.lynx", *named).code == 0
    assert asked == [{"ref": "tiny", "dtype": "bfloat16", "device": "cuda:1"}] * 3


def test_limits_of_fetching(lynx: Lynx, tmp_path: Path, tiny: Model) -> None:
    encoded(lynx, tmp_path / "a.lynx")
    for command in (("check",), ("generate", "--model", "tiny"), ("export", "--out", tmp_path / "a.safetensors")):
        done = lynx(*command, tmp_path / "a.lynx", "--deadline", "0.000001", "--concurrency", 1)
        assert (done.code, "not fetched within" in done.err) == (1, True), done.err
        refused = lynx(*command, tmp_path / "a.lynx", "--concurrency", 257)
        assert (refused.code, "less than or equal to 256" in refused.err) == (2, True)
