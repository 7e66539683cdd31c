"""Plans how a decode step's keys are split among programs: one launch for all layers of the step."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..decode_plan import GRAIN, PLAN_COLUMNS, Sharing
from .launch import bucket, has_pdl, launch, launch_next_and_wait


def plan_decode(rows: Tensor, seq_lens: Tensor, sharing: Sharing, window: int | None) -> Tensor:
    n, extra = seq_lens.shape[0], sharing.max_extra
    plan = torch.empty((n + extra, PLAN_COLUMNS), dtype=torch.int32, device=seq_lens.device)
    sizes = {"EXTRA": extra, "LEAST": sharing.least_chunk, "SEQS": bucket(n), "ITEMS": triton.next_power_of_2(extra)}
    sizes |= {"LENIENT": sharing.is_lenient, "COLUMNS": PLAN_COLUMNS, "GRAIN": GRAIN, "WINDOW": window or 0}
    launch(_plan_decode, (1,), rows, seq_lens, plan, n, **sizes, PDL=has_pdl())
    return plan


@triton.jit(do_not_specialize=["n"])
def _plan_decode(
    rows,
    seq_lens,
    plan,
    n,
    EXTRA: tl.constexpr,
    LEAST: tl.constexpr,
    SEQS: tl.constexpr,
    ITEMS: tl.constexpr,
    LENIENT: tl.constexpr,
    COLUMNS: tl.constexpr,
    GRAIN: tl.constexpr,
    WINDOW: tl.constexpr,
    PDL: tl.constexpr,
):
    launch_next_and_wait(PDL)
    i = tl.arange(0, SEQS)
    lens = tl.load(seq_lens + i, mask=i < n, other=0)
    row = tl.load(rows + i, mask=i < n, other=-1).to(tl.int32)
    keys = lens
    if WINDOW > 0:
        keys = tl.minimum(lens, WINDOW)
    share = tl.maximum(LEAST, tl.cdiv(tl.sum(keys.to(tl.int64), 0), EXTRA)).to(tl.int32)
    counts = tl.maximum(1, tl.cdiv(keys - share // 4 if LENIENT else keys, share))
    chunk = tl.cdiv(tl.maximum(1, keys), counts * GRAIN) * GRAIN
    counts = tl.where(i < n, tl.maximum(1, tl.cdiv(keys, chunk)), 0)
    ends = tl.cumsum(counts, 0)
    first = ends - counts
    most = tl.max(counts, 0)
    part = most * 0
    while part < most:
        item = plan + (first + part) * COLUMNS
        has = part < counts
        tl.store(item, i, mask=has)
        tl.store(item + 1, row, mask=has)
        tl.store(item + 2, lens, mask=has)
        tl.store(item + 3, lens - keys + part * chunk, mask=has)
        tl.store(item + 4, tl.minimum(lens - keys + (part + 1) * chunk, lens), mask=has)
        tl.store(item + 5, first, mask=has)
        tl.store(item + 6, counts, mask=has)
        part += 1
    rest = tl.sum(counts, 0) + tl.arange(0, ITEMS)
    tl.store(plan + rest * COLUMNS, tl.full((ITEMS,), -1, tl.int32), mask=rest < n + EXTRA)
