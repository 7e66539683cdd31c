"""Rows of packed matrices as numbers: embeddings of tokens. A chunk is a row."""

from __future__ import annotations

from functools import partial

from ..compiler.emit import F32, Function
from ..compiler.target import Target, WriteKernel
from .blocks import blocks, read_scales
from .layouts import BLOCK, LAYOUTS, NUMBERS, ROWS, Layout, unpacked
from .products import read_number


def _embed(f: Function, target: Target, *, layout: Layout) -> None:
    """words: as `codes.embed` lays them down."""
    size, tile_bytes = f.word(f.words, 3), f.word(f.words, 4)
    own = f.word(f.address(f.words, 0) + f.chunk * 8, 0)
    out = f.address(f.words, 2) + f.chunk * size * 4
    factor = f.load(F32, f.words + 40)
    lane = own % ROWS
    tile = f.address(f.words, 1) + own // ROWS * tile_bytes
    with blocks(f, layout, tile, size // BLOCK) as (i, block, head):
        codes = unpacked(f, target, layout, block)
        scales, minima = read_scales(f, layout, block, head)
        part = len(codes) // len(scales)
        for g, words in enumerate(codes):
            scale, word = f.lane(scales[g // part], lane) * factor, f.lane(words, lane)
            add = f.lane(minima[g // part], lane) * factor if minima else f.number(F32, 0.0)
            for j in range(4):
                code = f.float32(((word >> 8 * j) & 0xFF) - layout.zero)
                f.store(f.fma(code, scale, add), out + (i * (4 * BLOCK) + 16 * g + 4 * j))


def _embed_numbers(f: Function, target: Target, *, kind: str) -> None:
    """words: as `codes.embed` lays them down."""
    size, number_bytes = f.word(f.words, 3), NUMBERS[kind]
    own = f.word(f.address(f.words, 0) + f.chunk * 8, 0)
    out = f.address(f.words, 2) + f.chunk * size * 4
    factor = f.load(F32, f.words + 40)
    first = f.address(f.words, 1) + (own // ROWS * f.word(f.words, 4) + own % ROWS * number_bytes)
    with f.loop(0, size) as i:
        f.store(read_number(f, kind, first + i * (ROWS * number_bytes)) * factor, out + i * 4)


KERNELS: dict[str, WriteKernel] = {
    **{f"embed_{kind}": partial(_embed, layout=layout) for kind, layout in LAYOUTS.items()},
    **{f"embed_{kind}": partial(_embed_numbers, kind=kind) for kind in NUMBERS},
}
