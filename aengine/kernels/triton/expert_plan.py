"""Sorting pairs by expert: an expert a program, which counts the pairs of all and then places its own, in their order.

Bytes: 8 * pairs * num_experts, all but the first 4 * pairs out of the L2 cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..expert_tilings import ExpertShape, ExpertTiling, choose_tiling
from ..expert_types import ExpertBlocks, ExpertPlan, Routing
from ..grouped_codes import CodeKind
from .launch import device_name, gdc_launch_dependents, gdc_wait, has_pdl, launch, only_compiles

_CHUNKS = (64, 256, 512, 2048, 4096)
"""Pairs at a time. All are compiled ahead with each size of blocks: which go together depends on the step."""


def plan_experts(
    routing: Routing,
    shape: ExpertShape,
    tiling: ExpertTiling | None,
    is_partial: bool,
    can_group: bool,
    kind: CodeKind | None,
) -> ExpertPlan:
    ids = routing.expert_ids
    if tiling is None:
        tiling = choose_tiling(device_name(), shape, ids.shape[0], can_group, kind)
    blocks = None if tiling.way == "pairs" else _sort(ids, shape.num_experts, tiling.block_m, is_partial)
    return ExpertPlan(routing, shape, [], tiling, blocks, is_partial)


def sort_by_bin(bins: Tensor, num_bins: int, block_m: int) -> tuple[Tensor, Tensor]:
    """Return the places of ``bins`` (int32 [n], below ``num_bins``) by bin, in blocks of ``block_m`` of one bin each:
    int32 [blocks * block_m], n where there is none; and the bin of each block, int32 [blocks], -1 for those past all.
    """
    blocks = _sort(bins, num_bins, block_m, is_partial=False)
    return blocks.order, blocks.experts


def _sort(ids: Tensor, num_experts: int, block_m: int, is_partial: bool) -> ExpertBlocks:
    count = ids.numel()
    num_blocks = (count + min(count, num_experts) * (block_m - 1)) // block_m  # each expert fills up one block at most
    # Zeros if torch's product reads all of ``order``: pairs of other ranks' experts have no slot in it.
    make = torch.zeros if block_m == 1 and is_partial else torch.empty
    order = make(num_blocks * block_m, dtype=torch.int32, device=ids.device)
    slots, experts = torch.empty_like(ids).flatten(), torch.empty(num_blocks, dtype=torch.int32, device=ids.device)
    ends = torch.empty(num_experts, dtype=torch.int32, device=ids.device)
    fitting = next((chunk for chunk in _CHUNKS if count <= chunk), _CHUNKS[-1])
    for chunk in _CHUNKS if only_compiles() else (fitting,):
        launch(
            _sort_pairs,
            (num_experts,),
            ids,
            order,
            slots,
            experts,
            ends,
            count,
            num_blocks,
            E=num_experts,
            BINS=triton.next_power_of_2(num_experts),
            BM=block_m,
            CHUNK=chunk,
            PDL=has_pdl(),
            num_warps=4 if chunk <= 256 else 16,
        )
    return ExpertBlocks(order, slots, experts, ends)


@triton.jit(do_not_specialize=["count", "num_blocks"])
def _sort_pairs(
    ids_ptr, order_ptr, slots_ptr, experts_ptr, ends_ptr, count, num_blocks, E: tl.constexpr, BINS: tl.constexpr,
    BM: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Blocks of an expert follow those of the expert before; the last program marks what is past all."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    expert = tl.program_id(0)
    i = tl.arange(0, CHUNK)
    counts = tl.zeros((BINS,), tl.int32)
    num_others = 0  # past the last pair, and of experts that are not here
    for start in range(0, count, CHUNK):
        ids = tl.load(ids_ptr + start + i, mask=start + i < count, other=E)
        counts += tl.histogram(tl.where(ids < E, ids, 0), BINS)
        num_others += tl.sum((ids >= E).to(tl.int32), 0)
    e = tl.arange(0, BINS)
    counts -= tl.where(e == 0, num_others, 0)
    blocks = (counts + BM - 1) // BM
    first = tl.sum(tl.where(e < expert, blocks, 0), 0)
    num_own = tl.sum(tl.where(e == expert, blocks, 0), 0)
    slot = first * BM
    for start in range(0, count, CHUNK):
        is_own = tl.load(ids_ptr + start + i, mask=start + i < count, other=E) == expert
        ranks = tl.cumsum(is_own.to(tl.int32), 0)
        tl.store(order_ptr + slot + ranks - 1, start + i, mask=is_own)
        tl.store(slots_ptr + start + i, slot + ranks - 1, mask=is_own)
        slot += tl.sum(is_own.to(tl.int32), 0)
    end = (first + num_own) * BM
    if BM > 1:
        m = tl.arange(0, BM)
        tl.store(order_ptr + slot + m, tl.zeros_like(m) + count, mask=slot + m < end)
    tl.store(ends_ptr + expert, end)
    for start in range(0, num_own, CHUNK):
        tl.store(experts_ptr + first + start + i, tl.zeros_like(i) + expert, mask=start + i < num_own)
    if expert == E - 1:
        for start in range(first + num_own, num_blocks, CHUNK):
            tl.store(experts_ptr + start + i, tl.zeros_like(i) - 1, mask=start + i < num_blocks)
