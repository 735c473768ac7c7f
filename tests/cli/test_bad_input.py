"""Bad input through the command line: an exit code, a hint, no traceback, and nothing half-published."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from lynxkv import encode
from lynxkv.kv import kv_to_safetensors
from lynxkv.testing.kv import random_kv

if TYPE_CHECKING:
    from tests.conftest import Finished, Lynx


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small cache that no test may change."""
    folder = tmp_path_factory.mktemp("published") / "small.lynx"
    encode(random_kv(), str(folder))
    return folder


@pytest.fixture
def cache(published: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(published, tmp_path / "small.lynx"))


def residual_of(cache: Path) -> Path:
    (path,) = cache.glob("residual-*.safetensors")
    return path


def flip(path: Path, position: int) -> None:
    """Change one bit of a file; a negative position counts from its end."""
    data = bytearray(path.read_bytes())
    data[position] ^= 0x10
    path.write_bytes(data)


def refused(done: Finished, code: int, *words: str) -> None:
    """The command failed as it should: with this exit code, these words, a hint, and no traceback."""
    assert done.code == code, done
    assert done.out == ""
    first, *rest = done.err.splitlines()
    assert first.startswith("error: "), done.err
    assert any(line.startswith("hint: ") for line in rest), done.err
    assert "Traceback" not in done.err
    assert "unexpected" not in done.err
    for word in words:
        assert word in done.err, (word, done.err)


@pytest.mark.parametrize("command", [("check",), ("inspect",), ("generate", "--prompt", "Why?")])
class TestEveryReader:
    """What all commands that read a cache refuse alike."""

    def test_a_cache_that_is_not_there(self, lynx: Lynx, tmp_path: Path, command: tuple[str, ...]) -> None:
        refused(lynx(*command, tmp_path / "missing.lynx"), 1, "missing.lynx")

    def test_a_url_that_names_no_cache(self, lynx: Lynx, tmp_path: Path, command: tuple[str, ...]) -> None:
        refused(lynx(*command, tmp_path), 1, ".lynx")

    def test_an_unknown_scheme(self, lynx: Lynx, command: tuple[str, ...]) -> None:
        refused(lynx(*command, "gopher://host/small.lynx"), 1, "gopher")

    def test_a_flipped_bit_in_the_header(self, lynx: Lynx, cache: Path, command: tuple[str, ...]) -> None:
        flip(cache / "anchor.safetensors", 100)
        refused(lynx(*command, cache), 1, "anchor.safetensors")

    def test_a_truncated_anchor(self, lynx: Lynx, cache: Path, command: tuple[str, ...]) -> None:
        path = cache / "anchor.safetensors"
        path.write_bytes(path.read_bytes()[:-1])
        refused(lynx(*command, cache), 1, "anchor.safetensors")

    def test_an_empty_anchor(self, lynx: Lynx, cache: Path, command: tuple[str, ...]) -> None:
        (cache / "anchor.safetensors").write_bytes(b"")
        refused(lynx(*command, cache), 1, "anchor.safetensors")

    def test_no_url(self, lynx: Lynx, command: tuple[str, ...]) -> None:
        refused(lynx(*command), 2, "URL")

    def test_an_unknown_option(self, lynx: Lynx, cache: Path, command: tuple[str, ...]) -> None:
        refused(lynx(*command, cache, "--fast"), 2, "--fast", "--help")


