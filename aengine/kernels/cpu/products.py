"""Products of activations with packed matrices, see layouts.py: x @ weight.T, and what comes after it.

A chunk is some tiles of output features times up to `ROWS_OF_CHUNK` rows of activations. Eight rows are multiplied by a
tile at once, whose weights are unpacked once for them, then 4, 2 and 1 of what is left. Sums have the same order in
each of these: a row's result does not depend on the rows beside it.

Kernels are named "product", the weights' kind, what activations are, and what becomes of the product:

    int8      activations are codes of `quantise`, multiplied as integers within a block; blocks are added in order

    store     out = product + bias
    add       out += scale * (product + bias)
    silu, gelu, gelu_tanh
              out = activation(gate) * up, of a matrix whose first half of rows are the gate's
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import get_args

from ..activation import Activation
from .dots import dot, unpacked
from .emit import F16, F32, I32, I64, POINTER, Function, Value, Variable
from .layouts import BLOCK, LAYOUTS, ROWS, Layout
from .target import Target, WriteKernel

__all__ = ["KERNELS", "ROWS_OF_CHUNK"]

ROWS_OF_CHUNK = 64
_FLOATS = F32 * ROWS
_PREFETCHED = 1600  # bytes ahead of what is read for one row
_META = 16  # bytes of the meta of a block

(_X, _META_OF_X, _WEIGHT, _OUT, _STRIDE, _BIAS, _SCALE, _FEATURES, _SIZE, _TILE_BYTES, _TILES, _OF_CHUNK, _CHUNKS) = (
    range(13)
)
"""Words of a kernel: x; its meta; the packed matrix; out, float32, and how many of them from row to row; bias or none;
scale; output features; input features in blocks, or one by one; bytes of a tile, tiles (of gated ones, of the gate),
tiles of a chunk, chunks of a block of rows."""


@dataclass(frozen=True, slots=True)
class _Operands:
    """What some rows are multiplied with: ``size`` blocks, or columns, of a tile."""

    x: Value
    meta: Value
    tile: Value
    size: Value


_WriteRows = Callable[[Function, Target, _Operands, int], list[Variable]]
"""Writes the product of a number of rows with a tile: sums [16] of each."""


@contextmanager
def _blocks(f: Function, layout: Layout, of: _Operands) -> Iterator[tuple[Value, Value, Value]]:
    """Run the body for each block of a tile: its number, its address, and that of its head."""
    each, size = layout.blocks_of_head, layout.block_bytes
    if each:
        with f.loop(0, of.size / each) as i:
            head = of.tile + i * (layout.head_bytes + each * size)
            with f.loop(0, each) as j:
                yield i * each + j, head + (j * size + layout.head_bytes), head
    else:
        with f.loop(0, of.size) as i:
            yield i, of.tile + (i * size + layout.head_bytes), of.tile


def _scales(f: Function, layout: Layout, block: Value, head: Value) -> tuple[list[Value], Value | None]:
    """The scales of a block's rows, and their minima."""
    if layout.scale == "float32 of a row":
        return [f.load(_FLOATS, head)], None
    place = block + layout.code_bytes
    scale = f.float32(f.load(F16 * ROWS, place))
    return [scale], f.float32(f.load(F16 * ROWS, place + 2 * ROWS)) if layout.has_minimum else None


def _int8_rows(f: Function, target: Target, of: _Operands, rows: int, *, layout: Layout) -> list[Variable]:
    sums = [f.variable(_FLOATS, 0.0) for _ in range(rows)]
    with _blocks(f, layout, of) as (i, block, head):
        if rows == 1:
            for ahead in range(0, layout.block_bytes, 64):
                f.prefetch(block + (_PREFETCHED + ahead))
        codes = unpacked(f, layout, block)
        scales, minimum = _scales(f, layout, block, head)
        part = len(codes) // len(scales)
        for row, total in enumerate(sums):
            x = of.x + (i * BLOCK + of.size * (BLOCK * row))
            meta = of.meta + (i * _META + of.size * (_META * row))
            own_scale = f.load(F32, meta)
            for j, scale in enumerate(scales):
                begin = f.number(I32 * ROWS, 0)
                if layout.zero:
                    begin = f.splat(f.load(I32, meta + 8) * -layout.zero, ROWS)
                whole = dot(f, target, begin, codes[j * part : (j + 1) * part], x + 4 * part * j)
                total.set(f.fma(f.float32(whole) * own_scale, scale, total.get()))
            if minimum is not None:
                total.set(f.fma(minimum, f.load(F32, meta + 4), total.get()))
    return sums


