"""Codes of packed matrices in registers: unpacked, and multiplied with the int8 codes of activations."""

from __future__ import annotations

from .emit import I8, I32, Function, Value
from .layouts import ROWS, Layout
from .target import Target

__all__ = ["dot", "unpacked"]

_WORDS = I32 * ROWS


def unpacked(f: Function, layout: Layout, block: Value) -> list[Value]:
    """The codes of a block, 8 vectors of 16 words: four bytes each, of a row's columns 4g to 4g + 3."""
    if layout.bits == 8:
        return [f.load(_WORDS, block + 64 * i) for i in range(8)]
    packed = [f.load(_WORDS, block + 64 * i) for i in range(4)]
    return [part & 0x0F0F0F0F for part in packed] + [(part >> 4) & 0x0F0F0F0F for part in packed]


def dot(f: Function, target: Target, begin: Value, codes: list[Value], x: Value) -> Value:
    """int32 of each row: ``begin`` and the products of unsigned codes with the int8 at ``x``, added."""
    total = begin
    for i, four in enumerate(codes):
        own = f.splat(f.load(I32, x + 4 * i), ROWS)
        operands = [f.cast(value, I8 * 64) for value in (four, own)]
        total = f.call("llvm.x86.avx512.vpdpbusd.512", _WORDS, total, *operands)
    return total
