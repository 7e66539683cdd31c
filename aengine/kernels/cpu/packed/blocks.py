"""Goes over the blocks of a packed matrix' tile, and reads what they have beside codes, see layouts.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..compiler.emit import F16, F32, I8, I32, Function, Value
from .layouts import ROWS, Layout

_FLOATS = F32 * ROWS


@contextmanager
def blocks(
    f: Function, layout: Layout, tile: Value, end: Value, begin: Value | int = 0
) -> Iterator[tuple[Value, Value, Value]]:
    """Run the body for each block of a tile, from ``begin``, a multiple of those of a head: its number, its address,
    and that of its head."""
    each, size = layout.blocks_of_head, layout.block_bytes
    if each > 1:
        first = begin // each
        with f.loop(first, end / each) as i:
            head = tile + i * (layout.head_bytes + each * size)
            with f.loop(0, each) as j:
                yield i * each + j, head + (j * size + layout.head_bytes), head
    else:
        stride = size + layout.head_bytes * each
        with f.loop(begin, end) as i:
            head = tile + i * stride
            yield i, head + layout.head_bytes, head if each else tile


def read_scales(f: Function, layout: Layout, block: Value, head: Value) -> tuple[list[Value], list[Value]]:
    """The scales of a block's rows, one or two, and as many minima, or none; float32."""
    numbers, size, count = [], layout.scale_bytes, layout.num_scales
    for i in range(count * (1 + layout.has_minimum)):
        place = block + (layout.code_bytes + size * i)
        if layout.scale == "head":
            numbers.append(f.load(_FLOATS, head + 4 * ROWS * i))
        elif layout.scale == "float16":
            numbers.append(f.float32(f.load(F16 * ROWS, place)))
        elif layout.scale == "integer":
            factor = f.float32(f.load(F16 * ROWS, head + 2 * ROWS * (i // count)))
            numbers.append(factor * f.float32(f.widened(f.load(I8 * ROWS, place), I32 * ROWS)))
        else:
            exponent = f.widened(f.load(I8 * ROWS, place), I32 * ROWS, signed=False)
            numbers.append(f.cast(exponent << 23, _FLOATS) * 0.5)
    return numbers[:count], numbers[count:]
