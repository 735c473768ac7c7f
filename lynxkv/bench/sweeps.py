"""Lists of settings that differ in one thing, for `lynxkv bench codec --sweep`. A default is not named.

Imports nothing, so that a command line can offer them without loading a library.
"""

from __future__ import annotations

_ALG1_100 = "alg1:alpha=100"
_SPLITS = ((3, 5), (4, 4), (5, 3), (6, 2), (4, 3), (5, 2), (3, 4), (4, 2), (3, 3), (5, 1))


def _fixed_split(codec: str, anchor: int, residual: int) -> str:
    if (anchor, residual) == (4, 4):
        return codec
    return f"{codec}:anchor_bits={anchor},residual_bits={residual}"


SWEEPS: dict[str, tuple[str, ...]] = {
    # Companding of Algorithm 1: the paper's 100, and what its ablations and others take.
    "alpha": (
        "alg1:alpha=0.5", "alg1:alpha=1", "alg1", "alg1:alpha=5", "alg1:alpha=10", "alg1:alpha=25",
        _ALG1_100, "alg1:alpha=255", "alg1:alpha=500", "alg1:alpha=2000",
    ),
    # Tokens that share a scale.
    "chunk": (
        "alg1:chunk_tokens=16", "alg1", "alg1:chunk_tokens=64", "alg1:chunk_tokens=128",
        "fixed:chunk_tokens=16", "fixed", "fixed:chunk_tokens=64", "fixed:chunk_tokens=128",
    ),
    # Tokens that share a normalisation.
    "page": (
        "alg1:page_tokens=128", "alg1", "alg1:page_tokens=512",
        "fixed:page_tokens=128", "fixed:page_tokens=256", "fixed",
    ),
    # Bits of the anchor and the Residual.
    "split": tuple(_fixed_split(codec, *bits) for codec in ("alg1", "fixed") for bits in _SPLITS),
    # First tokens kept as they are.
    "sinks": tuple(
        codec if count == 4 else f"{codec}:sink_tokens={count}"
        for codec in ("default", "fixed", "alg1")
        for count in (0, 1, 4, 16)
    ),
    # Chunk scales in 8 bits or as f32.
    "scale-width": (
        "alg1", "alg1:chunk_dtype=f32", _ALG1_100, f"{_ALG1_100},chunk_dtype=f32",
        "alg1:chunk_tokens=64,chunk_dtype=f32", f"{_ALG1_100},chunk_tokens=64,chunk_dtype=f32",
    ),
    # Key step against value step at one product, which is one rate: 1 to 1 up to 1 to 6.
    "key-value": (
        "default:key_step=0.251,value_step=0.251", "default:key_step=0.205,value_step=0.307", "default",
        "default:key_step=0.145,value_step=0.434", "default:key_step=0.125,value_step=0.502",
        "default:key_step=0.102,value_step=0.614",
    ),
    # Both steps, in the ratio of the defaults: the anchor's rate.
    "step": (
        "default:key_step=0.1,value_step=0.218", "default:key_step=0.13,value_step=0.283", "default",
        "default:key_step=0.21,value_step=0.457", "default:key_step=0.26,value_step=0.566",
        "default:key_step=0.34,value_step=0.74",
    ),
    # Parts that the Residual cuts a bin in: the total's rate.
    "radix": (
        "default:radix=2", "default:radix=3", "default:radix=4", "default:radix=5", "default:radix=6", "default",
        "default:radix=11", "default:radix=16",
    ),
    # One shard, for caches too small to be split: about as fine as the full precision of fast and of default.
    "whole": (
        "default:key_step=0.042,value_step=0.091,radix=1", "default:key_step=0.0235,value_step=0.0512,radix=1",
        "int8:compress=true",
    ),
}  # fmt: skip
