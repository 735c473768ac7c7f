"""What a model keeps a token, told from its configuration alone: no weights, no tokenizer, no torch.

`integrations.hf` asks the model itself; this is for reckoning with models that are not here. Configurations are read as
transformers reads them, the defaults of its families included.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lynxkv.checkpoints import ALIASES, HUB_ID, Report, resolve
from lynxkv.errors import InputError, UnsupportedModelError
from lynxkv.format.limits import MAX_LAYERS

# No configuration comes near it.
MAX_NUMBER = 1 << 31
# Families whose configurations may leave out which layers slide: every n-th one does not.
_FULL_EVERY = {"gemma2": 2, "cohere2": 4, "gemma3_text": 6}


@dataclass(frozen=True, kw_only=True)
class LayerKV:
    """One layer: how many numbers it keeps a token, K and V together, and of how many tokens (`window`; None: all)."""

    channels: int
    window: int | None = None


@dataclass(frozen=True, kw_only=True)
class KVShape:
    """All layers of a model. `latent`: they keep one compressed vector a token in the place of K and V."""

    model_id: str
    layers: tuple[LayerKV, ...]
    latent: bool = False

    @property
    def channels(self) -> int:
        """Numbers kept of a token that no window has passed."""
        return sum(layer.channels for layer in self.layers)

    def elements(self, tokens: int) -> int:
        """Numbers kept of a prompt."""
        return sum(layer.channels * min(tokens, layer.window or tokens) for layer in self.layers)


def read_shape(reference: str, *, report: Report = lambda message: None) -> KVShape:
    """The shape of what `reference` names: as for `load_model`, or a config.json; folders need no weights.

    Raises:
        InputError: there is no such model, or its configuration cannot be read.
        UnsupportedModelError: it is no decoder whose layers keep K and V, or a latent, a token.
    """
    path, model_id = _config_path(reference, report)
    try:
        config = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {path}", hint="give a model folder or its config.json") from error
    if not isinstance(config, dict):
        raise InputError(f"{path} is not a model's configuration", hint="give a model folder or its config.json")
    return shape_of(config, model_id=model_id)


def shape_of(config: dict[str, Any], *, model_id: str = "unnamed") -> KVShape:
    """The shape that a configuration states; multimodal ones nest that of the language model.

    Raises:
        UnsupportedModelError: its layers keep something else.
    """
    nested = config.get("text_config")
    text = nested if isinstance(nested, dict) else config
    name = str(config.get("model_type", "unnamed"))
    if text.get("is_encoder_decoder") or text.get("num_kv_shared_layers"):
        raise _refusal(name, "its layers share what they keep")
    layers, heads = _count(text, "num_hidden_layers", name), _count(text, "num_attention_heads", name)
    if layers > MAX_LAYERS:
        raise _refusal(name, f"it has {layers} layers, over {MAX_LAYERS}")
    windows = _windows(text, layers, name)
    rank = _optional(text, "kv_lora_rank", name)
    if rank is not None:
        channels = rank + _count(text, "qk_rope_head_dim", name)
    else:
        dim = _optional(text, "head_dim", name) or _count(text, "hidden_size", name) // heads
        channels = 2 * (_optional(text, "num_key_value_heads", name) or heads) * dim
    return KVShape(
        model_id=model_id,
        layers=tuple(LayerKV(channels=channels, window=window) for window in windows),
        latent=rank is not None,
    )


def _windows(text: dict[str, Any], layers: int, name: str) -> list[int | None]:
    window = _optional(text, "sliding_window", name)
    if text.get("use_sliding_window") is False:
        window = None
    kinds = text.get("layer_types")
    if kinds is None:
        kinds = [
            "sliding_attention" if window and _slides(text, number, name) else "full_attention"
            for number in range(layers)
        ]
    if not isinstance(kinds, list):
        raise _refusal(name, "its layer_types are no list")
    if len(kinds) != layers:
        raise _refusal(name, f"it names the kinds of {len(kinds)} layers, not of {layers}")
    for number, kind in enumerate(kinds):
        if kind not in ("full_attention", "sliding_attention"):
            raise _refusal(name, f"layer {number} is of kind {kind}")
    return [window if kind == "sliding_attention" else None for kind in kinds]


def _slides(text: dict[str, Any], number: int, name: str) -> bool:
    """Whether a layer slides in a model that has a window and does not say which layers do."""
    if "use_sliding_window" in text:
        return number >= (_optional(text, "max_window_layers", name) or 0)
    every = _optional(text, "sliding_window_pattern", name) or _FULL_EVERY.get(str(text.get("model_type")))
    return not every or bool((number + 1) % every)


def _count(text: dict[str, Any], key: str, name: str) -> int:
    value = _optional(text, key, name)
    if value is None:
        raise _refusal(name, f"its configuration has no {key}")
    return value


def _optional(text: dict[str, Any], key: str, name: str) -> int | None:
    """A number that may be left out, or be null or 0."""
    value = text.get(key) or None
    if value is not None and not (type(value) is int and 1 <= value < MAX_NUMBER):
        raise _refusal(name, f"its configuration has a {key} that is no number in [1, {MAX_NUMBER})")
    return value


def _config_path(reference: str, report: Report) -> tuple[Path, str]:
    path = Path(reference).expanduser()
    if reference in ALIASES or path.suffix == ".gguf":
        found = resolve(reference, report=report)
        return found.folder / "config.json", found.model_id
    if path.is_dir():
        return path / "config.json", path.resolve().name
    if path.is_file():
        return path, path.resolve().parent.name
    if HUB_ID.fullmatch(reference) and not reference.startswith("."):
        return _from_hub(reference)
    raise InputError(
        f"there is no model {reference!r}",
        hint=f"give a model folder, its config.json, a hub id such as org/name, or {', '.join(ALIASES)}",
    )


def _from_hub(reference: str) -> tuple[Path, str]:
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError

    model_id, _, revision = reference.partition("@")
    try:
        path = huggingface_hub.hf_hub_download(model_id, "config.json", revision=revision or None)
    except (OSError, ValueError, HfHubHTTPError) as error:
        raise InputError(
            f"cannot get the configuration of {reference} from the hub: {str(error).splitlines()[0]}",
            hint="check the name and the connection, or give a local config.json",
        ) from error
    return Path(path), model_id


def _refusal(name: str, why: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{name} models are not supported: {why}",
        hint="plan for a decoder-only model whose layers keep K and V, such as Llama, Qwen, Mistral or Gemma",
    )
