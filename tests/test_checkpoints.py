"""References to models: what resolves, what is refused and how."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import lynxkv
from lynxkv import checkpoints
from lynxkv.checkpoints import load_model, resolve
from lynxkv.errors import IdentityError, InputError, UnsupportedModelError
from lynxkv.home import cache_home
from lynxkv.identity import Digests, check_identity
from lynxkv.integrations.hf import Model
from lynxkv.testing.tiny_models import tiny_config, tiny_model, tiny_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny model saved as a Hugging Face folder."""
    model, out = tiny_model("llama"), tmp_path / "tiny"
    model.hf.save_pretrained(out)
    model.tokenizer.save_pretrained(out)
    return out


def test_a_folder_loads_and_keeps_its_identity(folder: Path, tmp_path: Path) -> None:
    model = load_model(str(folder))
    assert model.identity.model_id == "tiny"
    assert model.identity.turn == "none"
    shutil.copytree(folder, tmp_path / "copy")
    other = load_model(str(tmp_path / "copy"), dtype="bfloat16")
    assert other.identity.fingerprint == model.identity.fingerprint
    assert other.identity.tokenizer_sha256 == model.identity.tokenizer_sha256
    assert str(other.hf.dtype) == "torch.bfloat16"


def test_a_model_loaded_by_hand_has_the_identity_of_its_files(folder: Path) -> None:
    loaded = load_model(str(folder))
    by_hand = Model.wrap(loaded.hf, loaded.tokenizer, source=str(folder))
    assert by_hand.identity == loaded.identity
    renamed = Model.wrap(loaded.hf, loaded.tokenizer, source=str(folder), model_id="org/name")
    assert (renamed.identity.model_id, renamed.identity.fingerprint) == ("org/name", loaded.identity.fingerprint)
    with pytest.raises(InputError, match="there is no model"):
        Model.wrap(loaded.hf, loaded.tokenizer, source="nowhere")


def test_an_adapter_is_named(folder: Path) -> None:
    """Its weights are not in the files that the identity is taken from."""
    plain, carrying = load_model(str(folder)), tiny_model("llama")
    carrying.hf.peft_config = {"default": object()}  # type: ignore[dict-item]

    def wrap(**options: Any) -> Model:
        return Model.wrap(carrying.hf, plain.tokenizer, **options)

    for source in (str(folder), resolve(str(folder))):
        with pytest.raises(InputError, match="carries an adapter") as caught:
            wrap(source=source)
        assert "adapter=" in str(caught.value.hint)
        named = wrap(source=source, adapter="some-lora")
        assert named.identity == replace(plain.identity, adapter="some-lora")
    assert load_model(str(folder), adapter="some-lora").identity == named.identity
    for cache, model in ((plain, named), (named, plain), (named, wrap(source=str(folder), adapter="another"))):
        with pytest.raises(IdentityError, match="adapter is"):
            check_identity(cache.identity, model.identity)
    with pytest.raises(InputError, match="name is empty"):
        wrap(source=str(folder), adapter="")
    assert wrap().identity.adapter is None  # its weights are part of what is in memory
    carrying.hf.peft_config = {}  # all adapters have been taken away
    assert wrap(source=str(folder)).identity == plain.identity


def test_caches_of_an_adapted_model_are_its_own(folder: Path, tmp_path: Path) -> None:
    plain, adapted = load_model(str(folder)), load_model(str(folder), adapter="some-lora")
    ids = [3 + number * number % 40 for number in range(40)]
    lynxkv.encode_prompt(adapted, ids, tmp_path / "a.lynx")
    assert lynxkv.inspect(tmp_path / "a.lynx").identity.adapter == "some-lora"
    with lynxkv.open(tmp_path / "a.lynx") as reader, pytest.raises(IdentityError, match="adapter is some-lora"):
        lynxkv.generate(reader, plain, [5], max_new_tokens=2)
    with lynxkv.open(tmp_path / "a.lynx") as reader:
        assert len(lynxkv.generate(reader, adapted, [5], max_new_tokens=2).token_ids) == 2


