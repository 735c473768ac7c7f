"""Sixteen values side by side, which kernels handle as one: f32, f64, or integers of 8, 16 or 32 bits.

LLVM makes vectors of loops by itself, but rows are 64 to 256 values long here, and what it puts around such a loop
(checks that arrays do not overlap, a rest of scalars) takes longer than the loop. These are LLVM's own vectors: every
operation is one instruction on registers of 512 bits, two on 256, four on 128, on any processor, and rounds by itself.

Where a row ends within sixteen values, those beyond are garbage that never gets out: `load` reads and `store` writes no
more than `count` of them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.core.imputils import lower_builtin
from numba.core.typing.templates import AbstractTemplate, infer_global
from numba.extending import intrinsic, models, register_model

LANES = 16

_I1, _I32, _I64 = ir.IntType(1), ir.IntType(32), ir.IntType(64)
_SCALARS = {
    types.float32: ir.FloatType(),
    types.float64: ir.DoubleType(),
    types.uint8: ir.IntType(8),
    types.uint16: ir.IntType(16),
    types.int32: _I32,
    types.uint32: _I32,
}


class Lanes(types.Type):
    """numba's type of `LANES` values of the type `element`."""

    def __init__(self, element: Any) -> None:
        self.element = element
        super().__init__(name=f"Lanes({element})")


@register_model(Lanes)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Lanes) -> None:
        super().__init__(manager, kind, ir.VectorType(_SCALARS[kind.element], LANES))  # type: ignore[no-untyped-call]


def constant(kind: Any, value: float) -> ir.Constant:
    """`value` in the LLVM type `kind`, in all lanes of a vector."""
    return ir.Constant(kind, [value] * kind.count if isinstance(kind, ir.VectorType) else value)


def shaped(scalar: Any, like: Any) -> Any:
    """The LLVM type `scalar`, or a vector of as many as the type `like` has."""
    return ir.VectorType(scalar, like.count) if isinstance(like, ir.VectorType) else scalar


def pointer(context: Any, builder: Any, kind: Any, array: Any, index: Any) -> Any:
    """To element `index` of a contiguous array of numba's type `kind`."""
    return builder.gep(context.make_array(kind)(context, builder, array).data, [index])


def _spread(builder: Any, scalar: Any) -> Any:
    vector = ir.VectorType(scalar.type, LANES)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, ir.Constant(_I32, 0))
    zeros = ir.Constant(ir.VectorType(_I32, LANES), [0] * LANES)
    return builder.shuffle_vector(first, ir.Constant(vector, ir.Undefined), zeros)


def _first(builder: Any, count: Any) -> Any:
    """A mask of the lanes below `count`."""
    numbers = ir.Constant(ir.VectorType(_I32, LANES), list(range(LANES)))
    return builder.icmp_signed("<", numbers, _spread(builder, builder.trunc(count, _I32)))


def _unknown(builder: Any, value: Any) -> Any:
    """`value`, an integer, of which LLVM is to know nothing: where it knows that one narrowed lane is stored, LLVM 20
    writes four bytes for two, and where it knows that a word is lanes of a vector, it takes them out one by one.
    """
    return builder.asm(ir.FunctionType(value.type, [value.type]), "", "=r,0", [value], False)


def _suffix(vector: Any) -> str:
    name = {"float": "f32", "double": "f64"}.get(str(vector.element)) or str(vector.element)
    return f"v{LANES}{name}"


def _is_float(vector: Any) -> bool:
    return isinstance(vector.element, ir.FloatType | ir.DoubleType)


