"""Products of many rows with matrices of codes by AMX, which multiplies a tile of activations, 16 rows of 32 bytes, by
a block of 16 output features at once: 16 x 16 integers.

    a matrix' tile   ──unpacked, for all rows of a chunk──>  [blocks][8 x 64 signed codes; scales, minima as float32]
    a chunk's meta   ──once, for all tiles of a chunk──>     factors [rows / 16][blocks][scales; of minima][16 rows]
    16 rows, a block ──> int32 [16, 16] of each plane ──> memory ──added and scaled by vectors──> out [16, 16]

A block's sum is an integer, the same by whatever instruction, and a row adds those of its blocks in the order of
`products.py`: its result has the same bits there and here, so that it may be multiplied by either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..compiler.emit import F32, I8, I16, I32, I64, POINTER, Function, Value, Variable
from ..compiler.target import Target
from .blocks import blocks, read_scales
from .layouts import BLOCK, ROWS, Layout, unpacked

ROWS_OF_CHUNK = 64
"""Most rows of a chunk."""
_LEAST = 12
"""Rows beyond whole tiles of 16 that are worth a tile, in which some rows are then again. Where all blocks are unpacked
at once: sums that go on in a second panel would be added to twice."""
_LEAST_OF_HALVES = 32
"""Rows from which on tiles are used where a block has two scales, and each half of it is a tile of 16 columns."""
_PANEL = 128
"""Most blocks that are unpacked at once."""
_FLOATS = F32 * ROWS
_VECTOR = 4 * ROWS  # bytes of 16 numbers
_CODES = ROWS * BLOCK  # bytes of a block's codes
_PLANES = 2 * BLOCK  # bytes of a row's activations of a block
_META = 16  # bytes of the meta of a block of a row
_CACHE_LINE = 64
_HIGH, _LOW, _HIGH_OF_X, _LOW_OF_X, _OF_CODES = range(5)
"""Registers of sums, of a plane of activations, and of codes."""


@dataclass(frozen=True, slots=True)
class _Shape:
    """What a layout makes of a block."""

    layout: Layout

    @property
    def parts(self) -> int:
        """Tiles of a block: as many as a row has scales."""
        return self.layout.num_scales

    @property
    def minima(self) -> int:
        return self.parts if self.layout.has_minimum else 0

    @property
    def block_bytes(self) -> int:
        return _CODES + _VECTOR * (self.parts + self.minima)

    @property
    def factor_bytes(self) -> int:
        return _VECTOR * (1 + self.minima)


class ByVectors:
    """Where tiles multiply none of a chunk's rows. See `ByTiles`."""

    def __init__(self, f: Function) -> None:
        self.rows = f.number(I64, 0)

    def multiply(self, tile: Value, tile_bytes: Value, out: Value) -> None:
        pass

    def end(self) -> None:
        pass


