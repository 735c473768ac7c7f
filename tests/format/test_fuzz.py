"""Damage of every kind: each change is refused by name, or has no effect on what is decoded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lynxkv
from format_spec import reference_reader
from format_spec.generator.broken import Hook, small, small_fixed, split, tiny
from format_spec.generator.caches import layer
from format_spec.generator.writer import CacheDraft, Draft, Files, Hooks, write
from lynxkv.errors import LynxError
from lynxkv.layout import Precision

CHANGES = 10_000
HOSTILE_CHANGES = 4_000

# Decodes a cache folder to bytes, or raises; and the name of a refusal, or None for any other exception.
Decode = Callable[[Path], bytes]
Name = Callable[[Exception], str | None]
Report = Callable[[str], None]


def lynxkv_reader(folder: Path) -> bytes:
    """All tensors at the highest precision there is, and the logits."""
    with lynxkv.open(str(folder)) as cache:
        logits = cache.logits()
        precision: Precision = "exact" if cache.header.has_exact else "full"
    kv = lynxkv.load(str(folder), precision=precision)
    tensors = [values.contiguous() for layer in kv.layers for values in layer.tensors.values()]
    tail = b"" if logits is None else logits.tobytes()
    return b"".join(values.view(torch.int16).numpy().tobytes() for values in tensors) + tail


def small_reader(folder: Path) -> bytes:
    """The same with the reference reader."""
    cache = reference_reader.read(folder, "exact")
    tail = b"" if cache.logits is None else cache.logits.tobytes()
    return b"".join(values.tobytes() for layer in cache.layers for values in layer.values()) + tail


def lynxkv_name(error: Exception) -> str | None:
    """The class of a typed error."""
    return type(error).__name__ if isinstance(error, LynxError) else None


def small_name(error: Exception) -> str | None:
    """The kind of a refusal."""
    return error.kind if isinstance(error, reference_reader.Refused) else None


READERS: list[tuple[Decode, Name]] = [(lynxkv_reader, lynxkv_name), (small_reader, small_name)]
reader = pytest.mark.parametrize(("decode", "name"), READERS, ids=["lynxkv", "reference"])


@pytest.fixture
def cache(tmp_path: Path) -> tuple[Path, Files]:
    """A small cache with sinks, several segments, residual codes, exact arrays and logits: its folder and its files."""
    folder, files = tmp_path / "small.lynx", write(split(exact=True, logits=3))
    folder.mkdir()
    for file, data in files.items():
        (folder / file).write_bytes(data)
    return folder, files


@reader
def test_truncation_at_every_byte(decode: Decode, name: Name, cache: tuple[Path, Files], report: Report) -> None:
    folder, files = cache
    outcomes: Counter[str] = Counter()
    for file, data in files.items():
        for size in range(len(data)):
            (folder / file).write_bytes(data[:size])
            try:
                decode(folder)
            except Exception as error:
                outcomes[name(error) or f"{file} cut to {size}: {error!r}"] += 1
            else:
                outcomes[f"{file} cut to {size}: read"] += 1
        (folder / file).write_bytes(data)
    report(f"{decode.__name__}, cut at every byte: {dict(outcomes.most_common(8))}")
    assert outcomes.keys() <= {"TruncatedError", "truncated"}


@pytest.mark.slow
@reader
def test_random_byte_changes(decode: Decode, name: Name, cache: tuple[Path, Files], report: Report) -> None:
    folder, files = cache
    whole = decode(folder)
    random = np.random.default_rng(20_240_817)
    places = [(file, at) for file, data in files.items() for at in range(len(data))]
    outcomes: Counter[str] = Counter()
    wrong: list[str] = []
    for number in random.integers(0, len(places), CHANGES):
        file, at = places[number]
        data = bytearray(files[file])
        data[at] ^= int(random.integers(1, 256))
        (folder / file).write_bytes(data)
        try:
            same = decode(folder) == whole
        except Exception as error:
            outcomes[name(error) or "untyped"] += 1
            if name(error) is None:
                wrong.append(f"{file}[{at}] = {data[at]}: {error!r}")
        else:
            outcomes["without effect" if same else "other values"] += 1
            if not same:
                wrong.append(f"{file}[{at}] = {data[at]}: other values")
        (folder / file).write_bytes(files[file])
    report(f"{decode.__name__}, {CHANGES} changed bytes: {dict(outcomes.most_common())}")
    assert wrong == []


@pytest.mark.parametrize("stage", ["arrays", "index", "document_text", "header_text", "header"])
def test_both_readers_agree_on_a_hostile_writer(stage: str, tmp_path: Path, report: Report) -> None:
    """Bytes changed before the digests are taken: the readers refuse for the same reason, or read the same values."""
    folder = tmp_path / "hostile.lynx"
    folder.mkdir()
    random = np.random.default_rng(20_240_818)
    outcomes: Counter[str] = Counter()
    wrong: list[str] = []
    for number in range(HOSTILE_CHANGES // 5):
        made = hostile(stage, number, random)
        for path in folder.iterdir():
            path.unlink()
        for file, data in made.items():
            (folder / file).write_bytes(data)
        found = [outcome(decode, name, folder) for decode, name in READERS]
        outcomes[found[1] if isinstance(found[1], str) else "read"] += 1
        if found[0] != found[1]:
            wrong.append(f"{stage} {number}: {found[0]!r:.200} and {found[1]!r:.200}")
    report(f"hostile writer, {stage}: {dict(outcomes.most_common())}, {len(wrong)} disagreements")
    assert wrong == []


# With K and V, sinks, pages, exact arrays of both schemes, logits.
DRAFTS: list[Callable[[], CacheDraft]] = [
    lambda: split(layer),
    small_fixed,
    lambda: small(layer, logits=3),
    lambda: split(layer, exact=True),
    lambda: small_fixed(residual_bits=4, exact=True),
    tiny,
    lambda: small(exact=True),
]


def hostile(stage: str, number: int, random: np.random.Generator) -> Files:
    """A small cache with one byte changed at one stage of writing."""
    draft = DRAFTS[number % len(DRAFTS)]()
    role = "residual" if draft.residual and random.integers(0, 3) == 0 else "anchor"

    def change(data: bytearray) -> None:
        at = int(random.integers(0, len(data)))
        # A small step finds more boundaries than a random byte.
        step = int(random.choice([1, -1, 0x80, int(random.integers(1, 256))]))
        data[at] = (data[at] + step) % 256

    def arrays(drafts: list[Draft]) -> None:
        array = drafts[random.integers(0, len(drafts))]
        segment = array.segments[random.integers(0, len(array.segments))]
        data = bytearray(segment.data)
        change(data)
        segment.data = bytes(data)

    def text(old: str) -> str:
        data = bytearray(old.encode())
        change(data)
        return data.decode("latin-1")

    def header(old: bytes) -> bytes:
        data = bytearray(old)
        change(data)
        return bytes(data)

    hooks: dict[str, Hook] = {
        "arrays": arrays,
        "index": change,
        "document_text": text,
        "header_text": text,
        "header": header,
    }
    hook = hooks[stage]
    return write(draft, Hooks(**{stage: lambda at, subject: hook(subject) if at == role else same(stage, subject)}))


def same(stage: str, subject: Any) -> Any:
    """What a hook of this stage answers when it leaves all as it is."""
    return None if stage in ("arrays", "index") else subject


# lynxkv's words for the kinds of the reference reader.
KINDS = {
    "TruncatedError": "truncated",
    "HeaderError": "header",
    "ChecksumError": "checksum",
    "UnsupportedFormatError": "unsupported",
    "BindingError": "binding",
    "ContentError": "content",
}


def outcome(decode: Decode, name: Name, folder: Path) -> str | bytes:
    """The decoded bytes, the kind of a refusal, or the exception that should not be."""
    try:
        return decode(folder)
    except Exception as error:
        kind = name(error)
        return repr(error) if kind is None else KINDS.get(kind, kind)
