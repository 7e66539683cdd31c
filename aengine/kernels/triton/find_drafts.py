"""A program for each row: it reads all tokens of the row, 128 KB of a long one."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .launch import bucket, has_pdl, launch, launch_next_and_wait

_BLOCK = 1024


def find_drafts(token_ids: Tensor, num_tokens: Tensor, rows: Tensor, counts: Tensor, most: int) -> None:
    strides = (token_ids.stride(0), num_tokens.stride(0))
    sizes = {"BLOCK": _BLOCK, "MOST": bucket(most), "PDL": has_pdl()}
    launch(_find_drafts, (rows.shape[0],), token_ids, num_tokens, rows, counts, *strides, **sizes)


@triton.jit(do_not_specialize_on_alignment=["num_tokens", "rows", "counts"])
def _find_drafts(
    token_ids,
    num_tokens,
    rows,
    counts,
    stride_ids,
    stride_num,
    BLOCK: tl.constexpr,
    MOST: tl.constexpr,
    PDL: tl.constexpr,
):
    launch_next_and_wait(PDL)
    row = tl.load(rows + tl.program_id(0))
    count = tl.load(counts + tl.program_id(0))
    ids = token_ids + row * stride_ids
    end = tl.load(num_tokens + row * stride_num)
    first = tl.load(ids + end - 3, mask=end > 3, other=-1)
    second = tl.load(ids + end - 2, mask=end > 3, other=-1)
    third = tl.load(ids + end - 1)
    source = end * 0  # where the tokens after the last match are; 0: there is none
    begin = end * 0
    while begin < end - 3:
        at = begin + tl.arange(0, BLOCK)
        inside = at < end - 3
        is_match = inside & (tl.load(ids + at, mask=inside, other=-1) == first)
        is_match = is_match & (tl.load(ids + at + 1, mask=inside, other=-1) == second)
        is_match = is_match & (tl.load(ids + at + 2, mask=inside, other=-1) == third)
        source = tl.maximum(source, tl.max(tl.where(is_match, at + 3, 0), 0))
        begin += BLOCK
    source = tl.where(source > 0, source, end - 1)
    place = tl.arange(0, MOST)
    token = tl.load(ids + source + place % (end - source), mask=place < count, other=0)
    tl.store(ids + end + place, token, mask=place < count)
