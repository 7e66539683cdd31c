"""Makes packed matrices, see layouts.py, of what checkpoints store.

Kernels are named "pack" and the kind. A chunk is a tile. Of GGUF's types, each has a function that reads the codes of
32 columns of a row, and one that moves what is of a row's block beside these; turning 16 rows into vectors is the same
for all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ..compiler.emit import I8, I16, I32, Function, Type, Value
from ..compiler.target import Target, WriteKernel
from .layouts import BLOCK, LAYOUTS, NUMBERS, ROWS, Layout

_BYTES = I8 * BLOCK


# -- GGUF's types


@dataclass(frozen=True, slots=True)
class Source:
    """A stored block: ``num_bytes``, codes of ``num_blocks`` blocks of 32 columns."""

    num_bytes: int
    num_blocks: int
    codes: Callable[[Function, Value, Value], Value]
    """Reads unsigned codes of 32 columns: of a stored block at an address, the one of an index (int64)."""
    move: Callable[[Function, Layout, Value, Value, Value], None]
    """Moves what a row's block has beside codes: from its address to a head, in whose tile it has a row (int64)."""


def _low_high(f: Function, nibbles: Value) -> Value:
    """32 codes of 16 bytes: lower halves, then higher ones."""
    return f.shuffle(nibbles & 15, nibbles >> 4, range(BLOCK))


def _codes_4(f: Function, block: Value, index: Value, *, begin: int) -> Value:
    return _low_high(f, f.load(I8 * 16, block + (index * 16 + begin)))


def _codes_5(f: Function, block: Value, index: Value, *, begin: int) -> Value:
    """The 32 highest bits come first."""
    bits = f.splat(f.load(I32, block + begin), BLOCK) >> f.numbers(I32 * BLOCK, range(BLOCK))
    high = f.narrowed(bits & 1, _BYTES) << 4
    return _low_high(f, f.load(I8 * 16, block + (begin + 4))) | high


def _codes_8(f: Function, block: Value, index: Value, *, begin: int) -> Value:
    return f.load(_BYTES, block + begin) ^ -128


def _codes_uint8(f: Function, block: Value, index: Value) -> Value:
    return f.load(_BYTES, block)


def _shifted(f: Function, place: Value, bits: Value) -> Value:
    """32 bytes, moved to the right by a number of bits (int64)."""
    return f.load(_BYTES, place) >> f.narrowed(bits, I8)


def _codes_2_k(f: Function, block: Value, index: Value, *, begin: int = 16) -> Value:
    return _shifted(f, block + ((index >> 2) * 32 + begin), (index & 3) * 2) & 3


def _codes_3_k(f: Function, block: Value, index: Value) -> Value:
    return _codes_2_k(f, block, index, begin=32) | (_shifted(f, block, index) & 1) << 2


def _codes_4_k(f: Function, block: Value, index: Value, *, begin: int) -> Value:
    return _shifted(f, block + ((index >> 1) * 32 + begin), (index & 1) * 4) & 15


def _codes_5_k(f: Function, block: Value, index: Value) -> Value:
    return _codes_4_k(f, block, index, begin=48) | (_shifted(f, block + 16, index) & 1) << 4


def _codes_6_k(f: Function, block: Value, index: Value) -> Value:
    half, part = index >> 2, index & 3
    low = _shifted(f, block + (half * 64 + (part & 1) * 32), (part >> 1) * 4) & 15
    return low | (_shifted(f, block + (half * 32 + 128), part * 2) & 3) << 4


def _move(f: Function, type_: Type, source: Value, begin: int, end: Value) -> None:
    f.store(f.load(type_, source + begin), end)


def _move_simple(f: Function, layout: Layout, block: Value, head: Value, row: Value) -> None:
    """float16 at the beginning: the scale, and the minimum."""
    for i in range(1 + layout.has_minimum):
        _move(f, I16, block, 2 * i, head + (row * 2 + (layout.code_bytes + 2 * ROWS * i)))


def _move_exponent(f: Function, layout: Layout, block: Value, head: Value, row: Value) -> None:
    _move(f, I8, block, 0, head + (row + layout.code_bytes))


def _move_nothing(f: Function, layout: Layout, block: Value, head: Value, row: Value) -> None:
    pass


