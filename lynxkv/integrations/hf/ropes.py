"""How a model turns its keys by position, as its rotary embeddings hold it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from lynxkv.format.basis import FINE_POSITIONS, RopeTables
from lynxkv.integrations.hf.model import Model
from lynxkv.layout import roundup

# Of models that set no limit to their context.
DEFAULT_POSITIONS = 1 << 17


def rope_tables(model: Model) -> dict[str, RopeTables]:
    """Tables for every rotary embedding of the model by name: `main`, or the kind of layer it is for.

    Empty where there are none. Pairs are half a head apart, as transformers has them; what a model turns otherwise gets
    tables all the same, which then make nothing smaller.
    """
    found: dict[str, RopeTables] = {}
    positions = roundup(model.context_tokens or DEFAULT_POSITIONS, FINE_POSITIONS)
    for path, module in model.hf.named_modules():
        if not path.endswith("rotary_emb"):
            continue
        for name, buffer in module.named_buffers(recurse=False):
            if not name.endswith("inv_freq") or name.endswith("original_inv_freq"):
                continue
            kind = name.removesuffix("inv_freq").rstrip("_")
            scaling = getattr(module, f"{kind}_attention_scaling" if kind else "attention_scaling", 1.0)
            found.setdefault(kind.replace("_", "-") or "main", tables(buffer, float(scaling), positions))
    return found


def tables(inverse_frequencies: Any, scaling: float, positions: int) -> RopeTables:
    """From angles a position [m], in radians."""
    frequency = torch.as_tensor(inverse_frequencies).to("cpu", torch.float64).numpy()

    def turns(position: np.ndarray[Any, np.dtype[np.int64]]) -> np.ndarray[Any, np.dtype[np.float64]]:
        angle = position[:, None] * frequency
        return np.stack([np.cos(angle), np.sin(angle)], -1)

    coarse = turns(np.arange(0, positions, FINE_POSITIONS)) * scaling
    return RopeTables(coarse=coarse.astype(np.float32), fine=turns(np.arange(FINE_POSITIONS)).astype(np.float32))
