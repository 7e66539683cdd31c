"""How packed matrices lie in memory: what products read, as the stream that it is read as.

A matrix is divided into tiles of 16 output features, beginning at multiples of 16; rows that the last one lacks are
zeros. A tile is one block after another along the input features, each 32 columns of 16 rows:

    codes     8 bits: 8 vectors of 64 bytes. Vector g has columns 4g to 4g + 3: those of row 0, of row 1, and so on
              4 bits: 4 vectors, whose low halves are vectors 0 to 3 of these, and whose high halves are 4 to 7
              5 bits: these, and a vector whose bit g is the highest one of vector g's codes
              6 bits: these, and 2 vectors: the highest two of vectors 0 to 3, and of 4 to 7, lowest bits first
    scales    one a row, or two: of the first 16 columns, and of the others
    minima    one a row, if there are any

What is of several blocks lies before these, 16 numbers each: a row's scale before all of its blocks; d and dmin, by
which integers are multiplied, before each 8. A weight is scale * (code - zero), or scale * code + minimum.

Weights of 16 and of 32 bits are tiles [in_features, 16].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["LAYOUTS", "NUMBERS", "ROWS", "Layout"]

ROWS = 16
"""Rows of a tile."""
BLOCK = 32
"""Columns of a block."""


@dataclass(frozen=True, slots=True)
class Layout:
    bits: Literal[4, 5, 6, 8]
    scale: Literal["float16", "float32 of a row"] = "float16"
    zero: int = 0
    has_minimum: bool = False

    @property
    def code_bytes(self) -> int:
        return 64 * self.bits

    @property
    def block_bytes(self) -> int:
        scales = 32 if self.scale == "float16" else 0
        return self.code_bytes + scales + 32 * self.has_minimum

    @property
    def head_bytes(self) -> int:
        return 64 if self.scale == "float32 of a row" else 0

    @property
    def blocks_of_head(self) -> int:
        """Blocks after each head; 0: all of a tile."""
        return 0 if self.scale == "float32 of a row" else 1

    def tile_bytes(self, in_features: int) -> int:
        blocks = in_features // BLOCK
        heads = blocks // self.blocks_of_head if self.blocks_of_head else 1
        return heads * self.head_bytes + blocks * self.block_bytes


LAYOUTS: dict[str, Layout] = {
    "q4_1": Layout(4, has_minimum=True),
    "q8_0": Layout(8, zero=128),
}
NUMBERS = {"float16": 2, "bfloat16": 2, "float32": 4}
"""Bytes of weights that are no codes."""
