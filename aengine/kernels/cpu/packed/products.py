"""Products of activations with packed matrices, see layouts.py: x @ weight.T, and what comes after it.

A chunk is some tiles of output features times up to `ROWS_OF_CHUNK` rows of activations. Eight rows are multiplied by a
tile at once, whose weights are unpacked once for them, then 4, 2 and 1 of what is left. Sums have the same order in
each of these: a row's result does not depend on the rows beside it. With AMX, tiles multiply most of many rows, see
tiles.py.

Kernels are named "product", the weights' kind, what activations are, and what becomes of the product:

    planes    activations are codes of `quantise`, multiplied as integers within a block; blocks are added in order
    int16     the same of `quantise_int16`, with weights that are such codes, too
    float32   weights become float32 as they are read; products of even columns are one sum, those of odd ones another

    store     out = product + bias
    add       out += scale * (product + bias)
    silu, gelu, gelu_tanh
              out = activation(gate) * up, of a matrix whose first half of rows are the gate's
    silu_alone, ...
              out = activation(product + bias)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import get_args

from ...activation import Activation
from ..compiler.emit import BF16, F16, F32, I32, I64, POINTER, Function, Value
from ..compiler.target import Target, WriteKernel
from .blocks import blocks, read_scales
from .layouts import BLOCK, INT16_BLOCK_BYTES, LAYOUTS, NUMBERS, ROWS, Layout, add_pairs, dot, unpacked
from .tiles import ROWS_OF_CHUNK, divided

_FLOATS = F32 * ROWS
_PREFETCHED = 2560  # bytes ahead of what is read
_META = 16  # bytes of the meta of a block
_COLUMNS = 8  # columns of numbers that are read at once

(_X, _META_OF_X, _WEIGHT, _OUT, _STRIDE, _BIAS, _SCALE, _FEATURES, _SIZE, _TILE_BYTES, _TILES, _OF_CHUNK, _CHUNKS) = (
    range(13)
)
"""Words of a kernel: x; its meta; the packed matrix; out, float32, and how many of them from row to row; bias or none;
scale; output features; input features in blocks, or one by one; bytes of a tile, tiles (of gated ones, of the gate),
tiles of a chunk, chunks of a block of rows."""


@dataclass(frozen=True, slots=True)
class Operands:
    """What some rows are multiplied with: ``size`` blocks, or columns, of a tile."""

    x: Value
    meta: Value
    tile: Value
    size: Value
    rows: Sequence[Value] = ()  # the numbers (int64) of the rows of x, meta


_WriteRows = Callable[[Function, Target, Operands], list[Value]]
"""Writes the product of some rows with a tile: sums [16] of each."""


def _prefetch(f: Function, place: Value, num_bytes: int) -> None:
    for ahead in range(0, num_bytes, 64):
        f.prefetch(place + (_PREFETCHED + ahead))


def _plane_rows(f: Function, target: Target, of: Operands, *, layout: Layout) -> list[Value]:
    sums = [f.variable(_FLOATS, 0.0) for _ in of.rows]
    with blocks(f, layout, of.tile, of.size) as (i, block, head):
        _prefetch(f, block, layout.block_bytes)
        codes = unpacked(f, target, layout, block)
        scales, minima = read_scales(f, layout, block, head)
        part = len(codes) // len(scales)
        for row, total in zip(of.rows, sums, strict=True):
            place = row * of.size + i
            x, meta = of.x + place * (2 * BLOCK), of.meta + place * _META
            own_scale = f.load(F32, meta)
            sums_of_x = [f.load(I32, meta + 8)]
            if len(scales) == 2:
                first = f.load(I32, meta + 12)
                sums_of_x = [first, sums_of_x[0] - first]
            for j, scale in enumerate(scales):
                own_codes = codes[j * part : (j + 1) * part]
                whole = dot(f, target, layout, own_codes, x + 4 * part * j, sums_of_x[j])
                total.set(f.fma(f.float32(whole) * own_scale, scale, total.get()))
            scaled = [f.load(F32, meta + 4)] if len(minima) == 1 else [f.float32(s) * own_scale for s in sums_of_x]
            for minimum, sum_of_x in zip(minima, scaled, strict=False):
                total.set(f.fma(minimum, sum_of_x, total.get()))
    return [total.get() for total in sums]


class _TwoSums:
    """A row's sums: one of even columns, one of odd ones, so that each waits less for the one before."""

    def __init__(self, f: Function) -> None:
        self._f = f
        self._sums = [f.variable(_FLOATS, 0.0) for _ in range(2)]

    def add(self, column: int, weights: Value, x: Value) -> None:
        own = self._sums[column % 2]
        own.set(self._f.fma(weights, self._f.load(F32, x + 4 * column), own.get()))

    def get(self) -> Value:
        return self._sums[0].get() + self._sums[1].get()


