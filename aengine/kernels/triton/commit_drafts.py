"""A program for each position; that of a row's first one verifies all of the row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..step_inputs import ScalarColumns
from .launch import bucket, has_pdl, launch, launch_next_and_wait


def commit_drafts(
    token_ids: Tensor,
    scalars: Tensor,
    columns: ScalarColumns,
    rows: Tensor,
    places: Tensor,
    sampled: Tensor,
    checks: Tensor,
    published: Tensor,
    cursor: Tensor,
) -> None:
    """Launch the kernel; the caller advances the slot."""
    n = rows.shape[0]
    launch(
        _commit_drafts,
        (n,),
        token_ids,
        scalars,
        rows,
        places,
        sampled,
        checks.view(torch.int32),
        published,
        cursor,
        n,
        token_ids.stride(0),
        scalars.stride(0),
        WIDTH=published.shape[2],
        TOKENS=columns.num_tokens,
        COMPUTED=columns.num_computed_tokens,
        BLOCK=bucket(n),
        PDL=has_pdl(),
    )


_MOVING = ["rows", "places", "sampled", "checks", "published"]


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=_MOVING)
def _commit_drafts(
    token_ids,
    scalars,
    rows,
    places,
    sampled,
    checks,
    published,
    cursor,
    n,
    stride_ids,
    stride_scalars,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    COMPUTED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    launch_next_and_wait(PDL)
    first = tl.program_id(0)
    row = tl.load(rows + first)
    out = published + tl.load(cursor) * (2 * WIDTH)
    if row < 0:
        tl.store(out + first, -1)
        tl.store(out + WIDTH + first, 0)
    elif tl.load(places + first) == 0:
        place = tl.arange(0, BLOCK)
        i = first + place
        own = tl.load(rows + i, mask=i < n, other=-1) == row  # a row has its positions side by side
        has_draft = (tl.load(rows + i + 1, mask=i + 1 < n, other=-1) == row) & own
        end = tl.load(scalars + row * stride_scalars + TOKENS)
        token = tl.load(sampled + i, mask=own, other=0).to(tl.int32)
        draft = tl.load(token_ids + row * stride_ids + end + place, mask=has_draft, other=0)
        is_miss = (has_draft & (draft != token)).to(tl.int32)
        accepted = own & (tl.cumsum(is_miss, 0) == is_miss)
        count = tl.sum(accepted.to(tl.int32), 0)
        tl.debug_barrier()  # every warp has read the drafts and the length before they are overwritten
        tl.store(token_ids + row * stride_ids + end + place, token, mask=accepted)
        tl.store(scalars + row * stride_scalars + TOKENS, end + count)
        tl.store(scalars + row * stride_scalars + COMPUTED, end + count - 1)
        tl.store(out + i, tl.where(accepted, token, -1), mask=own)
        tl.store(out + WIDTH + i, tl.load(checks + i, mask=own, other=0), mask=own)
