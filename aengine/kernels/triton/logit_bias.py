"""Single tokens of single rows: a program a row.

At least: 16 bytes a biased token, 8 a banned one; for most rows one word.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .launch import has_pdl, launch, launch_next_and_wait

_TILE = 256


def apply_lists(logits: Tensor, rows: Tensor, lists: Tensor, num_tokens: Tensor, header: int, most_biases: int) -> None:
    assert logits.stride(1) == lists.stride(1) == 1
    n = rows.shape[0]
    if n:
        where = (logits, logits.stride(0), rows, lists, lists.stride(0), num_tokens, num_tokens.stride(0))
        constants = {"HEADER": header, "MOST_BIASES": most_biases, "TILE": _TILE, "PDL": has_pdl()}
        launch(_list_kernel, (n,), *where, **constants)


@triton.jit(do_not_specialize_on_alignment=["rows", "lists", "num_tokens"])
def _list_kernel(
    logits: tl.tensor,
    logits_stride: tl.tensor,
    rows: tl.tensor,
    lists: tl.tensor,
    lists_stride: tl.tensor,
    num_tokens: tl.tensor,
    num_tokens_stride: tl.tensor,
    HEADER: tl.constexpr,
    MOST_BIASES: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    launch_next_and_wait(PDL)
    b = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + b)
    if row >= 0:
        own = lists + row * lists_stride
        num_biases = tl.load(own)
        num_banned = tl.load(own + 1)
        num_banned = tl.where(tl.load(num_tokens + b * num_tokens_stride) < tl.load(own + 2), num_banned, 0)
        x = logits + b * logits_stride
        i = 0
        while i < num_biases:
            at = i + tl.arange(0, TILE)
            token = tl.load(own + HEADER + at, mask=at < num_biases, other=0)
            value = tl.load(own + HEADER + MOST_BIASES + at, mask=at < num_biases, other=0)
            biased = tl.load(x + token, mask=at < num_biases, other=0.0) + value.to(tl.float32, bitcast=True)
            tl.store(x + token, biased, mask=at < num_biases)
            i += TILE
        tl.debug_barrier()  # a token may have a bias and be banned
        i = 0
        while i < num_banned:
            at = i + tl.arange(0, TILE)
            token = tl.load(own + HEADER + 2 * MOST_BIASES + at, mask=at < num_banned, other=0)
            tl.store(x + token, tl.full((TILE,), float("-inf"), tl.float32), mask=at < num_banned)
            i += TILE
