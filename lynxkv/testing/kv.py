"""KV tensors for tests: shapes, outliers and oddities of real caches, from a seed."""

from __future__ import annotations

import torch

from lynxkv.kv import KV, KVLayer


def random_kv(
    *,
    layers: int = 2,
    heads: int = 2,
    tokens: int = 70,
    head_dim: int = 16,
    seed: int = 0,
    outlier: float = 1.0,
    windows: tuple[int | None, ...] = (None,),
) -> KV:
    """A KV with channel offsets and unequal channel spreads, f32 [heads, tokens, head_dim].

    Args:
        outlier: factor on one channel of every key tensor.
        windows: sliding windows, repeated over the layers; a layer keeps at most its window.
    """
    generator = torch.Generator().manual_seed(seed)
    out = []
    for number in range(layers):
        window = windows[number % len(windows)]
        start = 0 if window is None else max(0, tokens - window)
        tensors = {}
        for name in ("k", "v"):
            spread = 0.2 + 2 * torch.rand(heads, 1, head_dim, generator=generator)
            mean = torch.randn(heads, 1, head_dim, generator=generator)
            x = torch.randn(heads, tokens - start, head_dim, generator=generator) * spread + mean
            if name == "k":
                x[0, :, 0] *= outlier
            tensors[name] = x
        out.append(
            KVLayer(
                tensors={"k": tensors["k"], "v": tensors["v"]},
                start=start,
                stop=tokens,
                kind="full" if window is None else "sliding",
                window=window,
            )
        )
    ids = torch.randint(0, 50_000, (tokens,), generator=generator).tolist()
    return KV(layers=out, stop=tokens, token_ids=ids)
