"""Exact products of whole numbers: indices of components with the rows of a basis (SPEC 8.8).

A sum of whole numbers is the same in whatever order it is made, as long as what carries it holds it. So every machine
gets the same bits from the matrix product it is best at.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from torch import Tensor

from lynxkv.format.basis import TensorBasis

_BYTE = 127
_F32_WHOLE = 2**24
_TRIED_ROWS = 128


def exact_product(index: Tensor, basis: TensorBasis) -> Tensor:
    """index [blocks, T, n], whole numbers in f32, times the basis' rows, rounded once to f32.

    In bytes where they hold every index, as in most Anchors, and the processor multiplies bytes without clipping and
    faster than floats: three times as fast with instructions for them, fifty times as slow without; two bytes an index
    would gain nothing. In f32 where no partial sum can exceed 2^24 and
    products are not shortened. Else in f64, which holds all that the SPEC allows (|j| < 2^24, |row| <= 2^7, n <= 2^16).
    """
    if index.device.type == "cpu" and index.numel():
        largest = float(index.abs().amax())
        if largest <= _BYTE and _bytes_are_exact(index.shape[2]) and _bytes_are_faster(index.shape[2]):
            return _in_bytes(index, torch.from_numpy(basis.rows.copy()))
        if largest * basis.weight < _F32_WHOLE and torch.get_float32_matmul_precision() == "highest":
            return torch.bmm(index, torch.from_numpy(basis.rows.astype(np.float32)))
    rows = torch.from_numpy(basis.rows.astype(np.float64)).to(index.device)
    return torch.bmm(index.to(torch.float64), rows).to(torch.float32)


def _in_bytes(index: Tensor, rows: Tensor) -> Tensor:
    """In 32 bits, which 2^16 products of bytes do not fill."""
    out = torch.empty_like(index)
    for number, own in enumerate(rows):
        out[number] = torch._int_mm(index[number].to(torch.int8), own)
    return out


@cache
def _bytes_are_exact(size: int) -> bool:
    """Whether products of bytes come out right. Processors without instructions for them add pairs in 16 bits, which
    clip at 127 * 127 * 2, and not every torch has them: so the extremes are tried.
    """
    extremes = torch.tensor([-128, 127], dtype=torch.int8)
    generator = torch.Generator().manual_seed(0)
    x = extremes[torch.randint(0, 2, (64, size), generator=generator)]
    x[:2] = extremes[:, None]
    rows = extremes[torch.randint(0, 2, (size, size), generator=generator)]
    rows[:, :2] = extremes
    try:
        found = torch._int_mm(x, rows)
    except (AttributeError, RuntimeError):
        return False
    return torch.equal(found.to(torch.int64), x.to(torch.int64) @ rows.to(torch.int64))


@cache
def _bytes_are_faster(size: int) -> bool:
    """Whether they are here, where they are exact: tried once, since nothing tells how torch multiplies them. Whatever
    comes out, products have the same bits.
    """
    index, rows = torch.ones(1, _TRIED_ROWS, size), torch.ones(1, size, size, dtype=torch.int8)
    return _seconds(lambda: _in_bytes(index, rows)) < _seconds(lambda: torch.bmm(index, rows.to(torch.float32)))


def _seconds(work: Callable[[], object]) -> float:
    """The shortest of a few runs."""
    runs = []
    for _ in range(3):
        began = time.perf_counter()
        work()
        runs.append(time.perf_counter() - began)
    return min(runs)
