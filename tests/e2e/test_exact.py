"""The exact section on a real model, in float32: text verified against it is that of the original cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest
import torch

from lynxkv.codecs import Codec
from lynxkv.codecs.uniform import Uniform
from lynxkv.encoder import encode
from lynxkv.integrations.hf import LynxCache, Model, open_turn, suffix
from lynxkv.models import prefill_with_logits
from lynxkv.runner import generate
from lynxkv.testing.readers import ScriptedReader

if TYPE_CHECKING:
    from tests.conftest import Lynx

pytestmark = pytest.mark.model

ROOT = Path(__file__).parents[2]
NEW_TOKENS = 24
# Logits of one position differ by about 1e-4 between a pass over many tokens and over one.
NOISE = 1e-3
QUESTIONS = ["What is this text about?", "Write a haiku about it.", ""]
# The second is coarse even at full precision.
CODECS: dict[str, str | Codec] = {"default": "default", "coarse": Uniform(key_step=0.9, value_step=1.2, radix=2)}


def plain_decoding(model: Model, cache: LynxCache, pending: list[int]) -> tuple[list[int], list[float]]:
    """Greedy tokens, and for each the gap between the best logit and the next."""
    out: list[int] = []
    gaps: list[float] = []
    while len(out) < NEW_TOKENS and not (out and out[-1] in model.eos_token_ids):
        best = model.step(cache, pending)[0].topk(2)
        gaps.append(float(best.values[0] - best.values[1]))
        pending = [int(best.indices[0])]
        out += pending
    return out, gaps


@pytest.mark.slow
@pytest.mark.parametrize("name", CODECS)
def test_greedy_text_equals_that_of_the_original(name: str, smollm2: Model, tmp_path: Path) -> None:
    model, url = smollm2, str(tmp_path / "document.lynx")
    ids = open_turn(model.tokenizer, (ROOT / "format_spec" / "SPEC.md").read_text()[:1500])
    filled = prefill_with_logits(model, ids)
    encode(filled.kv, url, codec=CODECS[name], identity=model.identity, exact=True, logits=filled.logits)
    original = LynxCache.load(url, model, new_tokens=128, precision="exact")
    for number, layer in enumerate(filled.kv.layers):
        for key, tensor in layer.tensors.items():
            assert torch.equal(original.target(number, key), tensor.to(torch.bfloat16).float())
    exceptions, figures = [], []
    for question in QUESTIONS:
        suffix_ids = suffix(model.tokenizer, question) if question else []
        # With nothing to add, the first token is that of the stored logits.
        first = [] if suffix_ids else [int(filled.logits.argmax())]
        original.rollback(len(ids))
        want, gaps = plain_decoding(model, original, suffix_ids or first)
        want = [*first, *want][:NEW_TOKENS]
        with ScriptedReader(url, arrivals=[0, 0, 20, 20]) as reader:
            got = generate(reader, model, suffix_ids, max_new_tokens=NEW_TOKENS, speculate=6, verify="exact")
        figures.append((got.drafted, got.accepted, got.provisional, got.accepted_exact))
        if got.token_ids != want:
            place = next(n for n, pair in enumerate(zip(got.token_ids, want, strict=False)) if pair[0] != pair[1])
            exceptions.append((question, place, gaps[place - len(first)]))
    print(f"{name}: {len(ids)} tokens, {figures}, exceptions {exceptions}")  # noqa: T201
    assert all(gap < NOISE for _, _, gap in exceptions), exceptions
    assert all(provisional for _, _, provisional, _ in figures)
    assert name == "default" or any(kept < provisional for _, _, provisional, kept in figures)


@pytest.mark.usefixtures("one_copy_of_smollm2")
def test_the_command_line_goes_all_the_way(lynx: Lynx, tmp_path: Path) -> None:
    url = str(tmp_path / "fox.lynx")
    prompt = "The quick brown fox jumps over the lazy dog. " * 8
    assert lynx("encode", prompt, "--model", "smollm2", "--out", url, "--exact", "--logits").code == 0
    parts = {(part["shard"], part["name"]) for part in json.loads(lynx("inspect", url, "--json").out)["parts"]}
    assert {("anchor", "logits"), ("residual", "exact")} <= parts
    ask = ("generate", url, "--prompt", "Which animal jumps?", "--max-new-tokens", 12)
    schema = json.loads((ROOT / "docs" / "schemas" / "generate.schema.json").read_text("utf-8"))
    result: dict[str, Any] = json.loads(lynx(*ask, "--verify", "exact", "--speculate", 4, "--json").out)
    jsonschema.validate(result, schema, cls=jsonschema.Draft202012Validator)
    assert result["precision"] == "exact"
    assert result["bytes_exact"] > 0
    piped = lynx(*ask, "--verify", "exact")
    assert piped.out == f"{result['text']}\n"
    assert "exact" in piped.err
