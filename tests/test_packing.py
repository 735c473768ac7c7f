"""Packed rows, radix groups and symbols (SPEC 8.1, 8.4)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lynxkv.packing import (
    pack_digits,
    pack_rows,
    pack_symbols,
    plane_row_bytes,
    planes,
    radix_group,
    unpack_digits,
    unpack_rows,
    unpack_symbols,
)


@pytest.mark.parametrize(
    ("bits", "widths"), [(1, (1,)), (3, (2, 1)), (4, (4,)), (5, (4, 1)), (6, (4, 2)), (7, (4, 2, 1)), (8, (8,))]
)
def test_planes(bits: int, widths: tuple[int, ...]) -> None:
    assert planes(bits) == widths


@given(rows=st.integers(1, 5), count=st.integers(1, 70), bits=st.integers(1, 8), seed=st.integers(0, 2**16))
def test_rows_come_back(rows: int, count: int, bits: int, seed: int) -> None:
    codes = np.random.default_rng(seed).integers(0, 2**bits, (rows, count), dtype=np.uint8)
    data = pack_rows(codes, bits)
    assert data.size == rows * plane_row_bytes(count, bits)
    assert np.array_equal(unpack_rows(data, rows, count, bits), codes)


def test_halves_of_a_byte_are_half_a_row_apart() -> None:
    codes = np.arange(16, dtype=np.uint8)[None]
    assert pack_rows(codes, 4).tolist() == [k | (k + 8) << 4 for k in range(8)]


def test_padding_of_a_row_must_be_zero() -> None:
    data = pack_rows(np.array([[1, 2, 3]], np.uint8), 4)
    data[3] |= 0x10
    with pytest.raises(ValueError, match="padding"):
        unpack_rows(data, 1, 3, 4)


@pytest.mark.parametrize(
    ("radix", "group"),
    [
        (2, (1, 1)),
        (3, (5, 8)),
        (4, (1, 2)),
        (5, (3, 7)),
        (6, (3, 8)),
        (7, (1, 3)),
        (9, (2, 7)),
        (12, (1, 4)),
        (32, (1, 5)),
    ],
)
def test_radix_groups_are_those_of_the_spec(radix: int, group: tuple[int, int]) -> None:
    assert radix_group(radix) == group


@given(rows=st.integers(1, 4), count=st.integers(1, 50), radix=st.integers(2, 32), seed=st.integers(0, 2**16))
def test_digits_come_back(rows: int, count: int, radix: int, seed: int) -> None:
    digits = np.random.default_rng(seed).integers(0, radix, (rows, count), dtype=np.uint8)
    assert np.array_equal(unpack_digits(pack_digits(digits, radix), rows, count, radix), digits)


def test_a_code_over_the_radix_is_refused() -> None:
    data = pack_rows(np.array([[125]], np.uint8), 7)
    with pytest.raises(ValueError, match="not below 5"):
        unpack_digits(data, 1, 3, 5)


def test_a_digit_beyond_the_row_is_refused() -> None:
    data = pack_rows(np.array([[25]], np.uint8), 7)
    with pytest.raises(ValueError, match="padding"):
        unpack_digits(data, 1, 2, 5)


def test_symbols_escape_what_does_not_fit() -> None:
    index = np.array([0, 127, 128, -127, -128, 200_000], np.int32)
    data = pack_symbols(index)
    assert data[:6].tolist() == [127, 254, 255, 0, 255, 255]
    assert data.size == 6 + 3 * 8
    assert unpack_symbols(data, 6).tolist() == index.tolist()


@pytest.mark.parametrize("spoil", ["position", "value", "missing"])
def test_wrong_escapes_are_refused(spoil: str) -> None:
    data = pack_symbols(np.array([0, 500, 1], np.int32))
    if spoil == "position":
        data[3] = 2
    elif spoil == "value":
        data[7:11] = np.frombuffer(np.int32(1 << 18).tobytes(), np.uint8)
    else:
        data = data[:3]
    with pytest.raises(ValueError, match="escape"):
        unpack_symbols(data, 3)