def _load(_context: Any, array: Any, _index: Any, _count: Any) -> Any:
    """Lanes of array[index : index + count]; those from `count` on are zero."""
    kind = Lanes(array.dtype)

    def generate(context: Any, builder: Any, sig: Any, arguments: Any) -> Any:
        vector, size = ir.VectorType(_SCALARS[array.dtype], LANES), array.dtype.bitwidth // 8
        place = builder.bitcast(pointer(context, builder, sig.args[0], *arguments[:2]), vector.as_pointer())
        count = arguments[2]
        whole = builder.icmp_signed(">=", count, ir.Constant(count.type, LANES))
        with builder.if_else(whole) as (then, otherwise):
            with then:
                all_of_it, from_all = builder.load(place, align=size), builder.block
            with otherwise:
                mask, zero = _first(builder, count), constant(vector, 0)
                function = _function(
                    builder, f"llvm.masked.load.{_suffix(vector)}.p0", vector, [place.type, _I32, mask.type, vector]
                )
                some, from_some = builder.call(function, [place, ir.Constant(_I32, size), mask, zero]), builder.block
        loaded = builder.phi(vector)
        loaded.add_incoming(all_of_it, from_all)
        loaded.add_incoming(some, from_some)
        return loaded

    return kind(array, types.intp, types.intp), generate


def _store(_context: Any, array: Any, _index: Any, value: Any, _count: Any) -> Any:
    """Lanes to array[index : index + count]."""

    def generate(context: Any, builder: Any, sig: Any, arguments: Any) -> Any:
        value, count, size = arguments[2], arguments[3], array.dtype.bitwidth // 8
        place = builder.bitcast(pointer(context, builder, sig.args[0], *arguments[:2]), value.type.as_pointer())
        whole = builder.icmp_signed(">=", count, ir.Constant(count.type, LANES))
        with builder.if_else(whole) as (then, otherwise):
            with then:
                builder.store(value, place, align=size)
            with otherwise:
                mask = _first(builder, _unknown(builder, count))
                name = f"llvm.masked.store.{_suffix(value.type)}.p0"
                function = _function(builder, name, ir.VoidType(), [value.type, place.type, _I32, mask.type])
                builder.call(function, [value, place, ir.Constant(_I32, size), mask])
        return context.get_dummy_value()

    return types.void(array, types.intp, value, types.intp), generate


def _function(builder: Any, name: str, result: Any, arguments: list[Any]) -> Any:
    return cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, arguments), name)  # type: ignore[no-untyped-call]


load: Any = intrinsic(_load)
store: Any = intrinsic(_store)


