"""Rows of float32 between products, for layers of which no product does it: norms that are added, gates; copies.

As kernels/rms_norm.py and activation.py. A chunk is a row, whose size LANES divides.
"""

from __future__ import annotations

from .compiler.emit import F32, Function
from .compiler.target import Target, WriteKernel
from .packed.products import activated
from .rows import LANES, rms_scale


def _add_norm(f: Function, target: Target) -> None:
    """words: residual, which changes, and x, float32 [rows, size], size, weight float32 [size], eps."""
    size = f.word(f.words, 2)
    residual, x = (f.address(f.words, i) + f.chunk * size * 4 for i in range(2))
    weight, scale = f.address(f.words, 3), rms_scale(f, x, size, f.load(F32, f.words + 32))
    with f.loop(0, size * 4, 4 * LANES) as place:
        normed = f.load(F32 * LANES, x + place) * scale * f.load(F32 * LANES, weight + place)
        f.store(f.load(F32 * LANES, residual + place) + normed, residual + place)


def _act_and_mul(f: Function, target: Target, activation: str) -> None:
    """words: gate and up float32 [rows, 2 * size], out float32 [rows, size], size."""
    size = f.word(f.words, 2)
    gate, out = f.address(f.words, 0) + f.chunk * size * 8, f.address(f.words, 1) + f.chunk * size * 4
    up = gate + size * 4
    with f.loop(0, size * 4, 4 * LANES) as place:
        own = activated(f, f.load(F32 * LANES, gate + place), activation)
        f.store(own * f.load(F32 * LANES, up + place), out + place)


def _copy_rows(f: Function, target: Target) -> None:
    """words: x, out, float32 [rows, size], size."""
    size = f.word(f.words, 2)
    x, out = (f.address(f.words, i) + f.chunk * size * 4 for i in range(2))
    with f.loop(0, size * 4, 4 * LANES) as place:
        f.store(f.load(F32 * LANES, x + place), out + place)


KERNELS: dict[str, WriteKernel] = {"add_norm": _add_norm, "act_and_mul": _act_and_mul, "copy_rows": _copy_rows}
