"""How packed matrices lie in memory, as the stream that products read; codes in registers, unpacked and multiplied.

A matrix is divided into tiles of 16 output features, beginning at multiples of 16; rows that the last one lacks are
zeros. Weights of 16 and of 32 bits lie as [in_features, 16] of each tile. Codes lie in blocks of 32 columns, one after
another along the input features:

    codes     8 bits: 8 vectors of 64 bytes. Vector g has columns 4g to 4g + 3: those of row 0, of row 1, and so on.
              Fewer are divided into planes: the lowest 4 bits, or 2 of 2 and of 3; then what is left. A plane of n bits
              is n vectors, whose bytes have those of 8 / n vectors after each other, lowest bits first
    scales    one a row, or one of a row's first 16 columns, and one of the others
    minima    as many, if there are any

Numbers may become int16 of 14 bits with a scale for each block and row: a block has 16 vectors of pairs of columns,
those of row 0, of row 1, and so on, then the scales, float32.

A head lies before the blocks that share it, and has float16 factors of their scales and minima, or these themselves, of
one or more blocks, or of all of a tile. A weight is scale * (code - zero) + minimum.

Activations are codes of 16 bits, as two planes of int8: 256 * high + low. The product of a block's codes with a plane
is an integer, the same on each processor: by VNNI; by AVX2's products of pairs of bytes, where codes of 8 bits go as
magnitudes whose signs are the activations'; by arm64's dot products; or number by number.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from ..compiler.emit import I8, I16, I32, Function, Type, Value
from ..compiler.target import Target

ROWS = 16
"""Rows of a tile."""
BLOCK = 32
"""Columns of a block."""


@dataclass(frozen=True, slots=True)
class Layout:
    """``scale``: "float16"; "integer", int8 that a head's factor is multiplied by; "exponent", 2 ^ (uint8 - 128);
    "head", a head's float32. ``values``: what codes stand for, less ``zero``."""

    bits: Literal[2, 3, 4, 5, 6, 8]
    scale: Literal["float16", "integer", "exponent", "head"] = "float16"
    zero: int = 0
    has_minimum: bool = False
    num_scales: int = 1
    values: tuple[int, ...] | None = None
    blocks_of_head: int = 1
    """Blocks after each head; 0: all of a tile."""

    @property
    def planes(self) -> tuple[int, ...]:
        """Bits of each plane of codes."""
        return {2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 8: (8,)}[self.bits]

    @property
    def code_bytes(self) -> int:
        return ROWS * BLOCK // 8 * self.bits

    @property
    def scale_bytes(self) -> int:
        """Bytes of a scale, or of a minimum, of all rows."""
        return {"float16": 2 * ROWS, "integer": ROWS, "exponent": ROWS, "head": 0}[self.scale]

    @property
    def block_bytes(self) -> int:
        return self.code_bytes + self.scale_bytes * self.num_scales * (1 + self.has_minimum)

    @property
    def head_bytes(self) -> int:
        if self.scale == "head":
            return 4 * ROWS * self.num_scales * (1 + self.has_minimum)
        return 2 * ROWS * (1 + self.has_minimum) if self.scale == "integer" else 0

    @property
    def is_wide(self) -> bool:
        """Whether codes have 8 bits as they are multiplied, whose zero is then 128."""
        return self.zero == 128

    def tile_bytes(self, in_features: int) -> int:
        blocks = in_features // BLOCK
        heads = blocks // self.blocks_of_head if self.blocks_of_head else 1
        return heads * self.head_bytes + blocks * self.block_bytes


_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_E2M1_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)

_GROUPED = {
    "int4": Layout(4, "head", zero=8),
    "uint4": Layout(4, "head", has_minimum=True),
    "e2m1": Layout(4, "head", zero=128, values=_E2M1_DOUBLED),
    "int8": Layout(8, "head", zero=128),
    "uint8": Layout(8, "head", zero=128, has_minimum=True),
}


