"""Which models a KV cache per head can represent, told from a configuration before any work is done.

Decisions rest on structure (the cache layers that transformers would build, statefulness, latent ranks), not on model
names, so a new family of a known kind works and a new kind is refused.
"""

from __future__ import annotations

from typing import Any

from transformers import CONFIG_MAPPING, AutoModelForCausalLM, DynamicCache, PretrainedConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from lynxkv.errors import UnsupportedModelError

# RoPE kinds whose frequencies change once a sequence passes the original context: keys then depend on the length of
# the whole sequence, and a cache of a prefix is worth nothing to a longer one.
LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}


def text_config(config: PretrainedConfig) -> PretrainedConfig:
    """The configuration of the language model, which multimodal configurations nest."""
    return config.get_text_config(decoder=True)


def refuse_own_code(settings: dict[str, Any]) -> None:
    """Refuse, with an UnsupportedModelError, a config.json whose model is code in its folder: that is not run."""
    name = settings.get("model_type", "unnamed")
    if settings.get("auto_map") and name not in CONFIG_MAPPING:
        raise refusal(name, "they bring code of their own, which is not run")


def refuse_unsupported(config: PretrainedConfig) -> None:
    """Return for a decoder-only model whose layers keep K and V per head.

    Raises:
        UnsupportedModelError: it is of another kind; the message names the kind.
    """
    name = getattr(config, "model_type", type(config).__name__)
    if config.is_encoder_decoder:
        raise refusal(name, "an encoder-decoder model, whose cache also holds cross-attention")
    try:
        model_class: Any = AutoModelForCausalLM._model_mapping[type(config)]
    except KeyError:
        raise refusal(name, "not a causal language model") from None
    text = text_config(config)
    if getattr(text, "kv_lora_rank", None):
        raise refusal(name, "multi-head latent attention, which does not keep K and V per head")
    if getattr(text, "use_bidirectional_attention", False) in (True, "all"):
        raise refusal(name, "bidirectional attention, which has no cache")
    if getattr(text, "num_kv_shared_layers", None):
        raise refusal(name, "layers that share the KV of other layers")
    for number, kind in enumerate(getattr(text, "layer_types", None) or []):
        if kind not in ("full_attention", "sliding_attention"):
            raise refusal(name, f"layer {number} is of kind {kind}")
    for number, layer in enumerate(DynamicCache(config=config).layers):
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise refusal(name, f"layer {number} needs a {type(layer).__name__}")
    if getattr(model_class, "_is_stateful", False):
        raise refusal(name, "a recurrent state (state-space or linear attention)")


def layer_windows(config: PretrainedConfig) -> list[int | None]:
    """Per layer, the sliding window in tokens (the query itself included), None for full attention."""
    layers = DynamicCache(config=config).layers
    return [layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else None for layer in layers]


def context_tokens(config: PretrainedConfig) -> int | None:
    """The longest sequence the model is made for; None if the configuration sets no limit."""
    text = text_config(config)
    limits = [limit for limit in [getattr(text, "max_position_embeddings", None)] if limit]
    rope = getattr(text, "rope_parameters", None) or {}
    for parameters in [rope, *rope.values()]:
        if isinstance(parameters, dict) and parameters.get("rope_type") in LENGTH_DEPENDENT_ROPE:
            limits += [limit for limit in [parameters.get("original_max_position_embeddings")] if limit]
    return min(limits, default=None)


def rope_identity(config: PretrainedConfig) -> dict[str, Any] | None:
    """The RoPE parameters as a cache records them."""
    rope = getattr(text_config(config), "rope_parameters", None)
    return _plain(rope) if rope else None


def _plain(value: Any) -> Any:
    """JSON values only, without the fields that are not set."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | int | float | bool) else str(value)


def refusal(name: str, why: str) -> UnsupportedModelError:
    """The error for a kind of model that a cache cannot represent."""
    return UnsupportedModelError(
        f"{name} models are not supported: {why}",
        hint="use a decoder-only model whose layers keep K and V per head, such as Llama, Qwen, Mistral or Gemma",
    )
