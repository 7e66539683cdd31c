"""The ban of what a grammar does not allow: only banned logits are written, and none is read.

At least: V / 8 bytes read a row and 4 written a banned token; 3 integer operations a token. The bytes may come from the
host's memory, by 50 GB/s (64 rows of 151,936 tokens: 24 us): each is read once.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .launch import launch

_TILE = 2048


def apply_bitmask(logits: Tensor, rows: Tensor, bitmask: Tensor) -> None:
    assert logits.stride(1) == 1 and rows.is_contiguous() and bitmask.stride(1) == 1
    vocab_size = logits.shape[1]
    if rows.shape[0]:
        grid = (rows.shape[0], triton.cdiv(vocab_size, _TILE))
        launch(_ban_kernel, grid, logits, rows, bitmask, vocab_size, logits.stride(0), bitmask.stride(0), TILE=_TILE)


@triton.jit(do_not_specialize=["rows", "bitmask"])
def _ban_kernel(
    logits: tl.tensor,
    rows: tl.tensor,
    bitmask: tl.tensor,
    vocab_size: tl.tensor,
    logits_stride: tl.tensor,
    mask_stride: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    i = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + i)
    if row < 0:
        return
    place = tl.program_id(1) * (TILE // 8) + tl.arange(0, TILE // 8)
    byte = tl.load(bitmask + i * mask_stride + place, mask=place * 8 < vocab_size, other=0).to(tl.int32)
    bit = tl.arange(0, 8)
    token = place[:, None] * 8 + bit[None, :]
    banned = ((byte[:, None] >> bit[None, :]) & 1) == 0
    minus_inf = tl.full((TILE // 8, 8), float("-inf"), tl.float32)
    tl.store(logits + row * logits_stride + token, minus_inf, mask=(token < vocab_size) & banned)
