"""From f32 to the declared dtype in integers (SPEC 8.5), inside kernels."""

from __future__ import annotations

import triton
import triton.language as tl

BF16 = tl.constexpr(0)
FP16 = tl.constexpr(1)
FP32 = tl.constexpr(2)
BF16_IN_F32 = tl.constexpr(3)
FP16_IN_F32 = tl.constexpr(4)
"""What the destination holds; 16-bit floats are stored through an int16 pointer."""


@triton.jit
def bf16_bits(value: tl.tensor) -> tl.tensor:
    """Nearest even, saturating, NaN to +0, as int32."""
    bits = value.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # Zeroed where it is a NaN's, which is no result and would overflow below.
    finite = tl.where(magnitude > 0x7F800000, 0, magnitude)
    rounded = tl.minimum((finite + 0x7FFF + ((finite >> 16) & 1)) >> 16, 0x7F7F)
    return tl.where(magnitude > 0x7F800000, 0, rounded | ((bits >> 16) & 0x8000))


@triton.jit
def fp16_bits(value: tl.tensor) -> tl.tensor:
    """The same; below 2^-14 adding 0.5 leaves the rounded subnormal in the lowest bits."""
    bits = value.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    large = tl.minimum(magnitude, 0x477FF000)  # rounds to beyond the largest
    normal = (large - 0x38000000 + 0xFFF + ((large >> 13) & 1)) >> 13
    small = tl.minimum(magnitude, 0x38800000).to(tl.float32, bitcast=True) + 0.5
    subnormal = small.to(tl.int32, bitcast=True) - 0x3F000000
    rounded = tl.minimum(tl.where(magnitude < 0x38800000, subnormal, normal), 0x7BFF)
    return tl.where(magnitude > 0x7F800000, 0, rounded | ((bits >> 16) & 0x8000))


@triton.jit
def f32_of_fp16_bits(bits: tl.tensor) -> tl.tensor:
    """Exact, for finite values: exponent and mantissa as an f32's, times 2^112."""
    magnitude = ((bits & 0x7FFF) << 13).to(tl.float32, bitcast=True) * 5.192296858534828e33
    sign = (bits & 0x8000) << 16
    return (magnitude.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def rounded_as(value: tl.tensor, KIND: tl.constexpr) -> tl.tensor:
    """The element that `KIND` stores for an f32 value."""
    # One way out: the compiler looks at what follows a return, too.
    if KIND == BF16:
        element = bf16_bits(value).to(tl.int16)
    elif KIND == FP16:
        element = fp16_bits(value).to(tl.int16)
    elif KIND == BF16_IN_F32:
        element = (bf16_bits(value) << 16).to(tl.float32, bitcast=True)
    elif KIND == FP16_IN_F32:
        element = f32_of_fp16_bits(fp16_bits(value))
    else:
        element = value
    return element


@triton.jit
def widened(raw: tl.tensor, BF16_BITS: tl.constexpr) -> tl.tensor:
    """f32 of what was loaded; bf16 comes as int16, for the interpreter's own cast loses subnormals."""
    if BF16_BITS:
        value = (raw.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        value = raw.to(tl.float32)
    return value
