"""How a decode step's keys are shared out among programs: one program that all layers of the step profit from."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..decode_attention import DecodePlan, Sharing
from .launch import bucket, has_pdl, launch

__all__ = ["plan_decode"]


def plan_decode(seq_lens: Tensor, sharing: Sharing) -> DecodePlan:
    n, device, extra = seq_lens.shape[0], seq_lens.device, sharing.max_extra
    plan = DecodePlan(
        torch.empty(n + extra, dtype=torch.int32, device=device),
        torch.empty(n + 1, dtype=torch.int32, device=device),
        torch.empty(1, dtype=torch.int32, device=device),
    )
    sizes = {"EXTRA": extra, "LEAST": sharing.least_chunk, "SEQS": bucket(n), "ITEMS": triton.next_power_of_2(extra)}
    launch(_plan_decode, (1,), seq_lens, *plan, n, **sizes, PDL=has_pdl())
    return plan


@triton.jit(do_not_specialize=["n"])
def _plan_decode(
    seq_lens,
    items,
    starts,
    chunk_at,
    n,
    EXTRA: tl.constexpr,
    LEAST: tl.constexpr,
    SEQS: tl.constexpr,
    ITEMS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    i = tl.arange(0, SEQS)
    lens = tl.load(seq_lens + i, mask=i < n, other=0)
    share = tl.cdiv(tl.sum(lens.to(tl.int64), 0), EXTRA)
    chunk = (tl.maximum(1, tl.cdiv(share, LEAST)) * LEAST).to(tl.int32)
    tl.store(chunk_at, chunk)
    counts = tl.where(i < n, tl.maximum(1, tl.cdiv(lens, chunk)), 0)
    ends = tl.cumsum(counts, 0)
    tl.store(starts + i, ends - counts, mask=i < n)
    tl.store(starts + n, tl.sum(counts, 0))
    most = tl.max(counts, 0)
    part = most * 0
    while part < most:
        tl.store(items + ends - counts + part, i, mask=part < counts)
        part += 1
    rest = tl.sum(counts, 0) + tl.arange(0, ITEMS)
    tl.store(items + rest, tl.full((ITEMS,), -1, tl.int32), mask=rest < n + EXTRA)