def test_the_writing_tools_version_is_not_part_of_the_fingerprint(folder: Path) -> None:
    before = resolve(str(folder)).digests
    config = json.loads((folder / "config.json").read_text())
    config.update(transformers_version="9.9.9", dtype="float16", _name_or_path="elsewhere")
    (folder / "config.json").write_text(json.dumps(config, indent=7))
    assert resolve(str(folder)).digests == before


@pytest.mark.parametrize("change", ["config", "first", "last", "tokenizer"])
def test_any_change_of_the_model_changes_a_digest(folder: Path, change: str) -> None:
    before = resolve(str(folder)).digests
    if change == "config":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    elif change == "tokenizer":
        text = (folder / "tokenizer.json").read_text()
        (folder / "tokenizer.json").write_text(text.replace("w10", "w10x"))
    else:
        data = bytearray((folder / "model.safetensors").read_bytes())
        place = 8 + int.from_bytes(data[:8], "little") if change == "first" else len(data) - 1
        data[place] ^= 1
        (folder / "model.safetensors").write_bytes(data)
    after = resolve(str(folder)).digests
    assert (after.fingerprint == before.fingerprint) == (change == "tokenizer")
    assert (after.tokenizer_sha256 == before.tokenizer_sha256) == (change != "tokenizer")


def test_a_chat_template_is_part_of_the_identity(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}|")
    model = load_model(str(folder))
    assert model.identity.turn == "open"
    assert resolve(str(folder)).digests.chat_template_sha256 == model.identity.chat_template_sha256 is not None


def break_folder(folder: Path, how: str) -> None:
    if how == "no config":
        (folder / "config.json").unlink()
    elif how == "bad config":
        (folder / "config.json").write_text("{")
    elif how == "wrong config":
        (folder / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": "wide"}))
    elif how == "no weights":
        (folder / "model.safetensors").unlink()
    elif how == "truncated weights":
        data = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(data[:-100])
    elif how == "no tokenizer":
        (folder / "tokenizer.json").unlink()
        (folder / "tokenizer_config.json").unlink()
    elif how == "bad tokenizer":
        (folder / "tokenizer.json").write_text("{}")
    elif how == "unknown type":
        (folder / "config.json").write_text(json.dumps({"model_type": "unheard-of"}))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("no config", "it has no config.json"),
        ("bad config", "not a readable model"),
        ("wrong config", "cannot load the model"),
        ("no weights", "no safetensors weights"),
        ("truncated weights", "shorter than its header says"),
        ("no tokenizer", "no tokenizer that loads"),
        ("bad tokenizer", "no tokenizer that loads"),
        ("unknown type", "cannot load the model"),
    ],
)
def test_broken_folders_are_refused_with_a_hint(folder: Path, how: str, message: str) -> None:
    break_folder(folder, how)
    with pytest.raises(InputError, match=message) as caught:
        load_model(str(folder))
    assert caught.value.hint


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("no-such-alias", "there is no model 'no-such-alias'"),
        ("./no/such/folder", "there is no model"),
        ("missing.gguf", "there is no file missing.gguf"),
        ("org/name", "cannot get org/name from the hub"),
        ("", "there is no model"),
    ],
)
def test_references_to_nothing_are_refused_with_a_hint(reference: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message) as caught:
        resolve(reference)
    assert caught.value.hint


def test_a_plain_file_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(InputError, match="is not a model"):
        resolve(str(tmp_path / "notes.txt"))


@pytest.mark.parametrize(("option", "value"), [("dtype", "int3"), ("device", "nowhere")])
def test_unknown_dtype_and_device_are_refused(folder: Path, option: str, value: str) -> None:
    options: dict[str, Any] = {option: value}
    with pytest.raises(InputError) as caught:
        load_model(str(folder), **options)
    assert caught.value.hint


