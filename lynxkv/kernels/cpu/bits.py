"""numba with this project's settings, and exact conversions between f32 and 16-bit floats (SPEC 8.5).

The conversions are written in LLVM's integers: numba itself widens every small integer to 64 bits, which would cost the
vector units most of their width. Every multiply and add of the kernels stays a rounding of its own: no fastmath, and
LLVM fuses nothing that was not asked for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from importlib.resources import files
from typing import Any, TypeVar, cast

import numba
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic, overload

F = TypeVar("F", bound=Callable[..., Any])

_I16, _I32, _F32 = ir.IntType(16), ir.IntType(32), ir.FloatType()


_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": False, "boundscheck": False}
_INNER: dict[str, Any] = {**_OPTIONS, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}


def jit(function: F) -> F:
    """Compile without the interpreter lock at the first call; machine code is kept on disk where a folder allows it."""
    try:
        made = numba.njit(cache=True, **_OPTIONS)(function)
    except RuntimeError:
        # No folder to write to, neither beside the source nor in the user's cache.
        return cast(F, numba.njit(**_OPTIONS)(function))
    # numba would go by size and date of the kernel's own file, and take old code for what came from its neighbours.
    made._cache._cache_file._source_stamp = _sources()
    return cast(F, made)


@cache
def _sources() -> str:
    """A digest of all that kernels are compiled from."""
    folder = files("lynxkv.kernels.cpu")
    sources = sorted((file for file in folder.iterdir() if file.name.endswith(".py")), key=lambda file: file.name)
    digest = hashlib.sha256(files("lynxkv").joinpath("packing.py").read_bytes())
    for file in sources:
        digest.update(file.read_bytes())
    return digest.hexdigest()


def helper(function: F) -> F:
    """The same for what only kernels call, closures too: its machine code is kept with theirs, and no way to call it
    from Python is compiled.
    """
    return cast(F, numba.njit(**_INNER)(function))


def _unary(source: Any, result: Any, build: Callable[[Any, Any], Any]) -> Any:
    """An intrinsic source -> result that `build(builder, value)` writes."""

    def typed(_context: Any, _value: Any) -> Any:
        def generate(_cg: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            return build(builder, arguments[0])

        return result(source), generate

    return intrinsic(typed)


def _i32(value: int) -> ir.Constant:
    return ir.Constant(_I32, value)


def _split(builder: Any, value: Any) -> tuple[Any, Any]:
    """Magnitude bits and the sign moved to bit 15, both i32."""
    bits = builder.bitcast(value, _I32)
    sign = builder.and_(builder.lshr(bits, _i32(16)), _i32(0x8000))
    return builder.and_(bits, _i32(0x7FFFFFFF)), sign


def _finish(builder: Any, magnitude: Any, rounded: Any, sign: Any, largest: int) -> Any:
    """Saturate at the largest finite value, put the sign back, NaN to +0."""
    over = builder.icmp_unsigned(">", rounded, _i32(largest))
    rounded = builder.or_(builder.select(over, _i32(largest), rounded), sign)
    nan = builder.icmp_unsigned(">", magnitude, _i32(0x7F800000))
    return builder.trunc(builder.select(nan, _i32(0), rounded), _I16)


def _to_bf16(builder: Any, value: Any) -> Any:
    """m + 0x7FFF + the lowest bit kept, then the upper half: to nearest, ties to even."""
    magnitude, sign = _split(builder, value)
    tie = builder.and_(builder.lshr(magnitude, _i32(16)), _i32(1))
    rounded = builder.lshr(builder.add(builder.add(magnitude, _i32(0x7FFF)), tie), _i32(16))
    return _finish(builder, magnitude, rounded, sign, 0x7F7F)


def _to_fp16(builder: Any, value: Any) -> Any:
    """The same with 10 bits of mantissa; below 2^-14 adding 0.5 leaves the rounded subnormal in the lowest bits."""
    magnitude, sign = _split(builder, value)
    tie = builder.and_(builder.lshr(magnitude, _i32(13)), _i32(1))
    normal = builder.add(builder.add(magnitude, _i32(0xFFF - (112 << 23))), tie)
    half = ir.Constant(_F32, 0.5)
    shifted = builder.bitcast(builder.fadd(builder.bitcast(magnitude, _F32), half), _I32)
    subnormal = builder.sub(shifted, _i32(0x3F000000))
    small = builder.icmp_unsigned("<", magnitude, _i32(0x38800000))
    rounded = builder.select(small, subnormal, builder.lshr(normal, _i32(13)))
    return _finish(builder, magnitude, rounded, sign, 0x7BFF)


def _from_bf16(builder: Any, value: Any) -> Any:
    return builder.bitcast(builder.shl(builder.zext(value, _I32), _i32(16)), _F32)


def _to_bf16_bounded(builder: Any, value: Any) -> Any:
    """The same for values known to stay finite: half the instructions. The carry cannot reach the sign."""
    bits = builder.bitcast(value, _I32)
    tie = builder.and_(builder.lshr(bits, _i32(16)), _i32(1))
    return builder.trunc(builder.lshr(builder.add(builder.add(bits, _i32(0x7FFF)), tie), _i32(16)), _I16)


def _upper_half(builder: Any, value: Any) -> Any:
    return builder.trunc(builder.lshr(builder.bitcast(value, _I32), _i32(16)), _I16)


def _from_fp16(builder: Any, value: Any) -> Any:
    """Exponent and mantissa as if they were an f32's, times 2^112: exact, subnormals too. For finite values."""
    wide = builder.zext(value, _I32)
    magnitude = builder.shl(builder.and_(wide, _i32(0x7FFF)), _i32(13))
    scaled = builder.fmul(builder.bitcast(magnitude, _F32), ir.Constant(_F32, 2.0**112))
    sign = builder.shl(builder.and_(wide, _i32(0x8000)), _i32(16))
    return builder.bitcast(builder.or_(builder.bitcast(scaled, _I32), sign), _F32)


