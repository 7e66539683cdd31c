"""Plans how a decode step's keys are split among programs: one launch for all layers of the step."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..decode_plan import GRAIN, MOST_SHARED_PARTS, PLAN_COLUMNS, DecodeWorkspace
from ..shared_prefix import SEQ_COLUMNS, SharedKeys
from .launch import bucket, has_pdl, launch, launch_next_and_wait


def plan_decode(
    rows: Tensor, seq_lens: Tensor, workspace: DecodeWorkspace, window: int | None, shared: SharedKeys | None
) -> Tensor:
    n, sharing = seq_lens.shape[0], workspace.sharing(len(seq_lens))
    extra = sharing.max_extra
    plan = torch.empty((n + extra, PLAN_COLUMNS), dtype=torch.int32, device=seq_lens.device)
    sizes = {"EXTRA": extra, "LEAST": sharing.least_chunk, "SEQS": bucket(n), "ITEMS": triton.next_power_of_2(extra)}
    sizes |= {"LENIENT": sharing.is_lenient, "COLUMNS": PLAN_COLUMNS, "GRAIN": GRAIN, "WINDOW": window or 0}
    sizes |= {"SHARED": SEQ_COLUMNS, "MOST_SHARED": MOST_SHARED_PARTS}
    of_seqs = None if shared is None else shared.of_seqs
    launch(_plan_decode, (1,), rows, seq_lens, of_seqs, plan, n, workspace.num_items, **sizes, PDL=has_pdl())
    return plan


@triton.jit(do_not_specialize=["n", "first_shared"])
def _plan_decode(
    rows,
    seq_lens,
    shared,
    plan,
    n,
    first_shared,
    EXTRA: tl.constexpr,
    LEAST: tl.constexpr,
    SEQS: tl.constexpr,
    ITEMS: tl.constexpr,
    LENIENT: tl.constexpr,
    COLUMNS: tl.constexpr,
    GRAIN: tl.constexpr,
    WINDOW: tl.constexpr,
    SHARED: tl.constexpr,
    MOST_SHARED: tl.constexpr,
    PDL: tl.constexpr,
):
    launch_next_and_wait(PDL)
    i = tl.arange(0, SEQS)
    lens = tl.load(seq_lens + i, mask=i < n, other=0)
    row = tl.load(rows + i, mask=i < n, other=-1).to(tl.int32)
    keys = lens
    if WINDOW > 0:
        keys = tl.minimum(lens, WINDOW)
    parts = lens
    if shared is not None:
        keys = tl.maximum(0, lens - tl.load(shared + i * SHARED, mask=i < n, other=0))
        num_parts = tl.load(shared + i * SHARED + 2, mask=i < n, other=0)
        parts = (first_shared + tl.load(shared + i * SHARED + 1, mask=i < n, other=0)) * MOST_SHARED + num_parts
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
        if shared is not None:
            tl.store(item + 7, parts, mask=has)
        part += 1
    rest = tl.sum(counts, 0) + tl.arange(0, ITEMS)
    tl.store(plan + rest * COLUMNS, tl.full((ITEMS,), -1, tl.int32), mask=rest < n + EXTRA)
