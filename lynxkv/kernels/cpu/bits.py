"""numba with this project's settings, and exact conversions between f32 and 16-bit floats (SPEC 8.5).

The conversions, of a value or of lanes, are written in LLVM's integers: numba itself widens every small integer to 64
bits, which would cost the vector units most of their width. Every multiply and add of the kernels stays a rounding of
its own: no fastmath, and LLVM fuses nothing that was not asked for.
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

from lynxkv.kernels.cpu.lanes import LANES, Lanes, constant, load, shaped, store
from lynxkv.packing import SYMBOL_ESCAPE, SYMBOL_ZERO

F = TypeVar("F", bound=Callable[..., Any])

_I16, _I32, _F32 = ir.IntType(16), ir.IntType(32), ir.FloatType()


_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": False, "boundscheck": False}
_INNER: dict[str, Any] = {**_OPTIONS, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
_INLINED: Any = {**_INNER, "forceinline": True}


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


def inlined(function: F) -> F:
    """A helper that becomes part of its caller: for a few lanes, handing over arrays would cost more than the work."""
    return cast(F, numba.njit(**_INLINED)(function))


def _unary(source: Any, result: Any, build: Callable[[Any, Any], Any]) -> Any:
    """An intrinsic source -> result, of a value or of lanes, that `build(builder, value)` writes."""

    def typed(_context: Any, value: Any) -> Any:
        def generate(_cg: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            return build(builder, arguments[0])

        return (Lanes(result)(Lanes(source)) if isinstance(value, Lanes) else result(source)), generate

    return intrinsic(typed)


def _as(kind: Any, builder: Any, value: Any) -> Any:
    """The same bits as `kind`."""
    return builder.bitcast(value, shaped(kind, value.type))


def _upper(builder: Any, bits: Any) -> Any:
    """The upper half of 32 bits, as 16."""
    return builder.trunc(builder.lshr(bits, constant(bits.type, 16)), shaped(_I16, bits.type))


def _split(builder: Any, value: Any) -> tuple[Any, Any]:
    """Magnitude bits and the sign moved to bit 15, both i32."""
    bits = _as(_I32, builder, value)
    sign = builder.and_(builder.lshr(bits, constant(bits.type, 16)), constant(bits.type, 0x8000))
    return builder.and_(bits, constant(bits.type, 0x7FFFFFFF)), sign


def _finish(builder: Any, magnitude: Any, rounded: Any, sign: Any, largest: int) -> Any:
    """Saturate at the largest finite value, put the sign back, NaN to +0."""
    kind = rounded.type
    over = builder.icmp_unsigned(">", rounded, constant(kind, largest))
    rounded = builder.or_(builder.select(over, constant(kind, largest), rounded), sign)
    nan = builder.icmp_unsigned(">", magnitude, constant(kind, 0x7F800000))
    return builder.trunc(builder.select(nan, constant(kind, 0), rounded), shaped(_I16, kind))


def _nearest_bf16(builder: Any, bits: Any) -> Any:
    """m + 0x7FFF + the lowest bit kept; then the upper half is m to nearest, ties to even."""
    tie = builder.and_(builder.lshr(bits, constant(bits.type, 16)), constant(bits.type, 1))
    return builder.add(builder.add(bits, constant(bits.type, 0x7FFF)), tie)


def _to_bf16(builder: Any, value: Any) -> Any:
    magnitude, sign = _split(builder, value)
    rounded = builder.lshr(_nearest_bf16(builder, magnitude), constant(magnitude.type, 16))
    return _finish(builder, magnitude, rounded, sign, 0x7F7F)


def _to_fp16(builder: Any, value: Any) -> Any:
    """The same with 10 bits of mantissa; below 2^-14 adding 0.5 leaves the rounded subnormal in the lowest bits."""
    magnitude, sign = _split(builder, value)
    kind = magnitude.type
    tie = builder.and_(builder.lshr(magnitude, constant(kind, 13)), constant(kind, 1))
    normal = builder.add(builder.add(magnitude, constant(kind, 0xFFF - (112 << 23))), tie)
    half = builder.fadd(_as(_F32, builder, magnitude), constant(value.type, 0.5))
    subnormal = builder.sub(_as(_I32, builder, half), constant(kind, 0x3F000000))
    small = builder.icmp_unsigned("<", magnitude, constant(kind, 0x38800000))
    rounded = builder.select(small, subnormal, builder.lshr(normal, constant(kind, 13)))
    return _finish(builder, magnitude, rounded, sign, 0x7BFF)


def _from_bf16(builder: Any, value: Any) -> Any:
    bits = builder.zext(value, shaped(_I32, value.type))
    return _as(_F32, builder, builder.shl(bits, constant(bits.type, 16)))


def _to_bf16_bounded(builder: Any, value: Any) -> Any:
    """The same for values known to stay finite: half the instructions. The carry cannot reach the sign."""
    return _upper(builder, _nearest_bf16(builder, _as(_I32, builder, value)))


def _upper_half(builder: Any, value: Any) -> Any:
    return _upper(builder, _as(_I32, builder, value))


def _from_fp16(builder: Any, value: Any) -> Any:
    """Exponent and mantissa as if they were an f32's, times 2^112: exact, subnormals too. For finite values."""
    wide = builder.zext(value, shaped(_I32, value.type))
    kind = wide.type
    magnitude = builder.shl(builder.and_(wide, constant(kind, 0x7FFF)), constant(kind, 13))
    widened = _as(_F32, builder, magnitude)
    scaled = builder.fmul(widened, constant(widened.type, 2.0**112))
    sign = builder.shl(builder.and_(wide, constant(kind, 0x8000)), constant(kind, 16))
    return _as(_F32, builder, builder.or_(_as(_I32, builder, scaled), sign))


