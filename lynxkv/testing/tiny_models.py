"""Random decoder-only models of a few thousand weights, one for each supported family, with a word tokenizer.

Sliding windows are 8 tokens, so that a test prompt is soon beyond them. Weights are larger than a real initialisation:
argmax then has clear winners and float noise does not decide a test.
"""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig, PreTrainedTokenizerFast

from lynxkv.integrations.hf import Model

WINDOW_TOKENS = 8
VOCAB_TOKENS = 48

_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.25,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]

# family name -> (model type, settings)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen2-sliding": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": WINDOW_TOKENS, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {}),
    "mistral": ("mistral", {"sliding_window": WINDOW_TOKENS}),
    "gemma2": ("gemma2", {"sliding_window": WINDOW_TOKENS, "layer_types": _ALTERNATING, "query_pre_attn_scalar": 8}),
    "gemma3": (
        "gemma3_text",
        {"sliding_window": WINDOW_TOKENS, "layer_types": _ALTERNATING, "query_pre_attn_scalar": 8},
    ),
    "phi": ("phi", {"num_key_value_heads": 4}),
    "phi3": ("phi3", {"sliding_window": None}),
}


def tiny_config(family: str, **settings: Any) -> PretrainedConfig:
    """The configuration of a tiny model of `family`, `settings` overriding."""
    model_type, own = FAMILIES.get(family, (family, {}))
    return CONFIG_MAPPING[model_type](**{"vocab_size": VOCAB_TOKENS, **_SIZES, **own, **settings})


def tiny_model(family: str = "llama", *, seed: int = 0, **settings: Any) -> Model:
    """A tiny random model of `family` (a key of `FAMILIES`) in float32, the same for the same arguments."""
    config = tiny_config(family, **settings)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        hf = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    hf.generation_config.eos_token_id = config.eos_token_id
    return Model.wrap(hf, tiny_tokenizer(config.vocab_size), model_id=f"tiny-{family}")


def tiny_tokenizer(vocab_tokens: int = VOCAB_TOKENS) -> PreTrainedTokenizerFast:
    """Words `w3`, `w4`, ... by number, after `<pad>`, `<s>` and `</s>`; no chat template."""
    words = ["<pad>", "<s>", "</s>", *(f"w{number}" for number in range(3, vocab_tokens))]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