class ByTiles:
    """The rows of a chunk, the first ``rows`` of which tiles multiply; the others are left to vectors."""

    def __init__(
        self, f: Function, target: Target, layout: Layout, name: str, x: Value, meta: Value, size: Value, rows: Value
    ) -> None:
        """``name``: of the function to write. ``x``, ``meta``: of the chunk's rows; ``size``: their blocks."""
        shape = _Shape(layout)
        arguments = ("x", "meta", "size", "rows", "tile", "next", "out", "codes", "factors")
        types = {argument: I64 if argument in ("size", "rows") else POINTER for argument in arguments}
        f.module.shared(name, lambda own: _multiply(own, target, shape), **types)
        least = _LEAST_OF_HALVES if shape.parts == 2 else ROWS
        beyond = f.choose(size <= _PANEL, f.number(I64, ROWS - _LEAST), 0)
        whole = f.smaller((rows + beyond) / ROWS * ROWS, rows)
        self.rows = f.choose(rows < least, f.number(I64, 0), whole)
        self._f, self._name, self._of = f, name, (x, meta, size, self.rows)
        codes = f.scratch(_PANEL * shape.block_bytes)
        factors = f.scratch(ROWS_OF_CHUNK // ROWS * _PANEL * shape.factor_bytes)
        self._scratch = codes, factors
        with f.when(self.rows > 0):
            _configure(f, shape)
            with f.when(size <= _PANEL):
                _gather(f, shape, _Rows(*self._of, factors), f.number(I64, 0), size)

    def multiply(self, tile: Value, tile_bytes: Value, out: Value) -> None:
        """Multiply the rows by a tile of the matrix, to ``out``, float32 [rows, 16]."""
        with self._f.when(self.rows > 0):
            self._f.call(self._name, None, *self._of, tile, tile + tile_bytes, out, *self._scratch)

    def end(self) -> None:
        """Release the registers, which the system would else save whenever this thread makes room for another."""
        with self._f.when(self.rows > 0):
            self._f.call("llvm.x86.tilerelease", None)


def divided(
    f: Function, target: Target, layout: Layout | None, name: str, x: Value, meta: Value, size: Value, rows: Value
) -> ByTiles | ByVectors:
    """Which of a chunk's rows tiles multiply. ``layout``: of codes that are multiplied by planes, or none."""
    if layout is None or not target.has("amx-int8"):
        return ByVectors(f)
    return ByTiles(f, target, layout, name, x, meta, size, rows)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of activations, and where their meta is gathered by 16 rows."""

    x: Value
    meta: Value
    size: Value
    rows: Value
    factors: Value

    def first(self, f: Function, group: Value) -> Value:
        """The first of 16: the last group has the last 16, some of which are perhaps multiplied twice."""
        return f.smaller(group * ROWS, self.rows - ROWS)

    @property
    def groups(self) -> Value:
        return (self.rows + (ROWS - 1)) / ROWS


def _multiply(f: Function, target: Target, shape: _Shape) -> None:
    """Multiply f.rows rows by the tile at f.tile. f.next: the tile after it. f.codes, f.factors: memory."""
    of = _Rows(f.x, f.meta, f.size, f.rows, f.factors)
    begin = f.variable(I64, 0)
    with f.repeat() as is_done:
        first = begin.get()
        f.leave(is_done, first >= f.size)
        end = f.smaller(first + _PANEL, f.size)
        with f.when(f.size > _PANEL):
            _gather(f, shape, of, first, end)
        _unpack(f, target, shape, first, end)
        with f.loop(0, of.groups) as group:
            _multiply_group(f, shape, of, group, first, end)
        begin.set(end)


def _configure(f: Function, shape: _Shape) -> None:
    """Give the registers their sizes. A configuration has 64 bytes: the palette, 1; bytes of a row of each tile, int16,
    from 16 on; and its rows, int8, from 48 on."""
    config = f.scratch(64)
    f.store(f.number(I8 * 64, 0), config)
    f.store(f.number(I8, 1), config)
    columns = BLOCK // shape.parts
    sizes = {_HIGH: (ROWS, _VECTOR), _HIGH_OF_X: (ROWS, columns), _OF_CODES: (columns // 4, _VECTOR)}
    for tile, own in (sizes | {_LOW: sizes[_HIGH], _LOW_OF_X: sizes[_HIGH_OF_X]}).items():
        f.store(f.number(I16, own[1]), config + (16 + 2 * tile))
        f.store(f.number(I8, own[0]), config + (48 + tile))
    f.call("llvm.x86.ldtilecfg", None, config)


def _gather(f: Function, shape: _Shape, of: _Rows, begin: Value, end: Value) -> None:
    """Gather the meta of some blocks of all rows: scales, and what minima are multiplied by, if there are any."""
    with f.loop(0, of.groups) as group:
        first = of.first(f, group)
        own_meta = [of.meta + (first + row) * of.size * _META for row in range(ROWS)]
        with f.loop(begin, end) as i:
            scale, scaled, total, first_half = _columns(f, [f.load(F32 * 4, place + i * _META) for place in own_meta])
            factors = [scale]
            if shape.minima == 1:
                factors.append(scaled)
            elif shape.minima == 2:
                whole, half = (f.cast(own, I32 * ROWS) for own in (total, first_half))
                factors += [f.float32(half) * scale, f.float32(whole - half) * scale]
            out = of.factors + (group * _PANEL + (i - begin)) * shape.factor_bytes
            for j, factor in enumerate(factors):
                f.store(factor, out + _VECTOR * j)


def _columns(f: Function, fours: list[Value]) -> list[Value]:
    """The four columns of 16 vectors of 4."""
    eights = [f.shuffle(a, b, range(8)) for a, b in zip(fours[::2], fours[1::2], strict=True)]
    parts = [f.shuffle(a, b, range(16)) for a, b in zip(eights[::2], eights[1::2], strict=True)]
    found = []
    for pair in (0, 2):
        lanes = [4 * i + pair + j for j in range(2) for i in range(8)]
        low, high = (f.shuffle(a, b, lanes) for a, b in (parts[:2], parts[2:]))
        found += [f.shuffle(low, high, [*range(8 * j, 8 * j + 8), *range(16 + 8 * j, 24 + 8 * j)]) for j in range(2)]
    return found


def _unpack(f: Function, target: Target, shape: _Shape, begin: Value, end: Value) -> None:
    """Unpack blocks of f.tile: codes less their zero, int8, then scales and minima."""
    layout = shape.layout
    with blocks(f, layout, f.tile, end, begin) as (i, block, head):
        place = f.codes + (i - begin) * shape.block_bytes
        for four in unpacked(f, target, layout, block):
            codes = f.cast(four, I8 * (4 * ROWS))
            if layout.is_wide:
                codes = codes ^ -128
            elif layout.zero:
                codes = codes - layout.zero
            f.store(codes, place)
            place = place + _VECTOR
        scales, minima = read_scales(f, layout, block, head)
        for number in [*scales, *minima]:
            f.store(number, place)
            place = place + _VECTOR


def _multiply_group(f: Function, shape: _Shape, of: _Rows, group: Value, begin: Value, end: Value) -> None:
    """Add the products of 16 rows with the unpacked blocks to their sums at f.out."""
    first, factors = of.first(f, group), of.factors + group * (_PANEL * shape.factor_bytes)
    x, out = of.x + first * of.size * _PLANES, f.out + first * _VECTOR
    places = [[f.scratch(ROWS * _VECTOR) for _ in (_HIGH, _LOW)] for _ in range(shape.parts)]
    totals = [f.variable(_FLOATS, 0.0) for _ in range(ROWS)]
    with f.when(begin > 0):
        for row, total in enumerate(totals):
            total.set(f.load(_FLOATS, out + _VECTOR * row))
    with f.loop(begin, end) as i:
        with f.when(group.equals(0)):
            _fetch(f, shape.layout, i)
        codes = f.codes + (i - begin) * shape.block_bytes
        _sums(f, shape, x + i * _PLANES, codes, places)
        _add_scaled(f, shape, places, codes + _CODES, factors + (i - begin) * shape.factor_bytes, totals)
    for row, total in enumerate(totals):
        f.store(total.get(), out + _VECTOR * row)


def _fetch(f: Function, layout: Layout, i: Value) -> None:
    """Begin to fetch block ``i`` of f.next while others are multiplied: unpacking is too short for that."""
    stride = layout.tile_bytes(8 * BLOCK) // 8
    for ahead in range(0, stride, _CACHE_LINE):
        f.prefetch(f.next + (i * stride + ahead), 2)


def _sums(f: Function, shape: _Shape, x: Value, codes: Value, places: Sequence[Sequence[Value]]) -> None:
    """Write the sums of the products of 16 rows with the parts of a block, int32 [16, 16] of each plane."""
    columns, of_x, of_vectors = BLOCK // shape.parts, f.size * _PLANES, f.number(I64, _VECTOR)
    for part, places_of_part in enumerate(places):
        right = I8.llvm(_OF_CODES)
        f.call("llvm.x86.tileloadd64", None, right, codes + 16 * columns * part, of_vectors)
        for plane, place in enumerate(places_of_part):
            left, sums = I8.llvm((_HIGH_OF_X, _LOW_OF_X)[plane]), I8.llvm((_HIGH, _LOW)[plane])
            f.call("llvm.x86.tileloadd64", None, left, x + (BLOCK * plane + columns * part), of_x)
            f.call("llvm.x86.tilezero", None, sums)
            f.call("llvm.x86.tdpbssd", None, sums, left, right)
            f.call("llvm.x86.tilestored64", None, sums, place, of_vectors)


def _add_scaled(
    f: Function, shape: _Shape, places: Sequence[Sequence[Value]], scales: Value, factors: Value, totals: list[Variable]
) -> None:
    """Add a block's sums, scaled, to those of the rows. ``scales``: of the block, then its minima."""
    numbers = [f.load(_FLOATS, scales + _VECTOR * i) for i in range(shape.parts + shape.minima)]
    for row, total in enumerate(totals):
        of_row, added = f.load(F32, factors + 4 * row), total.get()
        for planes, scale in zip(places, numbers[: shape.parts], strict=True):
            high, low = (f.load(I32 * ROWS, place + _VECTOR * row) for place in planes)
            added = f.fma(f.float32((high << 8) + low) * of_row, scale, added)
        for j, minimum in enumerate(numbers[shape.parts :]):
            added = f.fma(minimum, f.load(F32, factors + (_VECTOR * (1 + j) + 4 * row)), added)
        total.set(added)