class TestCheck:
    """What only reading all of a cache can find."""

    @pytest.mark.parametrize("shard", ["anchor", "residual"])
    def test_a_flipped_bit_in_the_data(self, lynx: Lynx, cache: Path, shard: str) -> None:
        path = cache / "anchor.safetensors" if shard == "anchor" else residual_of(cache)
        # Inside the last array, before any padding.
        flip(path, -100)
        refused(lynx("check", cache), 1, path.name)

    def test_a_truncated_residual(self, lynx: Lynx, cache: Path) -> None:
        path = residual_of(cache)
        path.write_bytes(path.read_bytes()[:-1])
        refused(lynx("check", cache), 1, path.name)

    def test_no_residual(self, lynx: Lynx, cache: Path) -> None:
        residual_of(cache).unlink()
        refused(lynx("check", cache), 1, "residual")

    def test_the_residual_of_another_encode(self, lynx: Lynx, cache: Path, tmp_path: Path) -> None:
        encode(random_kv(seed=1), str(tmp_path / "other.lynx"))
        shutil.copyfile(residual_of(tmp_path / "other.lynx"), residual_of(cache))
        refused(lynx("check", cache), 1, "residual")

    def test_the_anchor_of_another_encode(self, lynx: Lynx, cache: Path, tmp_path: Path) -> None:
        encode(random_kv(seed=1), str(tmp_path / "other.lynx"))
        shutil.copyfile(tmp_path / "other.lynx" / "anchor.safetensors", cache / "anchor.safetensors")
        refused(lynx("check", cache), 1, "residual")

    def test_the_cache_was_whole_before(self, lynx: Lynx, published: Path) -> None:
        done = lynx("check", published)
        assert (done.code, done.err) == (0, "")
        assert "whole" in done.out


class TestInspect:
    """Originals that cannot be compared with."""

    def test_against_a_file_that_is_not_there(self, lynx: Lynx, published: Path, tmp_path: Path) -> None:
        refused(lynx("inspect", published, "--against", tmp_path / "missing.safetensors"), 1, "missing.safetensors")

    def test_against_a_file_of_another_kind(self, lynx: Lynx, published: Path, tmp_path: Path) -> None:
        (tmp_path / "kv.safetensors").write_text("not safetensors")
        refused(lynx("inspect", published, "--against", tmp_path / "kv.safetensors"), 1, "kv.safetensors")

    def test_against_other_shapes(self, lynx: Lynx, published: Path, tmp_path: Path) -> None:
        kv_to_safetensors(random_kv(tokens=71), tmp_path / "kv.safetensors")
        refused(lynx("inspect", published, "--against", tmp_path / "kv.safetensors"), 1, "shapes")

    def test_two_originals(self, lynx: Lynx, published: Path, tmp_path: Path) -> None:
        refused(lynx("inspect", published, "--against", tmp_path, "--model", "smollm2"), 2, "--against")


