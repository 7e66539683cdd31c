"""The ban of what a grammar does not allow: only banned logits are written, and none is read.

At least: V / 8 bytes read a row and 4 written a banned token; 3 integer operations a token.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .launch import launch

__all__ = ["apply_bitmask"]

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
    token = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_in = token < vocab_size
    byte = tl.load(bitmask + i * mask_stride + token // 8, mask=is_in, other=0).to(tl.int32)
    banned = ((byte >> (token % 8)) & 1) == 0
    place = logits + row * logits_stride + token
    tl.store(place, tl.full((TILE,), float("-inf"), tl.float32), mask=is_in & banned)
