"""inspect and check: parts add up, damage is found, nothing heavy is imported."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path

import pytest

import lynxkv
from lynxkv.codecs import CODECS
from lynxkv.format.document import ANCHOR_NAME
from lynxkv.testing.kv import random_kv


@pytest.mark.parametrize("codec", [name for name, codec in CODECS.items() if not codec.needs_basis])
def test_parts_add_up_to_the_objects(codec: str, tmp_path: Path) -> None:
    url = str(tmp_path / "a.lynx")
    report = lynxkv.encode(random_kv(layers=3, tokens=300, windows=(None, 64, None)), url, codec=codec)
    seen = lynxkv.inspect(url)
    for shard, size in (("anchor", report.bytes_anchor), ("residual", report.bytes_residual)):
        assert sum(part.bytes for part in seen.parts if part.shard == shard) == size
    assert all(part.bytes >= 0 for part in seen.parts)
    bits = sum(part.bits_per_element for part in seen.parts)
    assert bits == pytest.approx(seen.total_bits)
    assert seen.compression_total == pytest.approx(16 / bits)
    assert [(group.first, group.last) for group in seen.layer_groups] == [(0, 0), (1, 1), (2, 2)]


def test_scales_are_told_apart_from_codes(tmp_path: Path) -> None:
    url = str(tmp_path / "a.lynx")
    lynxkv.encode(random_kv(layers=1, tokens=260), url, codec="int4")
    parts = {part.name: part.bytes for part in lynxkv.inspect(url).parts}
    assert parts["scales"] == 2 * 260 * (4 + 4)
    assert parts["codes"] == 2 * 260 * 32 // 2


def test_padding_must_be_zero(tmp_path: Path) -> None:
    url = str(tmp_path / "a.lynx")
    lynxkv.encode(random_kv(layers=1, tokens=10, head_dim=5), url)
    lynxkv.check(url)
    path = tmp_path / "a.lynx" / ANCHOR_NAME
    data = bytearray(path.read_bytes())
    data[-1] = 1  # the pad after the token ids
    path.write_bytes(data)
    with pytest.raises(lynxkv.FormatError, match="padding"):
        lynxkv.check(url)


def test_another_safetensors_file_is_not_a_cache(tmp_path: Path) -> None:
    folder = tmp_path / "a.lynx"
    folder.mkdir()
    header = b'{"__metadata__":{"format":"pt"},"x":{"dtype":"U8","shape":[64],"data_offsets":[0,64]}}'
    header = header.ljust(120)
    (folder / ANCHOR_NAME).write_bytes(struct.pack("<Q", len(header)) + header + bytes(64))
    with pytest.raises(lynxkv.HeaderError, match="not a lynxkv shard"):
        lynxkv.check(str(folder))


def test_neither_torch_nor_numba_is_needed(tmp_path: Path) -> None:
    url = str(tmp_path / "a.lynx")
    lynxkv.encode(random_kv(), url)
    script = (
        "import sys, lynxkv; lynxkv.check(sys.argv[1]); lynxkv.inspect(sys.argv[1]);"
        "sys.exit(any(name in sys.modules for name in ('torch', 'numba', 'triton', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", script, url], check=False).returncode == 0
