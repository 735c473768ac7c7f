"""Components instead of channels (SPEC 8.8), in plain torch on any device, around the kernels of every backend.

What follows the exact product with the rows of a basis (`products.py`), the step, the mean and the turn by position,
rounds every operation apart.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from lynxkv.kernels.tables import EntropyTables, Rope, Transform
from lynxkv.layout import TensorSpec


def turned_back(x: Tensor, rope: Rope | None) -> Tensor:
    """x [H, T, D] as it was before `rope`, f32."""
    x = x.to(torch.float32)
    if rope is None:
        return x
    cos, sin = _angles(rope, x.shape[1], x.device)
    square = cos * cos + sin * sin
    cos, sin = cos / square, sin / square
    pairs = cos.shape[-1]
    first, second = x[..., :pairs], x[..., pairs : 2 * pairs]
    return torch.cat((first * cos + second * sin, second * cos - first * sin, x[..., 2 * pairs :]), -1)


def components(x: Tensor, mean: Tensor, transform: Transform) -> Tensor:
    """The components [blocks, T, n] of x [H, T, D], turned back, less the channel means [N]; f32."""
    heads, tokens, dim = x.shape
    centred = x.transpose(0, 1).reshape(tokens, heads * dim) - mean
    inverse = torch.from_numpy(transform.inverse).to(x.device)
    return torch.bmm(centred.view(tokens, transform.blocks, transform.size).transpose(0, 1), inverse)


def to_components(x: Tensor, tables: EntropyTables, transform: Transform) -> tuple[Tensor, EntropyTables]:
    """What is to be quantised instead of x [H, T, D]: components [blocks, T, n], and the tables for them."""
    mean = torch.from_numpy(tables.mean).to(x.device)
    found = components(turned_back(x, transform.rope), mean, transform)
    return found, replace(tables, mean=np.zeros_like(tables.mean), transform=None)


def index_tables(tables: EntropyTables) -> EntropyTables:
    """Tables with which a segment decodes to its indices: q at anchor precision, j in full."""
    one = np.float32(1)
    return replace(tables, mean=np.zeros_like(tables.mean), step=one, half_step=one, transform=None)


def spec_of_components(transform: Transform, spec: TensorSpec) -> TensorSpec:
    """A tensor of components as kernels see it: blocks in the place of heads."""
    return TensorSpec(heads=transform.blocks, head_dim=transform.size, coding=spec.coding)


def values_of(sums: Tensor, tables: EntropyTables, transform: Transform, spec: TensorSpec, step: float) -> Tensor:
    """f32 values [H, T, D] from sums of components [blocks, T, n]."""
    tokens = sums.shape[1]
    mean = torch.from_numpy(tables.mean).to(sums.device)
    value = sums * step + mean.view(transform.blocks, 1, transform.size)
    value = value.transpose(0, 1).reshape(tokens, spec.heads, spec.head_dim).transpose(0, 1)
    if transform.rope is None:
        return value
    cos, sin = _angles(transform.rope, tokens, value.device)
    pairs = cos.shape[-1]
    first, second = value[..., :pairs], value[..., pairs : 2 * pairs]
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat((*turned, value[..., 2 * pairs :]), -1)


def _angles(rope: Rope, tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    cos, sin = rope.angles(tokens)
    return torch.from_numpy(cos).to(device), torch.from_numpy(sin).to(device)