bf16_of = _unary(types.float32, types.uint16, _to_bf16)
bf16_of_bounded = _unary(types.float32, types.uint16, _to_bf16_bounded)
fp16_of = _unary(types.float32, types.uint16, _to_fp16)
upper_half_of = _unary(types.float32, types.uint16, _upper_half)
f32_of_bf16 = _unary(types.uint16, types.float32, _from_bf16)
f32_of_fp16 = _unary(types.uint16, types.float32, _from_fp16)


def _refined(_context: Any, _symbol: Any, _digit: Any, _factor: Any, _bias: Any) -> Any:
    """f32(symbol * factor + 2 * digit - bias), in 16-bit integers, which hold it for every radix up to 32."""

    def generate(_cg: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        symbol, digit = (builder.zext(part, _I16) for part in arguments[:2])
        doubled = builder.shl(digit, ir.Constant(_I16, 1))
        index = builder.sub(builder.add(builder.mul(symbol, arguments[2]), doubled), arguments[3])
        return builder.sitofp(index, _F32)

    return types.float32(types.uint8, types.uint8, types.int16, types.int16), generate


refined_index: Any = intrinsic(_refined)


def _code(_context: Any, _entry: Any, _value: Any) -> Any:
    """The code of a value by its entry of `FixedTables.bucket_cells`."""

    def generate(_cg: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        entry, half = arguments[0], _i32(0xFFFF)
        lower = builder.and_(builder.bitcast(arguments[1], _I32), half)
        reached = builder.icmp_unsigned(">=", lower, builder.and_(entry, half))
        code = builder.select(reached, builder.lshr(entry, _i32(24)), builder.lshr(entry, _i32(16)))
        return builder.trunc(code, ir.IntType(8))

    return types.uint8(types.uint32, types.float32), generate


code_of: Any = intrinsic(_code)


def _wide(_context: Any) -> Any:
    def generate(context: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
        # llvmlite's set of attributes only knows plain words; it prints whatever is in it.
        set.add(builder.function.attributes, '"prefer-vector-width"="512"')
        return context.get_dummy_value()

    return types.void(), generate


wide_vectors: Any = intrinsic(_wide)
"""Called in a kernel: let LLVM use 512-bit vectors where there are any, which it avoids by itself. A quarter faster."""

BF16, FP16, FP32, BF16_IN_F32, FP16_IN_F32, BF16_BOUNDED = 0, 1, 2, 3, 4, 5
"""What a row holds: 16-bit floats (u16 array), f32, or f32 rounded to a 16-bit float and widened again (f32 array).
BOUNDED says that no value is anywhere near overflow."""


def load_rows(
    x: Any, at: int, head_stride: int, token_stride: int, heads: int, dim: int, values: Any, kind: int
) -> None:
    """Rows of x, whose u16 or f32 elements `kind` describes, to f32 values [tokens, heads, dim rounded up to 8].

    The padding of `values` is left as it is.
    """
    raise NotImplementedError("compiled code only")


@overload(load_rows)
def _load_rows(
    x: Any, at: Any, head_stride: Any, token_stride: Any, heads: Any, dim: Any, values: Any, kind: Any
) -> Any:
    def from_16(
        x: Any, at: Any, head_stride: Any, token_stride: Any, heads: Any, dim: Any, values: Any, kind: Any
    ) -> Any:
        padded = -(-dim // 8) * 8
        for i in range(len(values) // padded):
            start = at + i % heads * head_stride + i // heads * token_stride
            row = x[start : start + dim]
            v = values[i * padded : i * padded + dim]
            if kind == BF16:
                for d in range(dim):
                    v[d] = f32_of_bf16(row[d])
            else:
                for d in range(dim):
                    v[d] = f32_of_fp16(row[d])

    def from_32(
        x: Any, at: Any, head_stride: Any, token_stride: Any, heads: Any, dim: Any, values: Any, kind: Any
    ) -> Any:
        padded = -(-dim // 8) * 8
        for i in range(len(values) // padded):
            start = at + i % heads * head_stride + i // heads * token_stride
            row = x[start : start + dim]
            v = values[i * padded : i * padded + dim]
            for d in range(dim):
                v[d] = row[d]

    return from_16 if x.dtype == types.uint16 else from_32