def _tile(f: Function, target: Target, write: _WriteRows, x_bytes: int, most: int) -> None:
    """Multiply f.rows rows at f.x, f.meta by the tile at f.tile, to f.out [rows, 16]. ``x_bytes``: of a row's x, for
    each of f.size."""
    done = f.variable(I64, 0)

    def multiply(rows: int) -> None:
        begin = done.get()
        place = begin * f.size
        of = _Operands(f.x + place * x_bytes, f.meta + place * _META, f.tile, f.size)
        for i, total in enumerate(write(f, target, of, rows)):
            f.store(total.get(), f.out + (begin * (4 * ROWS) + 4 * ROWS * i))
        done.set(begin + rows)

    with f.repeat() as few_left:
        f.leave(few_left, f.rows - done.get() < most)
        multiply(most)
    while most > 1:
        most //= 2
        with f.when(f.rows - done.get() >= most):
            multiply(most)


@dataclass(frozen=True, slots=True)
class _Multiply:
    """How rows are multiplied by a tile."""

    name: str
    write: _WriteRows
    x_bytes: int  # a row's activations of a block, or of a column
    most_rows: int = 8


def _sigmoid(f: Function, x: Value) -> Value:
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


def _activated(f: Function, x: Value, activation: str) -> Value:
    if activation == "silu":
        return x * _sigmoid(f, x)
    if activation == "gelu":
        return x * 0.5 * (_erf(f, x * 0.7071067811865476) + 1.0)
    return x * _sigmoid(f, f.fma(x * x * x, f.like(x, 0.044715), x) * 1.5957691216057308)


def _product(f: Function, target: Target, *, multiply: _Multiply, end: str) -> None:
    """words: see _X to _CHUNKS."""
    words = f.words

    def write(tile: Function) -> None:
        _tile(tile, target, multiply.write, multiply.x_bytes, multiply.most_rows)

    arguments = {"x": POINTER, "meta": POINTER, "tile": POINTER, "size": I64, "rows": I64, "out": POINTER}
    f.module.shared(f"multiply_{multiply.name}", write, **arguments)
    size, tile_bytes, chunks = f.word(words, _SIZE), f.word(words, _TILE_BYTES), f.word(words, _CHUNKS)
    tiles, of_chunk, features = f.word(words, _TILES), f.word(words, _OF_CHUNK), f.word(words, _FEATURES)
    first_row = f.chunk / chunks * ROWS_OF_CHUNK
    rows = f.smaller(f.rows - first_row, ROWS_OF_CHUNK)
    x = f.address(words, _X) + first_row * size * multiply.x_bytes
    meta = f.address(words, _META_OF_X) + first_row * size * _META
    stride, bias, scale = f.word(words, _STRIDE) * 4, f.address(words, _BIAS), f.load(F32, words + 8 * _SCALE)
    products = [f.memory(ROWS_OF_CHUNK * ROWS * 4) for _ in range(1 if end in ("store", "add") else 2)]
    first_tile = f.chunk % chunks * of_chunk
    with f.loop(first_tile, f.smaller(first_tile + of_chunk, tiles)) as tile:
        mask = f.lane_mask(features - tile * ROWS, ROWS)
        biases = []
        for i, product in enumerate(products):
            own = tile + tiles * i
            place = f.address(words, _WEIGHT) + own * tile_bytes
            f.call(f"multiply_{multiply.name}", None, x, meta, place, size, rows, product)
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
            else:
                result = _activated(f, values[0], end) * values[1]
            f.store_lanes(result, place, mask)


def _multiplies() -> Iterator[_Multiply]:
    for name, layout in LAYOUTS.items():
        yield _Multiply(f"{name}_int8", partial(_int8_rows, layout=layout), BLOCK)


ENDS = ("store", "add", *get_args(Activation))
KERNELS: dict[str, WriteKernel] = {
    f"product_{multiply.name}_{end}": partial(_product, multiply=multiply, end=end)
    for multiply in _multiplies()
    for end in ENDS
}
