"""Encode KV tensors of your own, look at the cache, and read it back at both precisions.

    python examples/01_encode_and_read.py

No model is needed: any tensors [heads, tokens, head_dim] will do.
"""

from __future__ import annotations

import tempfile

import torch

import lynxkv
from lynxkv.kv import kv_from_tensors


def main() -> None:
    """Write a cache of 4 layers to a temporary folder and measure what comes back."""
    generator = torch.Generator().manual_seed(0)
    heads, tokens, head_dim = 4, 1000, 64
    layers = [
        (
            torch.randn(heads, tokens, head_dim, generator=generator),
            torch.randn(heads, tokens, head_dim, generator=generator),
        )
        for _ in range(4)
    ]
    kv = kv_from_tensors(layers)

    with tempfile.TemporaryDirectory() as folder:
        url = f"{folder}/example.lynx"  # or s3://bucket/example.lynx, memory://example.lynx, ...
        lynxkv.encode(kv, url)
        report = lynxkv.inspect(url)
        print(
            f"{report.tokens.count} tokens: {report.anchor_bits:.2f} bits an element in the Anchor alone, "
            f"{report.total_bits:.2f} with the Residual, 16 before"
        )

        anchor = lynxkv.load(url, precision="anchor")
        full = lynxkv.load(url)
        keys = layers[0][0]
        for name, decoded in (("anchor", anchor), ("full", full)):
            error = (decoded.layers[0].tensors["k"].float() - keys).square().mean() / keys.square().mean()
            print(f"{name:<7}normalised mean square error of the first keys: {error:.1e}")

    # The codecs also work on a tensor alone, without files.
    quantized = lynxkv.quantize(keys, "alg1")
    restored = lynxkv.dequantize(quantized)
    print(f"alg1   largest error: {(restored - keys).abs().max():.3f}")


if __name__ == "__main__":
    main()
