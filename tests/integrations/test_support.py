"""Which model kinds are taken, told from their configurations alone."""

from __future__ import annotations

import pytest
from transformers import CONFIG_MAPPING

from lynxkv.errors import UnsupportedModelError
from lynxkv.integrations.hf.support import context_tokens, layer_windows, refuse_unsupported, rope_identity
from lynxkv.testing.tiny_models import FAMILIES, WINDOW_TOKENS, tiny_config, tiny_model

REFUSED = {
    "mamba": "kind linear_attention",
    "mamba2": "kind linear_attention",
    "falcon_mamba": "kind linear_attention",
    "rwkv": "recurrent state",
    "recurrent_gemma": "LinearAttentionLayer|kind",
    "jamba": "LinearAttentionLayer|kind",
    "qwen3_next": "kind linear_attention",
    "falcon_h1": "LinearAttention|kind",
    "zamba2": "LinearAttention|kind",
    "nemotron_h": "kind|Layer",
    "minimax": "kind linear_attention",
    "gemma3n_text": "share the KV",
    "deepseek_v2": "latent attention",
    "deepseek_v3": "latent attention",
    "llama4_text": "kind chunked_attention",
    "t5": "encoder-decoder",
    "vit": "not a causal language model",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_families_of_per_head_caches_are_taken(family: str) -> None:
    refuse_unsupported(tiny_config(family))


@pytest.mark.parametrize("model_type", [name for name in REFUSED if name in CONFIG_MAPPING])
def test_other_kinds_are_refused_by_name(model_type: str) -> None:
    with pytest.raises(
        UnsupportedModelError, match=f"{model_type.removesuffix('_text')}.*({REFUSED[model_type]})"
    ) as caught:
        refuse_unsupported(CONFIG_MAPPING[model_type]())
    assert caught.value.hint


def test_bidirectional_attention_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="bidirectional"):
        refuse_unsupported(tiny_config("gemma3", use_bidirectional_attention=True))


def test_a_model_whose_tokens_see_later_ones_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="bert models are not supported: a token sees later ones"):
        tiny_model("bert")
    tiny_model("bert", is_decoder=True)


def test_windows_follow_the_layers() -> None:
    assert layer_windows(tiny_config("gemma3")) == [WINDOW_TOKENS, None, WINDOW_TOKENS]
    assert layer_windows(tiny_config("llama")) == [None] * 3
    assert layer_windows(tiny_config("qwen2-sliding")) == [None, WINDOW_TOKENS, WINDOW_TOKENS]


def test_context_ends_where_rope_starts_to_depend_on_the_length() -> None:
    assert context_tokens(tiny_config("llama")) == 512
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    config = tiny_config("phi3", rope_parameters=rope, original_max_position_embeddings=128)
    assert context_tokens(config) == 128


def test_rope_parameters_are_recorded_per_kind_of_layer() -> None:
    rope = rope_identity(tiny_config("gemma3"))
    assert rope is not None
    assert set(rope) == {"sliding_attention", "full_attention"}
    assert rope_identity(tiny_config("llama")) == {"rope_theta": 10000.0, "rope_type": "default"}
