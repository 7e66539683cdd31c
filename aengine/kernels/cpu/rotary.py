"""Prepares a step's tokens for attention: norms of q and k, rotary, k and v into the cache. A chunk is a token.

As kernels/write_qkv.py, which is the reference, over float32 rows.
"""

from __future__ import annotations

from .compiler.dtypes import DTYPES
from .compiler.emit import F32, Function, Value
from .compiler.target import Target, WriteKernel
from .rows import LANES, rms_scale


def _write_qkv(f: Function, target: Target, style: str, dtype: str) -> None:
    """words: as `write_qkv` in ops.py lays them down. ``style``: "halves" or "interleaved"; ``dtype``: of the cache,
    "float8_e4m3fn" with scales."""
    words = f.words
    num_heads, num_kv_heads, head_dim = (f.word(words, i) for i in (3, 4, 5))
    position, slot = (f.word(f.address(words, i) + f.chunk * 8, 0) for i in (1, 2))
    size = head_dim * 4
    q_and_k = num_heads + num_kv_heads
    heads = f.address(words, 0) + f.chunk * (q_and_k + num_kv_heads) * size
    half, query_scale = f.word(words, 7), f.word(words, 8)
    table = f.address(words, 6) + position * half * 8  # cosines, then sines
    with f.loop(0, q_and_k) as i:
        x = heads + i * size
        is_query = i < num_heads
        norm = f.choose(is_query, f.word(words, 9), f.word(words, 10))
        with f.when(norm.differs(0)):
            weight = f.choose(is_query, f.address(words, 9), f.address(words, 10))
            _norm(f, x, weight, head_dim, f.load(F32, words + 88))
        with f.when(f.word(words, 6).differs(0)):
            (_rotate_pairs if style == "interleaved" else _rotate_halves)(f, x, table, half)
        with f.when(f.choose(is_query, query_scale, 0).differs(0)):
            scale = f.load(F32, f.address(words, 8) + position * 4)
            with f.loop(0, size, LANES * 4) as place:
                f.store(f.load(F32 * LANES, x + place) * scale, x + place)
    with f.when(slot >= 0):
        block_size, block_stride, token_stride, kv_stride, head_stride = (f.word(words, i) for i in range(13, 18))
        token = f.address(words, 12) + slot // block_size * block_stride + slot % block_size * token_stride
        for which, first, place in ((0, num_heads, token), (1, q_and_k, token + kv_stride)):
            with f.loop(0, num_kv_heads) as i:
                divisor = None
                if dtype == "float8_e4m3fn":
                    divisor = f.load(F32, f.address(words, 18) + (num_kv_heads * which + i) * 4)
                _write(f, heads + (first + i) * size, place + i * head_stride, head_dim, dtype, divisor)


def _norm(f: Function, x: Value, weight: Value, size: Value, eps: Value) -> None:
    scale = rms_scale(f, x, size, eps)
    with f.loop(0, size * 4, LANES * 4) as place:
        f.store(f.load(F32 * LANES, x + place) * scale * f.load(F32 * LANES, weight + place), x + place)


def _turned(f: Function, first: Value, second: Value, cos: Value, sin: Value) -> tuple[Value, Value]:
    """A pair turned, each product rounded once more as torch's addcmul does."""
    return f.fma(f.like(second, 0.0) - second, sin, first * cos), f.fma(first, sin, second * cos)


def _rotate_halves(f: Function, x: Value, table: Value, half: Value) -> None:
    """Turn element i with i + half of a head."""
    with f.loop(0, half, LANES) as i:
        mask = f.lane_mask(half - i, LANES)
        places = [x + i * 4, x + (i + half) * 4, table + i * 4, table + (i + half) * 4]
        pair = _turned(f, *(f.load_lanes(F32 * LANES, place, mask) for place in places))
        for turned, place in zip(pair, places, strict=False):
            f.store_lanes(turned, place, mask)


def _rotate_pairs(f: Function, x: Value, table: Value, half: Value) -> None:
    """Turn element 2i with 2i + 1 of a head."""
    with f.loop(0, half, LANES) as i:
        left = half - i
        mask, places = f.lane_mask(left, LANES), [x + i * 8, x + (i * 8 + LANES * 4)]
        masks = [f.lane_mask(left * 2 - j * LANES, LANES) for j in range(2)]
        both = [f.load_lanes(F32 * LANES, place, own) for place, own in zip(places, masks, strict=True)]
        first, second = (f.shuffle(both[0], both[1], range(j, 2 * LANES, 2)) for j in range(2))
        cos, sin = (f.load_lanes(F32 * LANES, table + place, mask) for place in (i * 4, (i + half) * 4))
        pair = _turned(f, first, second, cos, sin)
        for j in range(2):
            lanes = [lane // 2 + lane % 2 * LANES for lane in range(j * LANES, (j + 1) * LANES)]
            f.store_lanes(f.shuffle(pair[0], pair[1], lanes), places[j], masks[j])


def _write(f: Function, x: Value, place: Value, size: Value, dtype: str, divisor: Value | None) -> None:
    with f.loop(0, size, LANES) as i:
        numbers = f.load(F32 * LANES, x + i * 4)
        stored = numbers if divisor is None else numbers / divisor
        DTYPES[dtype].store(f, stored, place + i * DTYPES[dtype].stored.size, LANES)


KERNELS: dict[str, WriteKernel] = {"write_qkv": _write_qkv}
