"""Bytes turned between channel-major segments and token-major tiles.

Sixteen rows of sixteen bytes are sixteen vectors. Interleaving row k with row k + 8, bytes of one with bytes of the
other, moves the upper bit of a byte's row number to the end of its column number and makes room for the upper bit of
the column; after four such rounds rows and columns have changed places.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from lynxkv.kernels.cpu.bits import helper
from lynxkv.kernels.cpu.lanes import pointer

SIDE = 16
_LINE_BYTES = 64

_VECTOR, _I32, _I64 = ir.VectorType(ir.IntType(8), SIDE), ir.IntType(32), ir.IntType(64)


def _pick(lanes: list[int]) -> ir.Constant:
    return ir.Constant(ir.VectorType(_I32, SIDE), lanes)


_LOWER = _pick([lane // 2 + lane % 2 * SIDE for lane in range(SIDE)])
_UPPER = _pick([lane // 2 + lane % 2 * SIDE + SIDE // 2 for lane in range(SIDE)])


def _turn(builder: Any, sources: list[Any], targets: list[Any]) -> None:
    """Byte k of source row i to byte i of target row k."""
    rows = []
    for source in sources:
        rows.append(builder.load(builder.bitcast(source, _VECTOR.as_pointer())))
        rows[-1].align = 1
    for _ in range(4):
        pairs = list(zip(rows[: SIDE // 2], rows[SIDE // 2 :], strict=True))
        rows = [builder.shuffle_vector(*pair, half) for pair in pairs for half in (_LOWER, _UPPER)]
    for row, target in zip(rows, targets, strict=True):
        builder.store(row, builder.bitcast(target, _VECTOR.as_pointer())).align = 1


def _scattered(context: Any, builder: Any, kinds: Any, data: Any, rows: Any, d: Any, stride: Any, at: Any) -> list[Any]:
    """Pointers to data[rows[d + k] * stride + at]."""
    out = []
    for k in range(SIDE):
        place = pointer(context, builder, kinds[1], rows, builder.add(d, ir.Constant(_I64, k)))
        row = builder.load(place)
        out.append(pointer(context, builder, kinds[0], data, builder.add(builder.mul(row, stride), at)))
    return out


def _stepped(context: Any, builder: Any, kind: Any, data: Any, at: Any, step: Any) -> list[Any]:
    """Pointers to data[at + k * step]."""
    return [
        pointer(context, builder, kind, data, builder.add(at, builder.mul(step, ir.Constant(_I64, k))))
        for k in range(SIDE)
    ]


def _into_tile(
    _context: Any, data: Any, rows: Any, _d: Any, _stride: Any, _at: Any, tile: Any, _to: Any, _step: Any
) -> Any:
    """data[rows[d + k] * stride + at + i] to tile[to + i * step + k], for i and k below 16."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        bytes_in, own_rows, d, stride, at, bytes_out, to, step = arguments
        sources = _scattered(context, builder, signature.args[:2], bytes_in, own_rows, d, stride, at)
        _turn(builder, sources, _stepped(context, builder, signature.args[5], bytes_out, to, step))
        return context.get_dummy_value()

    size = types.intp
    return types.void(data, rows, size, size, size, tile, size, size), generate


def _from_tile(
    _context: Any, tile: Any, _at: Any, _step: Any, data: Any, rows: Any, _d: Any, _stride: Any, _to: Any
) -> Any:
    """The way back."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        bytes_in, at, step, bytes_out, own_rows, d, stride, to = arguments
        targets = _scattered(context, builder, signature.args[3:5], bytes_out, own_rows, d, stride, to)
        _turn(builder, _stepped(context, builder, signature.args[0], bytes_in, at, step), targets)
        return context.get_dummy_value()

    size = types.intp
    return types.void(tile, size, size, data, rows, size, size, size), generate


def _ahead(_context: Any, data: Any, _index: Any) -> Any:
    """Start to bring data[index] into the caches; it need not lie in the array."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = pointer(context, builder, signature.args[0], *arguments)
        place = builder.bitcast(place, ir.IntType(8).as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [place.type, _I32, _I32, _I32])
        function: Any = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")  # type: ignore[no-untyped-call]
        # To be read, kept in every cache, data.
        builder.call(function, [place, ir.Constant(_I32, 0), ir.Constant(_I32, 3), ir.Constant(_I32, 1)])
        return context.get_dummy_value()

    return types.void(data, types.intp), generate


_turn_into_tile: Any = intrinsic(_into_tile)
_turn_from_tile: Any = intrinsic(_from_tile)
_prefetch: Any = intrinsic(_ahead)


@helper
def rows_to_tile(data: Any, rows: Any, stride: int, first: int, count: int, tile: Any, padded: int) -> None:
    """Bytes [first, first + count) of `rows`, `stride` bytes of `data` each, to the columns of tile [count, padded].

    The next tile's bytes are asked for on the way: rows lie far apart, and no processor guesses that they come next.
    """
    dim = len(rows)
    whole, whole_dim = count // SIDE * SIDE, dim // SIDE * SIDE
    for d in range(0, whole_dim, SIDE):
        for e in range(d, d + SIDE):
            for line in range(first + count, first + 2 * count, _LINE_BYTES):
                _prefetch(data, rows[e] * stride + line)
        for i in range(0, whole, SIDE):
            _turn_into_tile(data, rows, d, stride, first + i, tile, i * padded + d, padded)
        for e in range(d, d + SIDE):
            for i in range(whole, count):
                tile[i * padded + e] = data[rows[e] * stride + first + i]
    for d in range(whole_dim, dim):
        for i in range(count):
            tile[i * padded + d] = data[rows[d] * stride + first + i]


@helper
def tile_to_rows(tile: Any, padded: int, data: Any, rows: Any, stride: int, first: int, count: int) -> None:
    """The way back."""
    dim = len(rows)
    whole, whole_dim = count // SIDE * SIDE, dim // SIDE * SIDE
    for d in range(0, whole_dim, SIDE):
        for i in range(0, whole, SIDE):
            _turn_from_tile(tile, i * padded + d, padded, data, rows, d, stride, first + i)
        for e in range(d, d + SIDE):
            for i in range(whole, count):
                data[rows[e] * stride + first + i] = tile[i * padded + e]
    for d in range(whole_dim, dim):
        for i in range(count):
            data[rows[d] * stride + first + i] = tile[i * padded + d]
