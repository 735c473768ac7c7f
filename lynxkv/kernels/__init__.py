"""Kernels: KV tensors to segment bytes and back (SPEC 8).

One signature for every backend; `reference` is the definition. Bytes are numpy arrays, tensors are torch.
"""

from __future__ import annotations

from lynxkv.kernels.reference import dequantize, quantize
from lynxkv.kernels.tables import EntropyTables, FixedTables, Tables

__all__ = ["EntropyTables", "FixedTables", "Tables", "dequantize", "quantize"]