def _grouped(kind: str, layout: Layout) -> dict[str, Layout]:
    """Layouts of a kind of `GroupedCodes`, by kind and columns of a group; 0: all columns."""
    found = {f"{kind}_{group}": replace(layout, blocks_of_head=group // BLOCK) for group in (0, 32, 64, 128, 256)}
    return found if layout.has_minimum else {**found, f"{kind}_16": replace(layout, num_scales=2)}


LAYOUTS: dict[str, Layout] = {
    "q4_0": Layout(4, zero=8),
    "q4_1": Layout(4, has_minimum=True),
    "q5_0": Layout(5, zero=16),
    "q5_1": Layout(5, has_minimum=True),
    "q8_0": Layout(8, zero=128),
    "q2_k": Layout(2, "integer", has_minimum=True, num_scales=2, blocks_of_head=8),
    "q3_k": Layout(3, "integer", zero=4, num_scales=2, blocks_of_head=8),
    "q4_k": Layout(4, "integer", has_minimum=True, blocks_of_head=8),
    "q5_k": Layout(5, "integer", has_minimum=True, blocks_of_head=8),
    "q6_k": Layout(6, "integer", zero=32, num_scales=2, blocks_of_head=8),
    "iq4_nl": Layout(4, zero=128, values=_IQ4),
    "iq4_xs": Layout(4, "integer", zero=128, values=_IQ4, blocks_of_head=8),
    "mxfp4": Layout(4, "exponent", zero=128, values=_E2M1_DOUBLED),
    "int8": Layout(8, "head", zero=128, blocks_of_head=0),
    **{name: own for kind, layout in _GROUPED.items() for name, own in _grouped(kind, layout).items()},
}
LARGEST_PLANES = 127 * 256
"""The largest code of two planes."""
LARGEST_INT16 = 8191
"""The largest code of 16 bits: the sum of a block's products is an int32."""
INT16_BLOCK_BYTES = 2 * ROWS * BLOCK + 4 * ROWS
NUMBERS = {"float16": 2, "bfloat16": 2, "float32": 4}
"""Bytes of weights that are no codes."""

_WORDS = I32 * ROWS
_LARGEST_PAIR = 2 * 127
_FLIP = -0x7F7F7F80  # 0x80 in each byte of an int32


def unpacked(f: Function, target: Target, layout: Layout, block: Value) -> list[Value]:
    """The codes of a block, 8 vectors of 16 words: four bytes each, of a row's columns 4g to 4g + 3."""
    codes: list[Value] = []
    below = 0
    for width in layout.planes:
        plane = [f.load(_WORDS, block + 64 * (below + i)) for i in range(width)]
        if width == 8:
            return plane
        mask = 0x01010101 * (2**width - 1) << below
        for g in range(8):
            own, shift = plane[g * width // 8], g * width % 8 - below
            part = (own >> shift if shift >= 0 else own << -shift) & mask
            codes[g : g + 1] = [codes[g] | part if below else part]
        below += width
    if layout.values is None:
        return codes
    table = [value + layout.zero for value in layout.values]
    return [_looked_up(f, target, table, four) for four in codes]


def _looked_up(f: Function, target: Target, table: list[int], four: Value) -> Value:
    """Bytes of a table of 16, by the codes in 16 words."""
    codes = f.cast(four, I8 * 64)
    for feature, lanes, name in (
        ("avx512bw", 64, "llvm.x86.avx512.pshuf.b.512"),
        ("avx2", 32, "llvm.x86.avx2.pshuf.b"),
        ("ssse3", 16, "llvm.x86.ssse3.pshuf.b.128"),
        ("neon", 16, "llvm.aarch64.neon.tbl1.v16i8"),
    ):
        if target.has(feature):
            own = f.numbers(I8 * lanes, table * (lanes // 16))
            parts = [f.call(name, I8 * lanes, own, part) for part in _parts(f, codes, 64, lanes)]
            return f.cast(_joined(f, parts, lanes), _WORDS)
    found = f.number(I8 * 64, 0)
    for code, value in enumerate(table):
        found = f.choose(codes.equals(code), f.number(I8 * 64, value), found)
    return f.cast(found, _WORDS)


def dot(f: Function, target: Target, layout: Layout, codes: list[Value], x: Value, total: Value) -> Value:
    """int32 of each row: codes less their zero, times the activations at ``x``, added. ``total``: of the latter."""
    high = _dot(f, target, layout, codes, x, f.number(I32, 0))
    return (high << 8) + _dot(f, target, layout, codes, x + BLOCK, total)


def _dot(f: Function, target: Target, layout: Layout, codes: list[Value], x: Value, total: Value) -> Value:
    """Return int32 of each row as `dot` does, for one plane of the activations: BLOCK bytes at ``x``."""
    own = [f.load(I32, x + 4 * i) for i in range(len(codes))]
    if layout.is_wide and (target.has("avx2") or target.has("dotprod")) and not _vnni_lanes(target):
        codes = [four ^ _FLIP for four in codes]
        sums = f.number(_WORDS, 0)
    elif layout.zero:
        sums = f.splat(total * -layout.zero, ROWS)
    else:
        sums = f.number(_WORDS, 0)
    if lanes := _vnni_lanes(target):
        return _by_quads(f, f"llvm.x86.avx512.vpdpbusd.{32 * lanes}", lanes, sums, codes, own, I32 * lanes)
    if target.has("avx2"):
        return sums + _by_pairs(f, layout, codes, own)
    if target.has("dotprod"):
        return _by_quads(f, "llvm.aarch64.neon.sdot.v4i32.v16i8", 4, sums, codes, own, I8 * 16)
    for i, four in enumerate(codes):
        for j in range(4):
            sums = sums + (four >> 8 * j & 0xFF) * f.widened(f.load(I8, x + (4 * i + j)), I32)
    return sums


def add_pairs(f: Function, target: Target, sums: Value, pairs: Value, x: Value) -> Value:
    """``sums``, int32 of each row, and the products of ``pairs``, a word of two int16 of each row, by ``x``, such a
    word."""
    if target.has_vnni:
        return f.call("llvm.x86.avx512.vpdpwssd.512", _WORDS, sums, pairs, f.splat(x, ROWS))
    for part in (0, 1):
        own, of_x = (f.signed_shift(word << 16 if part == 0 else word, 16) for word in (pairs, x))
        sums = sums + own * of_x
    return sums


def _vnni_lanes(target: Target) -> int:
    if target.has_vnni:
        return 16
    return 8 if target.has("avxvnni") else 0


def _by_quads(
    f: Function, name: str, lanes: int, sums: Value, codes: list[Value], own: list[Value], operand: Type
) -> Value:
    """Multiply by an instruction that adds four products to each of ``lanes`` sums. ``operand``: its bytes' type."""
    parts = _parts(f, sums, ROWS, lanes)
    for four, quad in zip(codes, own, strict=True):
        x = f.cast(f.splat(quad, lanes), operand)
        for i, part in enumerate(_parts(f, four, ROWS, lanes)):
            parts[i] = f.call(name, I32 * lanes, parts[i], f.cast(part, operand), x)
    return _joined(f, parts, lanes)


def _by_pairs(f: Function, layout: Layout, codes: list[Value], own: list[Value]) -> Value:
    """Multiply by AVX2's sums of two products in 16 bits, as many of which are added as can't overflow."""
    largest = 128 if layout.is_wide else 2**layout.bits - 1
    at_once = max(1, 32767 // (largest * _LARGEST_PAIR))
    ones = f.number(I16 * 16, 1)
    sums = [f.number(I32 * 8, 0)] * 2
    for begin in range(0, len(codes), at_once):
        part: list[Value | None] = [None, None]
        for four, quad in zip(codes[begin : begin + at_once], own[begin : begin + at_once], strict=True):
            x = f.cast(f.splat(quad, 8), I8 * 32)
            for i, half in enumerate(_parts(f, four, ROWS, 8)):
                operands = [f.cast(half, I8 * 32), x]
                if layout.is_wide:
                    signed = f.call("llvm.x86.avx2.psign.b", I8 * 32, x, operands[0])
                    operands = [f.magnitude(operands[0]), signed]
                pairs = f.call("llvm.x86.avx2.pmadd.ub.sw", I16 * 16, *operands)
                before = part[i]
                part[i] = pairs if before is None else before + pairs
        for i, pairs_of_half in enumerate(part):
            assert pairs_of_half is not None
            sums[i] = sums[i] + f.call("llvm.x86.avx2.pmadd.wd", I32 * 8, pairs_of_half, ones)
    return _joined(f, sums, 8)


def _parts(f: Function, value: Value, lanes: int, each: int) -> list[Value]:
    """A vector of ``lanes`` as vectors of ``each``."""
    if lanes == each:
        return [value]
    return [f.shuffle(value, value, range(i, i + each)) for i in range(0, lanes, each)]


def _joined(f: Function, parts: list[Value], lanes: int) -> Value:
    """Vectors of ``lanes``, a power of two of them, as one."""
    while len(parts) > 1:
        pairs = zip(parts[::2], parts[1::2], strict=True)
        parts = [f.shuffle(a, b, range(2 * lanes)) for a, b in pairs]
        lanes *= 2
    return parts[0]