def _float32_rows(f: Function, target: Target, of: Operands, *, layout: Layout) -> list[Value]:
    sums = [_TwoSums(f) for _ in of.rows]
    with blocks(f, layout, of.tile, of.size) as (i, block, head):
        _prefetch(f, block, layout.block_bytes)
        scales, minima = read_scales(f, layout, block, head)
        offsets = [scale * float(-layout.zero) for scale in scales]
        if minima:
            offsets = [a + b for a, b in zip(offsets, minima, strict=True)] if layout.zero else minima
        own_x = [of.x + (row * of.size + i) * (4 * BLOCK) for row in of.rows]
        for g, four in enumerate(unpacked(f, target, layout, block)):
            part = g * len(scales) // (BLOCK // 4)
            for j in range(4):
                weights = f.fma(f.float32(four >> 8 * j & 0xFF), scales[part], offsets[part])
                for total, x in zip(sums, own_x, strict=True):
                    total.add(4 * g + j, weights, x)
    return [total.get() for total in sums]


def _int16_rows(f: Function, target: Target, of: Operands) -> list[Value]:
    sums = [f.variable(_FLOATS, 0.0) for _ in of.rows]
    with f.loop(0, of.size) as i:
        block = of.tile + i * INT16_BLOCK_BYTES
        _prefetch(f, block, INT16_BLOCK_BYTES)
        places = [row * of.size + i for row in of.rows]
        whole = [f.number(I32 * ROWS, 0) for _ in places]
        for pair in range(BLOCK // 2):
            weights = f.load(I32 * ROWS, block + 4 * ROWS * pair)
            for r, place in enumerate(places):
                x = f.load(I32, of.x + place * (2 * BLOCK) + 4 * pair)
                whole[r] = add_pairs(f, target, whole[r], weights, x)
        scale = f.load(_FLOATS, block + 2 * ROWS * BLOCK)
        for place, own, total in zip(places, whole, sums, strict=True):
            own_scale = f.load(F32, of.meta + place * _META)
            total.set(f.fma(f.float32(own) * own_scale, scale, total.get()))
    return [total.get() for total in sums]


def _number_rows(f: Function, target: Target, of: Operands, *, kind: str) -> list[Value]:
    sums = [_TwoSums(f) for _ in of.rows]
    row_bytes = ROWS * NUMBERS[kind]

    def multiply(i: Value, columns: int) -> None:
        place = of.tile + i * row_bytes
        _prefetch(f, place, columns * row_bytes)
        own_x = [of.x + (row * of.size + i) * 4 for row in of.rows]
        for column in range(columns):
            weights = _numbers(f, kind, place + row_bytes * column)
            for total, x in zip(sums, own_x, strict=True):
                total.add(column, weights, x)

    whole = of.size - of.size % _COLUMNS
    with f.loop(0, whole, _COLUMNS) as i:
        multiply(i, _COLUMNS)
    with f.loop(whole, of.size) as i:
        multiply(i, 1)
    return [total.get() for total in sums]


def _numbers(f: Function, kind: str, place: Value) -> Value:
    if kind == "float16":
        return f.float32(f.load(F16 * ROWS, place))
    return f.wide(f.load(BF16 * ROWS, place)) if kind == "bfloat16" else f.load(_FLOATS, place)


def read_number(f: Function, kind: str, place: Value) -> Value:
    """One number, as float32."""
    if kind == "float16":
        return f.float32(f.load(F16, place))
    return f.wide(f.load(BF16, place)) if kind == "bfloat16" else f.load(F32, place)


@dataclass(frozen=True, slots=True)
class _Multiply:
    """How rows are multiplied by a tile."""

    name: str
    write: _WriteRows
    x_bytes: int  # a row's activations of a block, or of a column
    most_rows: tuple[int, int]  # at once: by 32 registers of 16 float32, and by fewer ones
    layout: Layout | None = None  # codes that tiles can multiply, too


def _tile(f: Function, target: Target, multiply: _Multiply) -> None:
    """Multiply f.rows rows at f.x, f.meta by the tile at f.tile, to f.out [rows, 16]."""
    done = f.variable(I64, 0)

    def multiply_rows(count: int) -> None:
        begin = done.get()
        rows = [f.smaller(begin + i, f.rows - 1) for i in range(count)]
        of = Operands(f.x, f.meta, f.tile, f.size, rows)
        for i, total in enumerate(multiply.write(f, target, of)):
            f.store(total, f.out + (begin * (4 * ROWS) + 4 * ROWS * i))
        done.set(begin + count)

    wide, narrow = multiply.most_rows
    most = wide if target.has("avx512f") else narrow
    with f.repeat() as few_left:
        f.leave(few_left, f.rows - done.get() < _worth(most))
        multiply_rows(most)
    count = most
    while count > 1:
        count //= 2
        with f.when(f.rows - done.get() >= _worth(count)):
            multiply_rows(count)


def _worth(count: int) -> int:
    """From how many rows on ``count`` are multiplied at once, the last one perhaps twice: that is faster than some at
    once, and then the others."""
    return count - 1 if count > 2 else count


def sigmoid(f: Function, x: Value) -> Value:
    return f.like(x, 1.0) / (f.exp(x * -1.0) + 1.0)


def _erf(f: Function, x: Value) -> Value:
    """Off by at most 1.5e-7. Abramowitz and Stegun 1964, 7.1.26."""
    size = f.absolute(x)
    t = f.like(x, 1.0) / f.fma(size, f.like(x, 0.3275911), f.like(x, 1.0))
    p = f.like(x, 1.061405429)
    for coefficient in (-1.453152027, 1.421413741, -0.284496736, 0.254829592):
        p = f.fma(p, t, f.like(x, coefficient))
    erf = f.like(x, 1.0) - p * t * f.exp(x * x * -1.0)
    return f.choose(x < 0.0, erf * -1.0, erf)


def activated(f: Function, x: Value, activation: str) -> Value:
    """An `Activation` of float32."""
    if activation == "silu":
        return x * sigmoid(f, x)
    if activation == "gelu":
        return x * 0.5 * (_erf(f, x * 0.7071067811865476) + 1.0)
    return x * sigmoid(f, f.fma(x * x * x, f.like(x, 0.044715), x) * 1.5957691216057308)


def tile_product(f: Function, target: Target, multiply: _Multiply) -> str:
    """Write the function (x, meta, tile, size, rows, out) that multiplies at most ROWS_OF_CHUNK rows by a tile, unless
    the module has it; returns its name."""

    def write(tile: Function) -> None:
        _tile(tile, target, multiply)

    name = f"multiply_{multiply.name}"
    arguments = {"x": POINTER, "meta": POINTER, "tile": POINTER, "size": I64, "rows": I64, "out": POINTER}
    f.module.shared(name, write, **arguments)
    return name


def _product(f: Function, target: Target, *, multiply: _Multiply, end: str) -> None:
    """words: see _X to _CHUNKS."""
    words, function = f.words, tile_product(f, target, multiply)
    size, tile_bytes, chunks = f.word(words, _SIZE), f.word(words, _TILE_BYTES), f.word(words, _CHUNKS)
    tiles, of_chunk, features = f.word(words, _TILES), f.word(words, _OF_CHUNK), f.word(words, _FEATURES)
    first_row = f.chunk / chunks * ROWS_OF_CHUNK
    rows = f.smaller(f.rows - first_row, ROWS_OF_CHUNK)
    x = f.address(words, _X) + first_row * size * multiply.x_bytes
    meta = f.address(words, _META_OF_X) + first_row * size * _META
    stride, bias, scale = f.word(words, _STRIDE) * 4, f.address(words, _BIAS), f.load(F32, words + 8 * _SCALE)
    products = [f.scratch(ROWS_OF_CHUNK * ROWS * 4) for _ in range(2 if end in GATES else 1)]
    by_tiles = divided(f, target, multiply.layout, f"tiles_{multiply.name}", x, meta, size, rows)
    others = rows - by_tiles.rows
    other_x, other_meta = x + by_tiles.rows * size * multiply.x_bytes, meta + by_tiles.rows * size * _META
    first_tile = f.chunk % chunks * of_chunk
    with f.loop(first_tile, f.smaller(first_tile + of_chunk, tiles)) as tile:
        mask = f.lane_mask(features - tile * ROWS, ROWS)
        biases = []
        for i, product in enumerate(products):
            own = tile + tiles * i
            place = f.address(words, _WEIGHT) + own * tile_bytes
            by_tiles.multiply(place, tile_bytes, product)
            with f.when(others > 0):
                out = product + by_tiles.rows * (4 * ROWS)
                f.call(function, None, other_x, other_meta, place, size, others, out)
            own_bias = f.variable(_FLOATS, 0.0)
            with f.when(f.word(words, _BIAS).differs(0)):
                own_bias.set(f.load_lanes(_FLOATS, bias + own * (4 * ROWS), mask))
            biases.append(own_bias.get())
        with f.loop(0, rows) as row:
            place = f.address(words, _OUT) + ((first_row + row) * stride + tile * (4 * ROWS))
            values = [
                f.load(_FLOATS, product + row * (4 * ROWS)) + own_bias
                for product, own_bias in zip(products, biases, strict=True)
            ]
            if end == "store":
                result = values[0]
            elif end == "add":
                result = f.fma(values[0], scale, f.load_lanes(_FLOATS, place, mask))
            elif end in GATES:
                result = activated(f, values[0], end) * values[1]
            else:
                result = activated(f, values[0], end.removesuffix(ALONE))
            f.store_lanes(result, place, mask)
    by_tiles.end()


def _multiplies() -> Iterator[_Multiply]:
    for name, layout in LAYOUTS.items():
        yield _Multiply(f"{name}_planes", partial(_plane_rows, layout=layout), 2 * BLOCK, (8, 4), layout)
        yield _Multiply(f"{name}_float32", partial(_float32_rows, layout=layout), 4 * BLOCK, (4, 2))
    for kind in NUMBERS:
        yield _Multiply(f"{kind}_float32", partial(_number_rows, kind=kind), 4, (8, 2))
    yield _Multiply("int16_int16", _int16_rows, 2 * BLOCK, (8, 4))


GATES = get_args(Activation)
ALONE = "_alone"
ENDS = ("store", "add", *GATES, *(f"{activation}{ALONE}" for activation in GATES))
MULTIPLIES = {multiply.name: multiply for multiply in _multiplies()}
"""Multiplications by their names, of a packed kind and a form of activations: "q4_k_planes"."""
KERNELS: dict[str, WriteKernel] = {
    f"product_{multiply.name}_{end}": partial(_product, multiply=multiply, end=end)
    for multiply in MULTIPLIES.values()
    for end in ENDS
}
