"""Philox words for every row and counter; and draws of it for the kernels that sample.

At least: 32 bytes written a counter, some 60 integer operations each.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import launch

__all__ = ["draw_word", "philox4x32"]

_TILE = 256


def philox4x32(keys: Tensor, c0: Tensor, c1: Tensor) -> Tensor:
    n, m = keys.shape[0], c0.shape[0]
    words = torch.empty(n, m, 4, dtype=torch.int64, device=keys.device)
    if n and m:
        launch(
            _words_kernel,
            (n, triton.cdiv(m, _TILE)),
            keys,
            c0,
            c1,
            words,
            m,
            keys.stride(0),
            c0.stride(0),
            c1.stride(0),
            TILE=_TILE,
        )
    return words


@triton.jit
def _words_kernel(
    keys: tl.tensor,
    c0: tl.tensor,
    c1: tl.tensor,
    words: tl.tensor,
    m: tl.tensor,
    key_stride: tl.tensor,
    c0_stride: tl.tensor,
    c1_stride: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    first = tl.load(c0 + at.to(tl.int64) * c0_stride, mask=at < m, other=0).to(tl.uint32)
    second = tl.load(c1 + row * c1_stride).to(tl.uint32) + tl.zeros_like(first)
    zero = tl.zeros_like(first)
    w0, w1, w2, w3 = tl.philox(tl.load(keys + row * key_stride), first, second, zero, zero)
    out = words + (row * m + at) * 4
    tl.store(out, w0.to(tl.int64), mask=at < m)
    tl.store(out + 1, w1.to(tl.int64), mask=at < m)
    tl.store(out + 2, w2.to(tl.int64), mask=at < m)
    tl.store(out + 3, w3.to(tl.int64), mask=at < m)


@triton.jit
def draw_word(seed: tl.tensor, position: tl.tensor, draws: tl.tensor) -> tl.tensor:
    """uint32: word draws % 4 of Philox(seed, (draws / 4, position, 0, 0)), for a block of draws >= 0."""
    counters = (draws // 4).to(tl.uint32)
    zero = tl.zeros_like(counters)
    w0, w1, w2, w3 = tl.philox(seed, counters, position.to(tl.uint32) + zero, zero, zero)
    which = draws % 4
    return tl.where(which < 2, tl.where(which == 0, w0, w1), tl.where(which == 2, w2, w3))
