"""Single tokens of single rows: a lane a pair.

At least: 16 bytes a pair for its place, and 4 (ban) or 12 (bias) for the logit and its value; one addition.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .launch import launch

__all__ = ["add_bias", "ban_tokens"]

_TILE = 256


def add_bias(logits: Tensor, rows: Tensor, token_ids: Tensor, values: Tensor) -> None:
    _launch(logits, rows, token_ids, values)


def ban_tokens(logits: Tensor, rows: Tensor, token_ids: Tensor) -> None:
    _launch(logits, rows, token_ids, None)


def _launch(logits: Tensor, rows: Tensor, token_ids: Tensor, values: Tensor | None) -> None:
    assert logits.stride(1) == 1 and rows.is_contiguous() and token_ids.is_contiguous()
    assert values is None or values.is_contiguous()
    m = rows.shape[0]
    if m:
        stride, given = logits.stride(0), logits if values is None else values
        grid = (triton.cdiv(m, _TILE),)
        launch(_pair_kernel, grid, logits, rows, token_ids, given, m, stride, BAN=values is None, TILE=_TILE)


@triton.jit(do_not_specialize=["rows", "token_ids", "values", "m"])
def _pair_kernel(
    logits: tl.tensor,
    rows: tl.tensor,
    token_ids: tl.tensor,
    values: tl.tensor,
    m: tl.tensor,
    stride: tl.tensor,
    BAN: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    is_in = i < m
    place = logits + tl.load(rows + i, mask=is_in, other=0) * stride + tl.load(token_ids + i, mask=is_in, other=0)
    if BAN:
        tl.store(place, tl.full((TILE,), float("-inf"), tl.float32), mask=is_in)
    else:
        # Atomic: a pair may come twice.
        tl.atomic_add(place, tl.load(values + i, mask=is_in, other=0.0), mask=is_in, sem="relaxed")
