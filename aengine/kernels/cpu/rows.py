"""Kernels that compute each row by itself: norms, codes of activations, gates, sums.

Rows are float32, [rows, size] one after another. A chunk is a row.
"""

from __future__ import annotations

from .compiler.emit import F32, I8, I16, I32, Function, Value
from .compiler.target import Target, WriteKernel
from .packed.layouts import BLOCK, LARGEST_INT16, LARGEST_PLANES

GROUP = 32
"""Activations that share a scale."""
LANES = 16


def rms_scale(f: Function, x: Value, size: Value, eps: Value) -> Value:
    """1 / sqrt(mean(x^2) + eps) of a row of ``size`` (int64) float32, which LANES divides."""
    total = f.variable(F32 * LANES, 0.0)
    with f.loop(0, size, LANES) as i:
        part = f.load(F32 * LANES, x + i * 4)
        total.set(f.fma(part, part, total.get()))
    mean = f.sum_lanes(total.get()) / f.float32(size)
    return f.like(mean, 1.0) / f.sqrt(mean + eps)


def _codes(f: Function, parts: list[Value], largest_code: int) -> tuple[Value, list[Value]]:
    """A scale for two vectors, and int32 codes of them, the largest of which is ``largest_code``."""
    magnitudes = [f.cast(f.absolute(part), I32 * LANES) for part in parts]  # as integers, in which NaN is the largest
    largest = f.cast(f.max_lanes(f.larger(*magnitudes)), F32)
    inverse = f.choose(largest > 0.0, f.like(largest, float(largest_code)) / largest, 0.0)
    return largest / largest_code, [f.to_int(f.nearest(part * inverse), I32 * LANES) for part in parts]


def store_codes(f: Function, parts: list[Value], codes: Value, meta: Value) -> None:
    """Store a group of activations, two vectors of LANES, as codes of 16 bits with a scale: 256 * high + low.

    The largest is LARGEST_PLANES; beside a NaN the scale is NaN. ``codes``: int8 high of all, then int8 low of all, of
    which none is -128: AVX2 negates them. ``meta``: float32 scale, float32 scale times the sum of codes, int32 sum of
    codes, and int32 sum of the first LANES.
    """
    scale, whole = _codes(f, parts, LARGEST_PLANES)
    for i, numbers in enumerate(whole):
        high = f.signed_shift(numbers + 128, 8)
        low = f.larger(numbers - (high << 8), -127)
        whole[i] = (high << 8) + low
        for plane, own in enumerate((high, low)):
            f.store(f.narrowed(own, I8 * LANES), codes + (BLOCK * plane + LANES * i))
    first = f.sum_lanes(whole[0])
    total = first + f.sum_lanes(whole[1])
    f.store(scale, meta)
    f.store(scale * f.float32(total), meta + 4)
    f.store(total, meta + 8)
    f.store(first, meta + 12)


def _quantise(f: Function, target: Target) -> None:
    """words: x, codes [rows, size], see `store_codes`, meta [rows, size / GROUP, 4], size."""
    size = f.word(f.words, 3)
    x = f.address(f.words, 0) + f.chunk * size * 4
    codes = f.address(f.words, 1) + f.chunk * size * 2
    meta = f.address(f.words, 2) + f.chunk * (size >> 1)
    with f.loop(0, size, GROUP) as i:
        parts = [f.load(F32 * LANES, x + (i * 4 + 64 * j)) for j in range(2)]
        store_codes(f, parts, codes + i * 2, meta + (i >> 1))


def _quantise_int16(f: Function, target: Target) -> None:
    """words: as of `quantise`, codes int16 of 14 bits; of the meta the scale is written."""
    size = f.word(f.words, 3)
    x = f.address(f.words, 0) + f.chunk * size * 4
    codes = f.address(f.words, 1) + f.chunk * size * 2
    meta = f.address(f.words, 2) + f.chunk * (size >> 1)
    with f.loop(0, size, GROUP) as i:
        parts = [f.load(F32 * LANES, x + (i * 4 + 64 * j)) for j in range(2)]
        scale, whole = _codes(f, parts, LARGEST_INT16)
        for j, numbers in enumerate(whole):
            f.store(f.narrowed(numbers, I16 * LANES), codes + (i * 2 + 2 * LANES * j))
        f.store(scale, meta + (i >> 1))


def _norm_quantise(f: Function, target: Target) -> None:
    """words: as of `quantise`, then weight float32 [size], eps."""
    size = f.word(f.words, 3)
    x = f.address(f.words, 0) + f.chunk * size * 4
    codes = f.address(f.words, 1) + f.chunk * size * 2
    meta = f.address(f.words, 2) + f.chunk * (size >> 1)
    weight, eps = f.address(f.words, 4), f.load(F32, f.words + 40)
    scale = rms_scale(f, x, size, eps)
    with f.loop(0, size, GROUP) as i:
        parts = []
        for j in range(2):
            place = i * 4 + 64 * j
            parts.append(f.load(F32 * LANES, x + place) * scale * f.load(F32 * LANES, weight + place))
        store_codes(f, parts, codes + i * 2, meta + (i >> 1))


def _norm(f: Function, target: Target) -> None:
    """words: x, out float32 [rows, size], size, weight float32 [size], eps."""
    size = f.word(f.words, 2)
    x, out = (f.address(f.words, i) + f.chunk * size * 4 for i in range(2))
    weight, eps = f.address(f.words, 3), f.load(F32, f.words + 32)
    scale = rms_scale(f, x, size, eps)
    with f.loop(0, size * 4, 4 * LANES) as place:
        f.store(f.load(F32 * LANES, x + place) * scale * f.load(F32 * LANES, weight + place), out + place)


def _layer_norm(f: Function, target: Target) -> None:
    """words: x, out float32 [rows, size], size, weight, bias float32 [size] or none, eps."""
    size = f.word(f.words, 2)
    x, out = (f.address(f.words, i) + f.chunk * size * 4 for i in range(2))
    weight, bias, eps = f.address(f.words, 3), f.address(f.words, 4), f.load(F32, f.words + 40)
    total, squares = (f.variable(F32 * LANES, 0.0) for _ in range(2))
    with f.loop(0, size * 4, 4 * LANES) as place:
        total.add(f.load(F32 * LANES, x + place))
    mean = f.sum_lanes(total.get()) / f.float32(size)
    with f.loop(0, size * 4, 4 * LANES) as place:
        off = f.load(F32 * LANES, x + place) - mean
        squares.set(f.fma(off, off, squares.get()))
    scale = f.like(mean, 1.0) / f.sqrt(f.sum_lanes(squares.get()) / f.float32(size) + eps)
    with f.loop(0, size * 4, 4 * LANES) as place:
        normed = (f.load(F32 * LANES, x + place) - mean) * scale * f.load(F32 * LANES, weight + place)
        f.store(normed, out + place)
        with f.when(f.word(f.words, 4).differs(0)):
            f.store(normed + f.load(F32 * LANES, bias + place), out + place)


KERNELS: dict[str, WriteKernel] = {
    "layer_norm": _layer_norm,
    "norm": _norm,
    "quantise": _quantise,
    "quantise_int16": _quantise_int16,
    "norm_quantise": _norm_quantise,
}
