"""Shapes told from configurations alone are those that the models themselves have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lynxkv.errors import InputError, UnsupportedModelError
from lynxkv.integrations.hf import support
from lynxkv.shapes import KVShape, LayerKV, read_shape, shape_of
from lynxkv.testing.tiny_models import FAMILIES, WINDOW_TOKENS, tiny_config, tiny_model

DEEPSEEK = {
    "model_type": "deepseek_v2",
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "hidden_size": 2048,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
}


@pytest.mark.parametrize("family", list(FAMILIES))
def test_every_family_as_transformers_builds_its_cache(family: str) -> None:
    config = tiny_config(family)
    shape = shape_of(config.to_dict())
    assert [layer.window for layer in shape.layers] == support.layer_windows(config)
    heads = config.num_key_value_heads
    assert {layer.channels for layer in shape.layers} == {2 * heads * 8}
    assert not shape.latent


def test_a_model_keeps_what_its_configuration_says() -> None:
    model = tiny_model("gemma3", head_dim=16, num_key_value_heads=1)
    shape = shape_of(model.hf.config.to_dict())
    assert [(layer.channels, layer.window) for layer in shape.layers] == [
        (sum(heads * dim for heads, dim in spec.tensors.values()), spec.window) for spec in model.layer_specs()
    ]


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "qwen2-sliding"])
def test_layers_that_slide_by_a_family_s_default(family: str) -> None:
    settings: dict[str, Any] = {"layer_types": None, "num_hidden_layers": 12}
    if family == "qwen2-sliding":
        settings["max_window_layers"] = 5
    config = tiny_config(family, **settings)
    written = {**config.to_dict()}
    del written["layer_types"]
    windows = [layer.window for layer in shape_of(written).layers]
    assert windows == support.layer_windows(config)
    assert set(windows) == {None, WINDOW_TOKENS}


def test_elements_of_a_prompt() -> None:
    shape = KVShape(model_id="one", layers=(LayerKV(channels=10), LayerKV(channels=6, window=8)))
    assert shape.channels == 16
    assert shape.elements(5) == 80
    assert shape.elements(100) == 1000 + 48


def test_a_latent_and_a_nested_configuration() -> None:
    shape = shape_of({"model_type": "images", "text_config": DEEPSEEK}, model_id="ds")
    assert (shape.latent, shape.channels, len(shape.layers)) == (True, 27 * 576, 27)


def test_a_folder_without_weights_or_its_configuration(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(tiny_config("mistral").to_dict()), "utf-8")
    shape = read_shape(str(folder))
    assert shape == read_shape(str(folder / "config.json"))
    assert (shape.model_id, shape.elements(100)) == ("mine", 3 * 32 * WINDOW_TOKENS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": ["linear_attention"] * 27}, "kind linear_attention"),
        ({"layer_types": ["full_attention"]}, "1 layers, not of 27"),
        ({"num_hidden_layers": None}, "no num_hidden_layers"),
        ({"num_attention_heads": "16"}, "num_attention_heads that is no number"),
        ({"qk_rope_head_dim": None}, "no qk_rope_head_dim"),
        ({"kv_lora_rank": None, "hidden_size": None}, "no hidden_size"),
        ({"is_encoder_decoder": True}, "share"),
        ({"num_kv_shared_layers": 3}, "share"),
    ],
)
def test_what_keeps_something_else_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        shape_of({**DEEPSEEK, **change})


@pytest.mark.parametrize("content", ["", "[1]", "{", '"text"'])
def test_files_that_are_no_configuration_are_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(InputError, match=r"config\.json"):
        read_shape(str(tmp_path))


@pytest.mark.parametrize("reference", ["", "no-such-model", "nobody/nothing-at-all"])
def test_models_that_are_not_there_are_refused(reference: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        read_shape(reference or str(tmp_path))
    assert caught.value.hint


@pytest.mark.parametrize(
    "key",
    [
        "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size", "sliding_window",
        "layer_types", "max_window_layers", "sliding_window_pattern", "kv_lora_rank", "qk_rope_head_dim", "text_config",
    ],
)  # fmt: skip
@pytest.mark.parametrize("family", ["llama", "qwen2-sliding", "gemma3"])
def test_configurations_of_any_content_are_told_or_refused(family: str, key: str) -> None:
    config = tiny_config(family).to_dict()
    for kinds in (config.get("layer_types"), None):
        for value in (None, "8", 0, -1, 1.5, float("nan"), True, [], [1], {}, {"a": 1}, 10**30):
            try:
                shape = shape_of({**config, "layer_types": kinds, key: value})
            except UnsupportedModelError:
                continue
            assert shape.elements(100) >= 0