def _move_factors(f: Function, block: Value, begin: int, head: Value, row: Value) -> None:
    """d, and dmin, whose sign changes."""
    _move(f, I16, block, begin, head + row * 2)
    f.store(f.load(I16, block + (begin + 2)) ^ -(2**15), head + (row * 2 + 2 * ROWS))


def _store_integers(f: Function, layout: Layout, head: Value, row: Value, index: int, numbers: list[Value]) -> None:
    """Store a block's scales and minima of a row, int8."""
    begin = layout.head_bytes + layout.block_bytes * index + layout.code_bytes
    for i, number in enumerate(numbers):
        f.store(number, head + (row + (begin + ROWS * i)))


def _move_2_k(f: Function, layout: Layout, block: Value, head: Value, row: Value) -> None:
    """16 bytes, a scale in the lower half of each and a minimum in the higher one; d, dmin, whose sign changes."""
    _move_factors(f, block, 80, head, row)
    for i in range(8):
        both = [f.load(I8, block + (2 * i + j)) for j in range(2)]
        _store_integers(f, layout, head, row, i, [own & 15 for own in both] + [own >> 4 for own in both])


def _move_3_k(f: Function, layout: Layout, block: Value, head: Value, row: Value) -> None:
    """16 scales of 6 bits, less 32: 8 bytes of lower halves, and 4 bytes of the highest two bits."""
    _move(f, I16, block, 108, head + row * 2)

    def scale(i: int) -> Value:
        low = f.load(I8, block + (96 + i % 8)) >> 4 * (i // 8) & 15
        high = f.load(I8, block + (104 + i % 4)) >> 2 * (i // 4) & 3
        return (low | high << 4) - 32

    for i in range(8):
        _store_integers(f, layout, head, row, i, [scale(2 * i), scale(2 * i + 1)])


def _move_k(f: Function, layout: Layout, block: Value, head: Value, row: Value) -> None:
    """d, dmin, whose sign changes, and 12 bytes: scales and minima of 6 bits, see quantised/gguf.py."""
    _move_factors(f, block, 0, head, row)
    packed = [f.load(I8, block + (4 + i)) for i in range(12)]
    for i in range(4):
        scale, minimum, low = packed[i], packed[i + 4], packed[i + 8]
        _store_integers(f, layout, head, row, i, [scale & 63, minimum & 63])
        last = [low & 15 | (scale >> 6) << 4, low >> 4 | (minimum >> 6) << 4]
        _store_integers(f, layout, head, row, i + 4, last)


def _move_6_k(f: Function, layout: Layout, block: Value, head: Value, row: Value) -> None:
    _move(f, I16, block, 208, head + row * 2)
    for i in range(8):
        _store_integers(f, layout, head, row, i, [f.load(I8, block + (192 + 2 * i + j)) for j in range(2)])


def _move_iq4_xs(f: Function, layout: Layout, block: Value, head: Value, row: Value) -> None:
    _move(f, I16, block, 0, head + row * 2)
    top = f.load(I16, block + 2)
    for i in range(8):
        low = f.load(I8, block + (4 + i // 2)) >> 4 * (i % 2) & 15
        high = f.narrowed(top >> 2 * i & 3, I8)
        _store_integers(f, layout, head, row, i, [(low | high << 4) - 32])


_GGUF = {
    "q4_0": Source(18, 1, partial(_codes_4, begin=2), _move_simple),
    "q4_1": Source(20, 1, partial(_codes_4, begin=4), _move_simple),
    "q5_0": Source(22, 1, partial(_codes_5, begin=2), _move_simple),
    "q5_1": Source(24, 1, partial(_codes_5, begin=4), _move_simple),
    "q8_0": Source(34, 1, partial(_codes_8, begin=2), _move_simple),
    "q2_k": Source(84, 8, _codes_2_k, _move_2_k),
    "q3_k": Source(110, 8, _codes_3_k, _move_3_k),
    "q4_k": Source(144, 8, partial(_codes_4_k, begin=16), _move_k),
    "q5_k": Source(176, 8, _codes_5_k, _move_k),
    "q6_k": Source(210, 8, _codes_6_k, _move_6_k),
    "iq4_nl": Source(18, 1, partial(_codes_4, begin=2), _move_simple),
    "iq4_xs": Source(136, 8, partial(_codes_4, begin=8), _move_iq4_xs),
    "mxfp4": Source(17, 1, partial(_codes_4, begin=1), _move_exponent),
}
_GROUPED = {
    **dict.fromkeys(("int4", "uint4", "e2m1"), Source(16, 1, partial(_codes_4, begin=0), _move_nothing)),
    "int8": Source(32, 1, partial(_codes_8, begin=0), _move_nothing),
    "uint8": Source(32, 1, _codes_uint8, _move_nothing),
}
SOURCES = _GGUF | {kind: _GROUPED[kind.partition("_")[0]] for kind in LAYOUTS.keys() - _GGUF.keys()}


# -- Kernels


def _transposed(f: Function, rows: list[Value], lanes: int) -> list[Value]:
    """Vectors of ``lanes`` whose numbers, one after another, are those of 16 rows column by column. ``rows``: as many
    vectors of ``lanes``, whose numbers are those of row 0, of row 1, and so on."""
    for _ in range(4):
        half = len(rows) // 2
        pairs = zip(rows[:half], rows[half:], strict=True)
        low = [lane for i in range(lanes // 2) for lane in (i, lanes + i)]
        rows = [f.shuffle(a, b, [lane + part for lane in low]) for a, b in pairs for part in (0, lanes // 2)]
    return rows


def _store_codes(f: Function, layout: Layout, rows: list[Value], block: Value) -> None:
    """Store the codes of 16 rows, each 32 bytes, as those of a block."""
    words = [f.cast(row, I32 * 8) for row in rows]
    vectors = _transposed(f, [f.shuffle(a, b, range(16)) for a, b in zip(words[::2], words[1::2], strict=True)], 16)
    place, below = block, 0
    for width in layout.planes:
        mask, each = 0x01010101 * (2**width - 1), 8 // width
        for begin in range(0, 8, each):
            plane = vectors[begin]
            if width < 8:
                plane = vectors[begin] >> below & mask
                for i in range(1, each):
                    plane = plane | (vectors[begin + i] >> below & mask) << width * i
            f.store(plane, place)
            place = place + 64
        below += width


def _pack_codes(f: Function, target: Target, *, source: Source, layout: Layout) -> None:
    """words: stored blocks, packed matrix, stored blocks of a row, bytes of a row, bytes of a tile. float32 of heads
    are written elsewhere."""
    row_bytes = f.word(f.words, 3)
    stored = f.address(f.words, 0) + f.chunk * row_bytes * ROWS
    tile = f.address(f.words, 1) + f.chunk * f.word(f.words, 4)
    each = layout.blocks_of_head
    with f.loop(0, f.word(f.words, 2)) as i:
        own = stored + i * source.num_bytes
        number = i * source.num_blocks
        head = tile + number / each * (layout.head_bytes + each * layout.block_bytes) if each else tile
        first = number % each if each else number
        with f.loop(0, source.num_blocks) as j:
            rows = [source.codes(f, own + row_bytes * row, j) for row in range(ROWS)]
            _store_codes(f, layout, rows, head + ((first + j) * layout.block_bytes + layout.head_bytes))
        with f.loop(0, ROWS) as row:
            source.move(f, layout, own + row_bytes * row, head, row)


def _pack_numbers(f: Function, target: Target, *, size: int) -> None:
    """words: numbers, packed matrix, numbers of a row, bytes of a row, bytes of a tile."""
    type_ = {2: I16, 4: I32}[size]
    count, row_bytes = f.word(f.words, 2), f.word(f.words, 3)
    stored = f.address(f.words, 0) + f.chunk * row_bytes * ROWS
    tile = f.address(f.words, 1) + f.chunk * f.word(f.words, 4)
    whole = count - count % 16
    with f.loop(0, whole, 16) as i:
        rows = [f.load(type_ * 16, stored + (row_bytes * row + i * size)) for row in range(ROWS)]
        for column, vector in enumerate(_transposed(f, rows, 16)):
            f.store(vector, tile + ((i + column) * (size * ROWS)))
    with f.loop(whole, count) as i, f.loop(0, ROWS) as row:
        place = tile + (i * ROWS + row) * size
        f.store(f.load(type_, stored + (row_bytes * row + i * size)), place)


KERNELS: dict[str, WriteKernel] = {
    **{f"pack_{kind}": partial(_pack_codes, source=SOURCES[kind], layout=LAYOUTS[kind]) for kind in LAYOUTS},
    **{f"pack_{kind}": partial(_pack_numbers, size=size) for kind, size in NUMBERS.items()},
}