bf16_of = _unary(types.float32, types.uint16, _to_bf16)
bf16_of_bounded = _unary(types.float32, types.uint16, _to_bf16_bounded)
fp16_of = _unary(types.float32, types.uint16, _to_fp16)
upper_half_of = _unary(types.float32, types.uint16, _upper_half)
f32_of_bf16 = _unary(types.uint16, types.float32, _from_bf16)
f32_of_fp16 = _unary(types.uint16, types.float32, _from_fp16)


def _refined(_context: Any, symbol: Any, _digit: Any, _factor: Any, _bias: Any) -> Any:
    """Lanes of f32(symbol * factor + 2 * digit - bias), in 16-bit integers, which hold it for every radix up to 32."""

    def generate(_cg: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        kind = shaped(_I16, arguments[0].type)
        symbol, digit = (builder.zext(part, kind) for part in arguments[:2])
        doubled = builder.shl(digit, constant(kind, 1))
        index = builder.sub(builder.add(builder.mul(symbol, arguments[2]), doubled), arguments[3])
        return builder.sitofp(index, shaped(_F32, kind))

    return Lanes(types.float32)(symbol, symbol, Lanes(types.uint16), Lanes(types.uint16)), generate


refined_index: Any = intrinsic(_refined)


def _symbol(builder: Any, index: Any) -> Any:
    """index + 127, or the escape beyond."""
    magnitude = _as(_F32, builder, _split(builder, index)[0])
    fits = builder.fcmp_ordered("<=", magnitude, constant(index.type, float(SYMBOL_ZERO)))
    shifted = builder.fadd(index, constant(index.type, float(SYMBOL_ZERO)))
    symbol = builder.select(fits, shifted, constant(index.type, float(SYMBOL_ESCAPE)))
    return builder.trunc(builder.fptosi(symbol, shaped(_I32, index.type)), shaped(ir.IntType(8), index.type))


symbol_of = _unary(types.float32, types.uint8, _symbol)


def _code(_context: Any, entry: Any, value: Any) -> Any:
    """Codes of lanes of values by their entries of `FixedTables.bucket_cells`."""

    def generate(_cg: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        entry, kind = arguments[0], arguments[0].type
        half = constant(kind, 0xFFFF)
        lower = builder.and_(_as(_I32, builder, arguments[1]), half)
        reached = builder.icmp_unsigned(">=", lower, builder.and_(entry, half))
        code = builder.select(reached, builder.lshr(entry, constant(kind, 24)), builder.lshr(entry, constant(kind, 16)))
        return builder.trunc(code, shaped(ir.IntType(8), kind))

    return Lanes(types.uint8)(entry, value), generate


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


def widened(x: Any, at: int, count: int, kind: int) -> Any:
    """Lanes of x[at : at + count], u16 or f32 elements that `kind` describes, as f32."""
    raise NotImplementedError("compiled code only")


@overload(widened, jit_options=_INLINED)
def _widened(x: Any, at: Any, count: Any, kind: Any) -> Any:
    def from_16(x: Any, at: Any, count: Any, kind: Any) -> Any:
        lanes = load(x, at, count)
        return f32_of_bf16(lanes) if kind == BF16 else f32_of_fp16(lanes)

    def from_32(x: Any, at: Any, count: Any, kind: Any) -> Any:
        return load(x, at, count)

    return from_16 if x.dtype == types.uint16 else from_32


@helper
def load_rows(
    x: Any, at: int, head_stride: int, token_stride: int, heads: int, dim: int, values: Any, kind: int
) -> None:
    """Rows of x, whose u16 or f32 elements `kind` describes, to f32 values [tokens, heads, dim rounded up to 8].

    The padding of `values` is left as it is.
    """
    wide_vectors()
    padded = -(-dim // 8) * 8
    for i in range(len(values) // padded):
        start = at + i % heads * head_stride + i // heads * token_stride
        for d in range(0, dim, LANES):
            store(values, i * padded + d, widened(x, start + d, dim - d, kind), dim - d)


def put(out: Any, at: int, value: Any, count: int, kind: int) -> None:
    """Store `count` lanes of f32, rounded, from out[at] on: a u16 or f32 array whose elements `kind` describes."""
    raise NotImplementedError("compiled code only")


@overload(put, jit_options=_INLINED)
def _put(out: Any, at: Any, value: Any, count: Any, kind: Any) -> Any:
    def into_16(out: Any, at: Any, value: Any, count: Any, kind: Any) -> None:
        if kind == BF16_BOUNDED:
            store(out, at, bf16_of_bounded(value), count)
        elif kind == BF16:
            store(out, at, bf16_of(value), count)
        else:
            store(out, at, fp16_of(value), count)

    def into_32(out: Any, at: Any, value: Any, count: Any, kind: Any) -> None:
        if kind == BF16_IN_F32:
            store(out, at, f32_of_bf16(bf16_of(value)), count)
        elif kind == FP16_IN_F32:
            store(out, at, f32_of_fp16(fp16_of(value)), count)
        else:
            store(out, at, value, count)

    return into_16 if out.dtype == types.uint16 else into_32
