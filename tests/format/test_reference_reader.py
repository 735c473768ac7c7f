"""The reference reader agrees with the vectors, and rounds as IEEE 754 does."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from format_spec import generate_vectors, reference_reader
from format_spec.generator.broken import Vector
from format_spec.generator.invalid import made_when_tested
from format_spec.generator.writer import digit_codes, pack

VECTORS = generate_vectors.VECTORS
VALID = sorted(path.stem for path in VECTORS.glob("valid/*.json"))
INVALID = sorted(path.stem for path in VECTORS.glob("invalid/*.json"))
PRECISIONS = reference_reader.PRECISIONS


@pytest.mark.parametrize("name", VALID)
def test_decodes_each_valid_vector(name: str) -> None:
    wanted = json.loads((VECTORS / f"valid/{name}.json").read_text())
    for precision in PRECISIONS:
        cache = reference_reader.read(VECTORS / f"valid/{name}.lynx", precision)
        found = {
            f"layer.{i}.{tensor}": (list(values.shape), generate_vectors.summary(values))
            for i, layer in enumerate(cache.layers)
            for tensor, values in layer.items()
        }
        assert found == {key: (entry["shape"], entry[precision]) for key, entry in wanted["tensors"].items()}
        assert cache.document["dtype"] == wanted["dtype"]


@pytest.mark.parametrize("name", INVALID)
def test_refuses_each_invalid_vector(name: str) -> None:
    wanted = json.loads((VECTORS / f"invalid/{name}.json").read_text())
    with pytest.raises(reference_reader.Refused) as caught:
        reference_reader.read(VECTORS / f"invalid/{name}.lynx", wanted["precision"])
    assert caught.value.kind == wanted["kind"]
    for precision in PRECISIONS[: PRECISIONS.index(wanted["precision"])]:
        reference_reader.read(VECTORS / f"invalid/{name}.lynx", precision)


@pytest.mark.parametrize("vector", list(made_when_tested()), ids=lambda vector: vector.name)
def test_refuses_what_is_made_when_tested(vector: Vector, tmp_path: Path) -> None:
    for file, data in vector.files.items():
        (tmp_path / file).write_bytes(data)
    with pytest.raises(reference_reader.Refused) as caught:
        reference_reader.read(tmp_path, "full" if vector.precision == "full" else "anchor")
    assert caught.value.kind == vector.kind


def test_stands_alone() -> None:
    """One file, the standard library, numpy, and zstandard where it is needed."""
    tree = ast.parse(Path(reference_reader.__file__).read_text())
    nodes = list(ast.walk(tree))
    imported = {name.name.split(".")[0] for node in nodes if isinstance(node, ast.Import) for name in node.names}
    imported |= {(node.module or "").split(".")[0] for node in nodes if isinstance(node, ast.ImportFrom)}
    assert imported - sys.stdlib_module_names == {"numpy", "zstandard"}


def test_prints_a_summary() -> None:
    path = VECTORS / "valid/exact-entropy.lynx"
    command = [sys.executable, reference_reader.__file__]
    done = subprocess.run([*command, str(path)], capture_output=True, text=True, check=True)
    wanted = json.loads(path.with_suffix(".json").read_text())["tensors"]
    tensors = json.loads(done.stdout)["tensors"]
    for precision in PRECISIONS:
        assert {key: entry[precision] for key, entry in tensors.items()} == {
            key: entry[precision]["sha256"] for key, entry in wanted.items()
        }
    refused = VECTORS / "invalid/checksum-anchor.lynx"
    done = subprocess.run([*command, str(refused)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert json.loads(done.stdout)["refused"] == "checksum"


def test_fp16_rounding_is_that_of_ieee_754() -> None:
    """Every fp16, the midpoints between neighbours, and the f32 next to both, against numpy's conversion."""
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    middles = (halves[:-1] + halves[1:]) / 2
    points = np.concatenate([halves, middles])
    values = np.concatenate([points, np.nextafter(points, np.float32(0)), np.nextafter(points, np.float32(np.inf))])
    values = np.concatenate([values, -values])
    limit = np.float32(65504)
    wanted = np.clip(values, -limit, limit).astype(np.float16).view(np.uint16)
    np.testing.assert_array_equal(reference_reader.round_to(values, "fp16"), wanted)


