"""Numbers that are stored in fewer bits than they are computed with: float32 of them, and the nearest of float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from .emit import BF16, F16, F32, I8, I16, I32, Function, Type, Value


class Dtype(NamedTuple):
    """How a dtype is stored."""

    stored: Type
    to_float32: Callable[[Function, Value, int], Value]  # a vector of so many lanes
    of_float32: Callable[[Function, Value, int], Value]  # the nearest, ties to even

    def load(self, f: Function, place: Value, lanes: int) -> Value:
        """A vector of float32."""
        return self.to_float32(f, f.load(self.stored * lanes, place), lanes)

    def store(self, f: Function, value: Value, place: Value, lanes: int) -> None:
        """Store a vector of float32."""
        f.store(self.of_float32(f, value, lanes), place)


def _of_bfloat16(f: Function, value: Value, lanes: int) -> Value:
    bits = f.cast(value, I32 * lanes)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return f.narrowed(f.choose(value.equals(value), rounded, 0x7FC0), BF16 * lanes)


def _e4m3(f: Function, value: Value, lanes: int) -> Value:
    """float32 of bytes: a float16 of the same bits is 2^-8 of them, as exponents begin 8 lower."""
    bits = f.widened(value, I16 * lanes)
    size = bits & 0x7F
    size = f.choose(size.equals(0x7F), f.like(size, 0x7E00), size << 7)
    return f.float32(f.cast(size | bits & -(2**15), F16 * lanes)) * 256.0


def _of_e4m3(f: Function, value: Value, lanes: int) -> Value:
    """Bytes of float32; of what is beyond the largest, the largest."""
    size = f.smaller(f.absolute(value), 448.0)
    bits = f.cast(size, I32 * lanes)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    small = f.to_int(f.nearest(size * 512.0), I32 * lanes)  # in steps of the smallest number
    codes = f.choose(size < 2.0**-6, small, normal)
    codes = f.choose(value.equals(value), codes, 0x7F)
    return f.narrowed(codes | (f.cast(value, I32 * lanes) >> 24) & 0x80, I8 * lanes)


DTYPES = {
    "float32": Dtype(F32, lambda f, value, lanes: value, lambda f, value, lanes: value),
    "float16": Dtype(F16, lambda f, value, lanes: f.float32(value), lambda f, value, n: f.to_half(value, F16 * n)),
    "bfloat16": Dtype(BF16, lambda f, value, lanes: f.wide(value), _of_bfloat16),
    "float8_e4m3fn": Dtype(I8, _e4m3, _of_e4m3),
}