def _all_lanes(_context: Any, scalar: Any) -> Any:
    def generate(_cg: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return _spread(builder, arguments[0])

    return Lanes(scalar)(scalar), generate


spread: Any = intrinsic(_all_lanes)
"""A scalar in all lanes."""


def _operator(symbol: Any, build: Callable[[Any, Any, Any], Any]) -> None:
    """Give lanes of one type an operator of Python's."""

    @infer_global(symbol)  # type: ignore[no-untyped-call]
    class _Typed(AbstractTemplate):
        def generic(self, arguments: Any, _keywords: Any) -> Any:
            if len(arguments) == 2 and isinstance(arguments[0], Lanes) and arguments[0] == arguments[1]:
                return arguments[0](*arguments)
            return None

    def lowered(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return build(builder, *arguments)

    lower: Any = lower_builtin
    lower(symbol, Lanes, Lanes)(lowered)


def _by_kind(integers: str, floats: str) -> Callable[[Any, Any, Any], Any]:
    def build(builder: Any, a: Any, b: Any) -> Any:
        return getattr(builder, floats if _is_float(a.type) else integers)(a, b)

    return build


_operator(operator.add, _by_kind("add", "fadd"))
_operator(operator.sub, _by_kind("sub", "fsub"))
_operator(operator.mul, _by_kind("mul", "fmul"))
_operator(operator.truediv, _by_kind("", "fdiv"))
_operator(operator.and_, _by_kind("and_", ""))
_operator(operator.or_, _by_kind("or_", ""))
_operator(operator.lshift, _by_kind("shl", ""))
_operator(operator.rshift, _by_kind("lshr", ""))


def _lanewise(build: Callable[[Any, Any], Any], result: Any = None) -> Any:
    """An intrinsic on lanes that `build(builder, vector)` writes; what it gives are lanes of `result`, if not of the
    same type.
    """

    def typed(_context: Any, a: Any) -> Any:
        def generate(_cg: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            return build(builder, arguments[0])

        return (a if result is None else Lanes(result))(a), generate

    return intrinsic(typed)


def _pairwise(build: Callable[[Any, Any, Any], Any], result: Any = None) -> Any:
    """The same of two vectors."""

    def typed(_context: Any, a: Any, b: Any) -> Any:
        def generate(_cg: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            return build(builder, *arguments)

        return (a if result is None else Lanes(result))(a, b), generate

    return intrinsic(typed)


def _extreme(order: str) -> Callable[..., Any]:
    def build(builder: Any, a: Any, b: Any) -> Any:
        compare = builder.fcmp_ordered if _is_float(a.type) else builder.icmp_unsigned
        return builder.select(compare(order, a, b), a, b)

    return build


def _magnitude(builder: Any, a: Any) -> Any:
    bits = builder.bitcast(a, shaped(_I32, a.type))
    return builder.bitcast(builder.and_(bits, constant(bits.type, 0x7FFFFFFF)), a.type)


def _where_positive(builder: Any, a: Any, b: Any) -> Any:
    zero = constant(a.type, 0.0)
    return builder.select(builder.fcmp_ordered(">", b, zero), a, zero)


def _rounding(name: str) -> Callable[[Any, Any], Any]:
    def build(builder: Any, a: Any) -> Any:
        return builder.call(_function(builder, f"llvm.{name}.{_suffix(a.type)}", a.type, [a.type]), [a])

    return build


def _count_below(builder: Any, a: Any, b: Any) -> Any:
    return builder.zext(builder.fcmp_ordered("<", a, b), shaped(_I32, a.type))


def _f32_of_u8(builder: Any, a: Any) -> Any:
    return builder.uitofp(a, shaped(ir.FloatType(), a.type))


def _f32_of_i8(builder: Any, a: Any) -> Any:
    return builder.sitofp(a, shaped(ir.FloatType(), a.type))


def _f64_of_f32(builder: Any, a: Any) -> Any:
    return builder.fpext(a, shaped(ir.DoubleType(), a.type))


def _f32_of_f64(builder: Any, a: Any) -> Any:
    return builder.fptrunc(a, shaped(ir.FloatType(), a.type))


def _u32_of_f32(builder: Any, a: Any) -> Any:
    return builder.fptosi(a, shaped(_I32, a.type))


def _u8_of_u32(builder: Any, a: Any) -> Any:
    return builder.trunc(a, shaped(ir.IntType(8), a.type))


maximum: Any = _pairwise(_extreme(">"))
minimum: Any = _pairwise(_extreme("<"))
magnitude: Any = _lanewise(_magnitude)
where_positive: Any = _pairwise(_where_positive)
"""a where b is above zero, elsewhere zero."""
floor: Any = _lanewise(_rounding("floor"))
rint: Any = _lanewise(_rounding("rint"))
"""To the nearest integer, ties to even."""
is_below: Any = _pairwise(_count_below, types.uint32)
"""1 where a < b, elsewhere 0."""
f32_of_u8: Any = _lanewise(_f32_of_u8, types.float32)
f32_of_i8: Any = _lanewise(_f32_of_i8, types.float32)
"""Of bytes that are to be read as signed."""
f64_of_f32: Any = _lanewise(_f64_of_f32, types.float64)
f32_of_f64: Any = _lanewise(_f32_of_f64, types.float32)
u32_of_f32: Any = _lanewise(_u32_of_f32, types.uint32)
u8_of_u32: Any = _lanewise(_u8_of_u32, types.uint8)


def _permute(_context: Any, entries: Any, numbers: Any) -> Any:
    """entries[numbers] for numbers below `LANES`, f32.

    LLVM makes it one permutation of a register where one holds all entries, and value by value it is five times as
    slow. A processor with AVX2 alone permutes half of them at a time, which it has to be told.
    """

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        _, _, features = context.codegen().magic_tuple()
        if "+avx2" in features.split(",") and "+avx512f" not in features.split(","):
            return _permute_halves(builder, *arguments)
        entries, wide = arguments[0], builder.zext(arguments[1], shaped(_I32, arguments[1].type))
        out = ir.Constant(entries.type, ir.Undefined)
        for lane in range(LANES):
            number = ir.Constant(_I32, lane)
            found = builder.extract_element(entries, builder.extract_element(wide, number))
            out = builder.insert_element(out, found, number)
        return out

    return entries(entries, numbers), generate


def _permute_halves(builder: Any, entries: Any, numbers: Any) -> Any:
    wide = builder.zext(numbers, shaped(_I32, numbers.type))
    floats, integers = ir.VectorType(ir.FloatType(), LANES // 2), ir.VectorType(_I32, LANES // 2)
    permute = _function(builder, "llvm.x86.avx2.permps", floats, [floats, integers])

    def lanes(vector: Any, first: int, count: int) -> Any:
        numbers = list(range(first, first + count))
        return builder.shuffle_vector(vector, vector, ir.Constant(ir.VectorType(_I32, count), numbers))

    lower, upper = lanes(entries, 0, LANES // 2), lanes(entries, LANES // 2, LANES // 2)
    found = []
    for first in (0, LANES // 2):
        own = lanes(wide, first, LANES // 2)
        is_lower = builder.icmp_unsigned("<", own, constant(integers, LANES // 2))
        low, high = builder.call(permute, [lower, own]), builder.call(permute, [upper, own])
        found.append(builder.select(is_lower, low, high))
    both = ir.Constant(ir.VectorType(_I32, LANES), list(range(LANES)))
    return builder.shuffle_vector(*found, both)


permuted: Any = intrinsic(_permute)


def _gather(_context: Any, array: Any, numbers: Any) -> Any:
    """array[numbers], value by value: no processor here gathers faster.

    Numbers leave the vector several to a word of 64 bits, which is then shifted: two thirds of the time that leaving it
    one by one takes.
    """
    bits, element = numbers.element.bitwidth, _SCALARS[array.dtype]
    in_word = 64 // bits

    def generate(context: Any, builder: Any, sig: Any, arguments: Any) -> Any:
        words = builder.bitcast(arguments[1], ir.VectorType(_I64, LANES // in_word))
        out = ir.Constant(ir.VectorType(element, LANES), ir.Undefined)
        for lane in range(LANES):
            if lane % in_word == 0:
                word = _unknown(builder, builder.extract_element(words, ir.Constant(_I32, lane // in_word)))
            number = builder.lshr(word, ir.Constant(_I64, lane % in_word * bits))
            number = builder.and_(number, ir.Constant(_I64, (1 << bits) - 1))
            found = builder.load(pointer(context, builder, sig.args[0], arguments[0], number))
            out = builder.insert_element(out, found, ir.Constant(_I32, lane))
        return out

    return Lanes(array.dtype)(array, numbers), generate


gathered: Any = intrinsic(_gather)


def _fold(order: str) -> Any:
    def typed(_context: Any, kind: Any) -> Any:
        def generate(_cg: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            value, left = arguments[0], LANES
            while left > 1:
                left //= 2
                lanes = [lane + left if lane < left else lane for lane in range(LANES)]
                moved = builder.shuffle_vector(value, value, ir.Constant(ir.VectorType(_I32, LANES), lanes))
                value = _extreme(order)(builder, value, moved)
            return builder.extract_element(value, ir.Constant(_I32, 0))

        return kind.element(kind), generate

    return intrinsic(typed)


def _within(_context: Any, value: Any, _count: Any, _other: Any) -> Any:
    """The first `count` lanes of `value`, then those of `other`."""

    def generate(_cg: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        value, count, other = arguments
        return builder.select(_first(builder, count), value, other)

    return value(value, types.intp, value), generate


within: Any = intrinsic(_within)
largest: Any = _fold(">")
smallest: Any = _fold("<")