def test_bf16_rounding_goes_to_the_nearer_neighbour() -> None:
    """Every finite bf16 but the largest, and the points a quarter, a half and three quarters of the way up."""
    bits = np.arange(0x7F7F, dtype=np.uint32)
    for step, up in ((0, 0), (0x4000, 0), (0x7FFF, 0), (0x8001, 1), (0xC000, 1)):
        values = ((bits << np.uint32(16)) + np.uint32(step)).view(np.float32)
        np.testing.assert_array_equal(reference_reader.round_to(values, "bf16"), bits + up)
    ties = ((bits << np.uint32(16)) + np.uint32(0x8000)).view(np.float32)
    np.testing.assert_array_equal(reference_reader.round_to(ties, "bf16"), bits + bits % 2)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_rounding_saturates_and_takes_nan_to_zero(dtype: str) -> None:
    values = np.array([np.inf, -np.inf, 3.4e38, -3.4e38, np.nan, -np.nan, -0.0], np.float32)
    most = 0x7F7F if dtype == "bf16" else 0x7BFF
    wanted = [most, most | 0x8000, most, most | 0x8000, 0, 0, 0x8000]
    assert reference_reader.round_to(values, dtype).tolist() == wanted


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("count", [1, 7, 8, 9, 64])
def test_unpack_undoes_pack(bits: int, count: int) -> None:
    codes = np.random.default_rng(bits * 100 + count).integers(0, 2**bits, (3, count))
    data = np.frombuffer(pack(codes, bits), np.uint8)
    np.testing.assert_array_equal(reference_reader.unpack(data, 3, count, bits), codes)


@pytest.mark.parametrize("radix", range(2, 33))
def test_radix_groups_are_those_of_the_table(radix: int) -> None:
    digits = np.random.default_rng(radix).integers(0, radix, (2, 11))
    _, bits = reference_reader.radix_group(radix)
    data = np.frombuffer(pack(digit_codes(digits, radix), bits), np.uint8)
    np.testing.assert_array_equal(reference_reader.unpack_digits(data, 2, 11, radix), digits)


def test_logits_are_read() -> None:
    logits = reference_reader.read(VECTORS / "valid/exact-entropy.lynx", "anchor").logits
    assert logits is not None
    assert logits.tolist() == [(37 * i % 256 - 128) / 32 for i in range(11)]
    assert reference_reader.read(VECTORS / "valid/entropy-small.lynx", "anchor").logits is None


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_corrections_reach_every_finite_pattern(dtype: str) -> None:
    """From one full value to all finite patterns: with one exponent there is nothing to sort."""
    infinity = 0x7F80 if dtype == "bf16" else 0x7C00
    patterns = np.array([bits for bits in range(1 << 16) if bits & infinity != infinity])
    tensor = reference_reader.Tensor(
        number=0, layer=0, name="latent", heads=1, head_dim=len(patterns), coding={}, sinks=0, coded=1, first=0
    )
    for full in (0, 0x8000, 0x3C01, 0xC123, infinity - 1, (infinity - 1) | 0x8000):
        # The patterns in rising order are 0xFFFF down to 0x8000, then 0 up.
        rank = np.where(patterns < 0x8000, patterns, 0x7FFF - patterns)
        steps = rank - (full if full < 0x8000 else 0x7FFF - full)
        steps = np.where(steps > 32767, steps - 65536, np.where(steps < -32768, steps + 65536, steps))
        z = np.where(steps >= 0, 2 * steps, -2 * steps - 1)
        data = (z % 256).astype(np.uint8).tobytes() + (z // 256).astype(np.uint8).tobytes()
        values = np.full((1, len(patterns)), full, np.uint16)
        found = reference_reader.correct(tensor, values, data, dtype)
        np.testing.assert_array_equal(found, patterns[None])


def test_the_vectors_cover_what_corrections_can_do() -> None:
    """Both changes of a zero's sign, steps that wrap around, a correction of 0 and both ends of i16."""
    seen: set[str] = set()
    for name in VALID:
        if not name.startswith("exact"):
            continue
        full, exact = (reference_reader.read(VECTORS / f"valid/{name}.lynx", p) for p in ("full", "exact"))
        for before, after in zip(full.layers, exact.layers, strict=True):
            for tensor in before:
                pairs = zip(before[tensor].reshape(-1).tolist(), after[tensor].reshape(-1).tolist(), strict=True)
                for f, original in pairs:
                    seen |= {"+0 to -0"} if (f, original) == (0, 0x8000) else set()
                    seen |= {"-0 to +0"} if (f, original) == (0x8000, 0) else set()
                    steps = [bits if bits < 0x8000 else 0x7FFF - bits for bits in (original, f)]
                    step = steps[0] - steps[1]
                    seen |= {"wraps"} if not -32768 <= step <= 32767 else set()
                    seen |= {"low end"} if abs(step) == 32768 else set()
                    seen |= {"high end"} if step in (32767, 32767 - 65536) else set()
                    seen |= {"none"} if step == 0 else set()
    assert seen == {"+0 to -0", "-0 to +0", "wraps", "low end", "high end", "none"}