class TestEncode:
    """What is refused before or while encoding, and what it leaves behind."""

    @pytest.fixture
    def dump(self, tmp_path: Path) -> Path:
        kv_to_safetensors(random_kv(), tmp_path / "kv.safetensors")
        return tmp_path / "kv.safetensors"

    def test_neither_prompt_nor_file(self, lynx: Lynx, tmp_path: Path) -> None:
        refused(lynx("encode", "--out", tmp_path / "x.lynx"), 2, "--from")

    def test_both_prompt_and_file(self, lynx: Lynx, tmp_path: Path, dump: Path) -> None:
        refused(lynx("encode", "text", "--from", dump, "--out", tmp_path / "x.lynx"), 2, "--from")

    def test_a_prompt_without_a_model(self, lynx: Lynx, tmp_path: Path) -> None:
        refused(lynx("encode", "text", "--out", tmp_path / "x.lynx"), 2, "--model smollm2")

    def test_no_output(self, lynx: Lynx, dump: Path) -> None:
        refused(lynx("encode", "--from", dump), 2, "--out")

    def test_logits_of_a_kv_file(self, lynx: Lynx, dump: Path, tmp_path: Path) -> None:
        refused(lynx("encode", "--from", dump, "--logits", "--out", tmp_path / "x.lynx"), 2, "--logits")

    def test_a_prompt_file_that_is_not_there(self, lynx: Lynx, tmp_path: Path) -> None:
        done = lynx("encode", f"@{tmp_path}/missing.txt", "--model", "smollm2", "--out", tmp_path / "x.lynx")
        refused(done, 2, "missing.txt")

    def test_an_output_that_names_no_cache(self, lynx: Lynx, tmp_path: Path, dump: Path) -> None:
        refused(lynx("encode", "--from", dump, "--out", tmp_path / "x"), 1, ".lynx")

    def test_an_output_that_is_there(self, lynx: Lynx, cache: Path, dump: Path) -> None:
        before = {path.name: path.read_bytes() for path in cache.iterdir()}
        refused(lynx("encode", "--from", dump, "--out", cache), 1, "--force")
        assert {path.name: path.read_bytes() for path in cache.iterdir()} == before
        assert lynx("encode", "--from", dump, "--out", cache, "--force").code == 0
        assert lynx("check", cache).code == 0

    def test_an_output_that_cannot_be_written(self, lynx: Lynx, tmp_path: Path, dump: Path) -> None:
        (tmp_path / "file").write_text("in the way")
        refused(lynx("encode", "--from", dump, "--out", tmp_path / "file" / "x.lynx"), 1, "cannot write")

    @pytest.mark.parametrize("kind", ["pipe", "folder", "device", "nothing"])
    def test_a_dump_that_is_no_file(self, lynx: Lynx, tmp_path: Path, kind: str) -> None:
        paths = {"folder": tmp_path, "device": Path("/dev/zero")}
        if kind == "pipe":
            os.mkfifo(tmp_path / "pipe")
        dump = paths.get(kind, tmp_path / kind)
        refused(lynx("encode", "--from", dump, "--out", tmp_path / "x.lynx"), 1, str(dump), "no such file")

    def test_an_unknown_codec(self, lynx: Lynx, tmp_path: Path, dump: Path) -> None:
        refused(lynx("encode", "--from", dump, "--codec", "zip", "--out", tmp_path / "x.lynx"), 1, "zip", "alg1")
        assert not (tmp_path / "x.lynx").exists()

    def test_an_unknown_dtype(self, lynx: Lynx, tmp_path: Path, dump: Path) -> None:
        refused(lynx("encode", "--from", dump, "--dtype", "int8", "--out", tmp_path / "x.lynx"), 2, "bf16")

    def test_fp32_that_the_codec_cannot_keep(self, lynx: Lynx, tmp_path: Path, dump: Path) -> None:
        refused(lynx("encode", "--from", dump, "--dtype", "fp32", "--out", tmp_path / "x.lynx"), 1, "raw")
        assert not (tmp_path / "x.lynx").exists()

    @pytest.mark.parametrize(
        "options", [("--dtype", "fp32"), ("--codec", "default:radix=99"), ("--codec", "default:sink_tokens=9999")]
    )
    def test_options_that_no_cache_could_have_are_refused_before_the_model_is_loaded(
        self, lynx: Lynx, tmp_path: Path, options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("lynxkv.checkpoints.load_model", lambda *arguments, **options: pytest.fail("loaded"))
        refused(lynx("encode", "text", "--model", "smollm2", *options, "--out", tmp_path / "x.lynx"), 1)

    def test_keys_that_are_not_finite(self, lynx: Lynx, tmp_path: Path) -> None:
        kv = random_kv()
        kv.layers[1].tensors["k"][0, 3, 2] = float("nan")
        kv_to_safetensors(kv, tmp_path / "kv.safetensors")
        refused(lynx("encode", "--from", tmp_path / "kv.safetensors", "--out", tmp_path / "x.lynx"), 1, "layer 1 k")
        assert not (tmp_path / "x.lynx").exists()

    def test_a_dump_with_other_arrays(self, lynx: Lynx, tmp_path: Path) -> None:
        import numpy as np
        import safetensors.numpy

        safetensors.numpy.save_file({"weight": np.zeros((2, 2), np.float32)}, tmp_path / "kv.safetensors")
        done = lynx("encode", "--from", tmp_path / "kv.safetensors", "--out", tmp_path / "x.lynx")
        refused(done, 1, "layer.0.k", "weight")

    def test_a_model_that_is_not_there(self, lynx: Lynx, tmp_path: Path) -> None:
        done = lynx("encode", "text", "--model", "no-such-model", "--out", tmp_path / "x.lynx", "--quiet")
        refused(done, 1, "no-such-model")

    def test_a_chunk_of_no_tokens(self, lynx: Lynx, tmp_path: Path) -> None:
        done = lynx("encode", "text", "--model", "smollm2", "--chunk-tokens", 0, "--out", tmp_path / "x.lynx")
        refused(done, 2, "--chunk-tokens")

    @pytest.mark.parametrize(("prompt", "stdin"), [("", b""), ("  \n", b""), ("-", b""), ("-", b"\n\n")])
    def test_an_empty_prompt(self, lynx: Lynx, tmp_path: Path, prompt: str, stdin: bytes) -> None:
        done = lynx("encode", prompt, "--model", "smollm2", "--out", tmp_path / "x.lynx", "--quiet", stdin=stdin)
        refused(done, 1, "empty")

    @pytest.mark.model
    @pytest.mark.usefixtures("one_copy_of_smollm2")
    def test_a_prompt_longer_than_the_context(self, lynx: Lynx, tmp_path: Path) -> None:
        (tmp_path / "long.txt").write_text("word " * 9000)
        done = lynx("encode", f"@{tmp_path}/long.txt", "--model", "smollm2", "--out", tmp_path / "x.lynx", "--quiet")
        refused(done, 1, "8192")
        assert not (tmp_path / "x.lynx").exists()


class TestGenerate:
    """Options and models that do not fit."""

    @pytest.mark.parametrize("value", ["fast", "0mbit", "200"])
    def test_a_link_that_is_none(self, lynx: Lynx, published: Path, value: str) -> None:
        refused(lynx("generate", published, "--prompt", "Why?", "--link", value), 2, "200mbit")

    @pytest.mark.parametrize("value", ["sometimes", "0", "-3", "1.5"])
    def test_a_way_to_speculate_that_is_none(self, lynx: Lynx, published: Path, value: str) -> None:
        refused(lynx("generate", published, "--prompt", "Why?", f"--speculate={value}"), 2, "auto, off")

    @pytest.mark.parametrize(
        ("option", "value"),
        [
            ("--max-new-tokens", 0),
            ("--temperature", -1),
            ("--temperature", "nan"),
            ("--top-p", 1.5),
            ("--verify", "half"),
        ],
    )
    def test_a_number_out_of_range(self, lynx: Lynx, published: Path, option: str, value: object) -> None:
        refused(lynx("generate", published, "--prompt", "Why?", f"{option}={value}"), 2, option)

    @pytest.mark.parametrize(
        ("option", "value"), [("--top-p", 0), ("--repetition-penalty", 0), ("--temperature", "inf")]
    )
    def test_a_number_that_the_sampler_refuses(self, lynx: Lynx, published: Path, option: str, value: object) -> None:
        done = lynx("generate", published, "--model", "smollm2", "--prompt", "Why?", f"{option}={value}")
        refused(done, 1, option.strip("-").replace("-", "_"))

    def test_a_cache_without_exact_section(self, lynx: Lynx, published: Path) -> None:
        done = lynx("generate", published, "--model", "smollm2", "--prompt", "Why?", "--verify", "exact")
        refused(done, 1, "no exact section")

    def test_an_empty_stop(self, lynx: Lynx, published: Path) -> None:
        refused(lynx("generate", published, "--prompt", "Why?", "--stop", ""), 2, "--stop")

    def test_an_empty_question(self, lynx: Lynx, published: Path) -> None:
        refused(lynx("generate", published, "--prompt", ""), 1, "the question is empty")

    def test_a_cache_that_names_no_model(self, lynx: Lynx, published: Path) -> None:
        refused(lynx("generate", published, "--prompt", "Why?"), 2, "--model")

    @pytest.mark.model
    @pytest.mark.usefixtures("one_copy_of_smollm2")
    def test_a_cache_of_another_model(self, lynx: Lynx, published: Path) -> None:
        refused(lynx("generate", published, "--model", "smollm2", "--prompt", "Why?", "--quiet"), 1, "layers")
