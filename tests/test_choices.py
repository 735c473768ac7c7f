"""What callers choose from: names that exist, and one way to write a codec."""

from __future__ import annotations

from typing import get_args

import pytest

from lynxkv.choices import CODEC_NAMES, Dtype, Verify, parse_codec
from lynxkv.codecs import CODECS, get_codec
from lynxkv.encoder import check_options, encode_shards
from lynxkv.errors import InputError
from lynxkv.layout import DTYPE_BYTES
from lynxkv.runner import TARGETS
from lynxkv.testing.kv import random_kv


def test_names_are_those_of_the_library() -> None:
    assert tuple(CODECS) == CODEC_NAMES
    assert get_args(Dtype) == tuple(DTYPE_BYTES)
    assert get_args(Verify) == tuple(TARGETS)


def test_a_codec_with_parameters() -> None:
    assert parse_codec("default").params == {}
    choice = parse_codec("alg1:alpha=100,chunk_dtype=f32,page_tokens=64,compress=false,exact=true")
    assert choice.params == {"alpha": 100, "chunk_dtype": "f32", "page_tokens": 64, "compress": False}
    assert (choice.name, choice.exact) == ("alg1", True)
    assert get_codec(choice.name, **choice.params).params().items() >= choice.params.items()


@pytest.mark.parametrize(
    "text",
    ["", "zip", ":radix=5", "default:radix", "default:radix=", "default:=5", "default:radix=5,radix=6",
     "default:exact=1", "default,radix=5", "default:radix=5,"],
)  # fmt: skip
def test_what_is_no_codec(text: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_codec(text)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("text", "dtype", "words"),
    [
        ("default", "fp32", "fp32 goes with the codec raw only"),
        ("int8", "fp32", "fp32"),
        ("raw", "fp64", "fp64"),
        ("default:step=1", "bf16", "no parameter 'step'"),
        ("default:radix=2.5", "bf16", "radix cannot be 2.5"),
        ("default:radix=many", "bf16", "radix cannot be 'many'"),
        ("default:radix=true", "bf16", "radix cannot be True"),
        ("default:radix=0", "bf16", "radix"),
        ("default:key_step=nan", "bf16", "key_step"),
        ("default:sink_tokens=-1", "bf16", "sink_tokens is -1"),
        ("default:sink_tokens=1025", "bf16", "sink_tokens is 1025"),
        ("alg1:chunk_dtype=f16", "bf16", "chunk_dtype cannot be 'f16'"),
        ("alg1:page_tokens=100", "bf16", "do not fill pages"),
        ("alg1:page_tokens=4294967296", "bf16", "page_tokens is 4294967296"),
        ("int8:compress=1", "bf16", "compress cannot be 1"),
    ],
)
def test_what_no_cache_could_be_encoded_with_is_refused_without_one(text: str, dtype: Dtype, words: str) -> None:
    choice = parse_codec(text)
    with pytest.raises(InputError, match=words):
        check_options(get_codec(choice.name, **choice.params), dtype)


@pytest.mark.parametrize("name", [name for name in CODEC_NAMES if name != "compact"])
@pytest.mark.parametrize("dtype", get_args(Dtype))
def test_what_passes_can_be_encoded(name: str, dtype: Dtype) -> None:
    try:
        method = check_options(name, dtype)
    except InputError:
        assert (name != "raw", dtype) == (True, "fp32")
        return
    for exact in (False, True):
        assert encode_shards(random_kv(layers=1, tokens=8), codec=method, dtype=dtype, exact=exact).anchor.bytes
