"""The bytes of single tokens: of byte-level tokenizers, of those with a bar for a space, and of words."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from lynxkv.events import TokenLogprobs
from lynxkv.server.logprobs import LEAST, Logprobs
from lynxkv.server.tokens import TokenBytes
from lynxkv.testing.tiny_models import tiny_tokenizer

TEXT = "Löwe 獅子 \U0001f981\n\x00 end"


@pytest.fixture(scope="module")
def byte_level() -> Any:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(["end end end"], trainers.BpeTrainer(initial_alphabet=alphabet, show_progress=False))
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")  # type: ignore[no-untyped-call]


def test_a_byte_level_tokenizer(byte_level: Any) -> None:
    token_bytes, ids = TokenBytes(byte_level), byte_level(TEXT)["input_ids"]
    pieces = [token_bytes(token) for token in ids]
    assert b"".join(pieces) == TEXT.encode()
    assert b"\xf0" in pieces  # a part of a character
    assert token_bytes(byte_level.eos_token_id) == b"<|end|>"
    assert token_bytes(10**6) == b""


def test_bars_and_bytes() -> None:
    vocabulary = {"<unk>": 0, "\u2581Hello": 1, "\u2581": 2, "<0xE2>": 3, "<0x0A>": 4, "x": 5}
    tokenizer: Any = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>")), unk_token="<unk>"
    )
    assert list(map(TokenBytes(tokenizer), range(6))) == [b"<unk>", b" Hello", b" ", b"\xe2", b"\n", b"x"]
    assert TokenBytes(tiny_tokenizer())(7) == b"w7"


def test_parts_of_characters_and_what_is_ruled_out() -> None:
    token_bytes = {1: b"\xe2\x80", 2: b"a"}.__getitem__
    items = [TokenLogprobs(1, -0.5, [(1, -0.5), (2, float("-inf"))]), TokenLogprobs(2, -1.0, [])]
    chat = Logprobs("chat", token_bytes).told(items)
    assert chat is not None
    assert chat["content"][0]["bytes"] == [0xE2, 0x80]
    assert chat["content"][0]["token"] == "\ufffd"
    assert chat["content"][0]["top_logprobs"][1]["logprob"] == LEAST
    completion = Logprobs("completion", token_bytes).told(items)
    assert completion == {
        "tokens": ["bytes:\\xe2\\x80", "a"],
        "token_logprobs": [-0.5, -1.0],
        "top_logprobs": [{"bytes:\\xe2\\x80": -0.5, "a": LEAST}, {"a": -1.0}],
        "text_offset": [0, 0],
    }
    assert Logprobs("chat", token_bytes).told(None) is None