def test_code_that_a_folder_brings_is_not_run(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    settings = json.loads((folder / "config.json").read_text())
    for model_type in ("llama", "own"):
        own = {**settings, "model_type": model_type, "auto_map": {"AutoConfig": "own.Config"}}
        (folder / "config.json").write_text(json.dumps(own))
        (folder / "own.py").write_text("raise SystemExit('it was run')")
        if model_type == "llama":  # transformers has an implementation of its own
            assert load_model(str(folder)).identity.model_id == "tiny"
            continue
        with pytest.raises(UnsupportedModelError, match="code of their own, which is not run"):
            load_model(str(folder))
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        # A wide model must be refused before room is made for it, and one missing tensor must not become random.
        ({"hidden_size": 1 << 20, "head_dim": 1 << 18}, "values, the configuration wants"),
        ({"num_hidden_layers": 4}, "values, the configuration wants"),
        ({"attention_bias": True}, "bias is missing"),
    ],
)
def test_weights_that_are_not_the_configurations_are_refused(
    folder: Path, change: dict[str, Any], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = json.loads((folder / "config.json").read_text())
    if "num_hidden_layers" in change:
        change = {**change, "layer_types": None}
    (folder / "config.json").write_text(json.dumps({**settings, **change}))
    with pytest.raises(InputError, match=message):
        load_model(str(folder))
    assert capfd.readouterr() == ("", "")


def test_unsupported_models_are_refused_before_weights_are_read(tmp_path: Path) -> None:
    tiny_config("mamba").save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    with pytest.raises(UnsupportedModelError, match="mamba"):
        load_model(str(tmp_path))


def test_a_gguf_file_is_converted_once_and_whole(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LYNXKV_HOME", str(tmp_path / "home"))
    source = tmp_path / "tiny.gguf"
    source.write_bytes(bytes(range(256)) * 1000)
    calls: list[Path] = []

    def convert(path: Path, model_id: str, work: Path) -> None:
        calls.append(work)
        shutil.copytree(folder, work, dirs_exist_ok=True)
        if len(calls) == 1:
            raise InputError("half done")
        stated = {"model_id": model_id, "digests": vars(Digests(**NO_DIGESTS))}
        (work / checkpoints.SOURCE_FILE).write_text(json.dumps(stated))

    monkeypatch.setattr(checkpoints, "_convert_gguf", convert)
    reports: list[str] = []
    with pytest.raises(InputError, match="half done"):
        resolve(str(source), report=reports.append)
    assert list((tmp_path / "home" / "models").iterdir()) == []
    first = resolve(str(source), report=reports.append)
    again = resolve(str(source), report=reports.append)
    assert first == again
    assert (len(calls), len(reports)) == (2, 2)
    assert (first.model_id, first.digests.fingerprint) == ("tiny", "f" * 64)
    assert [path.name for path in (tmp_path / "home" / "models").iterdir()] == [first.folder.name]
    source.write_bytes(bytes(range(256)) * 999 + bytes(256))
    assert resolve(str(source)).folder != first.folder


NO_DIGESTS: dict[str, Any] = {"fingerprint": "f" * 64, "tokenizer_sha256": None, "chat_template_sha256": None}


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LYNXKV_HOME", str(tmp_path / "home"))
    (tmp_path / "bad.gguf").write_bytes(b"not a model at all" * 100)
    with pytest.raises(InputError, match="cannot be read as a GGUF model"):
        resolve(str(tmp_path / "bad.gguf"))
    assert list((tmp_path / "home" / "models").iterdir()) == []


def test_an_unwritable_home_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "m.gguf").write_bytes(b"x")
    monkeypatch.setenv("LYNXKV_HOME", str(tmp_path / "file"))
    with pytest.raises(InputError, match="cannot write to") as caught:
        resolve(str(tmp_path / "m.gguf"))
    assert "LYNXKV_HOME" in str(caught.value.hint)


def test_a_model_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(checkpoints.ALIASES, "absent", ("no_such_package", "x.gguf", "org/x"))
    with pytest.raises(InputError, match="the model absent is not installed") as caught:
        resolve("absent")
    assert "no-such-package" in str(caught.value.hint)


def test_home_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LYNXKV_HOME", "/somewhere")
    assert cache_home() == Path("/somewhere")
    monkeypatch.delenv("LYNXKV_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    monkeypatch.setattr("sys.platform", "linux")
    assert cache_home() == Path("/xdg/lynxkv")
    monkeypatch.setattr("sys.platform", "darwin")
    assert cache_home() == Path.home() / "Library" / "Caches" / "lynxkv"
