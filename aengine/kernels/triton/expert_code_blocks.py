"""The product of blocks of slots, each of one expert, by codes with a scale a group: as expert_blocks.py, but codes
become numbers of 16 bits, for the tensor cores, as they are multiplied.

A scale of a wide group (64 columns or more, so of AWQ and of FP8 in blocks) is applied to sums over the group, in
float32. That of a narrow one is part of the number, which is rounded to the dtype of x once (of MXFP4 in bfloat16 it is
exact): there are too many sums otherwise.

Bytes: the codes and scales of each touched expert once for every block of its slots, all but the first out of the L2
cache; operations: 2 N K for every slot of a block that is used, and some 5 to make a number of a code.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..expert_tilings import ProductTile
from ..expert_types import ExpertCodes, ExpertGate, ExpertPlan
from .expert_gate import gate_constants, gated
from .grouped_parts import constants, pointers
from .grouped_tiles import add_tile, way_of
from .launch import has_pdl, launch, launch_next_and_wait, max_shared_memory

__all__ = ["multiply_blocks"]

_WIDE_GROUP = 64


def multiply_blocks(
    x: Tensor,
    matrices: ExpertCodes,
    plan: ExpertPlan,
    gate: ExpertGate | None,
    out: Tensor,
    tile: ProductTile,
    rows_of_x: int,
) -> None:
    """Compute out [pairs, size] for x [pairs / rows_of_x, in_features]."""
    assert plan.tiling is not None and plan.blocks is not None
    size, given, block_m = out.shape[1], constants(matrices.codes), plan.tiling.block_m
    way = way_of(matrices.codes, x.dtype)
    tile = _fit(tile, size, given["K"], given["GROUP"] if way == "sums" else given["K"], given["UNIT"])
    rows = tile.block_n * (1 if gate is None else 2)
    while _shared_bytes(tile, block_m, rows, given["UNIT"], x.element_size()) > max_shared_memory():
        if tile.num_stages > 2:
            tile = tile._replace(num_stages=tile.num_stages - 1)
        else:
            tile = tile._replace(block_k=tile.block_k // 2)
    launch(
        _multiply_blocks,
        (triton.cdiv(size, tile.block_n), len(plan.blocks.experts)),
        x,
        *pointers(matrices.codes),
        out,
        matrices.bias,
        plan.blocks.order,
        plan.blocks.experts,
        plan.num_pairs,
        **given,
        N=size,
        ALL=matrices.shape[1],
        PAIRS_A_ROW=rows_of_x,
        BM=block_m,
        BN=tile.block_n,
        BK=tile.block_k,
        **gate_constants(gate),
        BIAS=matrices.bias is not None,
        WAY=way,
        EVEN=size % tile.block_n == 0 and given["K"] % tile.block_k == 0,
        PDL=has_pdl(),
        STAGES=tile.num_stages,
        num_warps=tile.num_warps,
    )


def _fit(tile: ProductTile, n: int, k: int, group: int, unit: int) -> ProductTile:
    """Return the tile cut to the shape. ``group``: columns that a program's block may have at most."""
    block_k = min(tile.block_k, triton.next_power_of_2(k), group if group < k else tile.block_k)
    return tile._replace(block_n=min(tile.block_n, max(16, triton.next_power_of_2(n))), block_k=max(unit, 16, block_k))


def _shared_bytes(tile: ProductTile, block_m: int, rows: int, unit: int, itemsize: int) -> int:
    """Shared memory needed at most: codes and inputs of some stages, and numbers; or the outputs on their way."""
    stage = rows * tile.block_k * 16 // unit + block_m * tile.block_k * itemsize
    return max(stage * tile.num_stages + rows * tile.block_k * itemsize, 4 * rows * block_m)


@triton.jit
def _load(pointers, mask):
    """What there is at ``pointers``, and zeros where not ``mask``; None: everywhere."""
    if mask is None:
        y = tl.load(pointers)
    else:
        y = tl.load(pointers, mask=mask, other=0.0)
    return y


@triton.jit(do_not_specialize=["num_pairs"])
def _multiply_blocks(
    x_ptr, w_ptr, scale_ptr, zero_ptr, offset_ptr, row_scale_ptr, out_ptr, bias_ptr, order_ptr, experts_ptr,
    num_pairs, K: tl.constexpr, KIND: tl.constexpr, UNIT: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    ROWS: tl.constexpr, RAISED: tl.constexpr, N: tl.constexpr, ALL: tl.constexpr, PAIRS_A_ROW: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GATE: tl.constexpr, INTERLEAVED: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, BIAS: tl.constexpr, WAY: tl.constexpr, EVEN: tl.constexpr,
    PDL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    launch_next_and_wait(PDL)
    expert = tl.load(experts_ptr + tl.program_id(1))
    if expert < 0:
        return
    # With a gate, the rows of gate and up of a feature are side by side in the tile, as in expert_blocks.py.
    WIDE: tl.constexpr = 2 * BN if GATE != "" else BN
    PER: tl.constexpr = 4 if UNIT == 32 else 16  # elements of a unit
    WIDTH: tl.constexpr = K // UNIT * PER  # and of a row
    n = tl.program_id(0) * WIDE + tl.arange(0, WIDE)
    is_row = n < ALL
    if GATE != "" and not INTERLEAVED:
        n = n % 2 * N + n // 2
    pairs = tl.load(order_ptr + tl.program_id(1).to(tl.int64) * BM + tl.arange(0, BM))
    is_pair = pairs < num_pairs
    rows = (pairs // PAIRS_A_ROW).to(tl.int64)
    n += expert * ALL  # rows of all experts'
    element = tl.arange(0, BK // UNIT * PER)
    k = tl.arange(0, BK)
    w_ptrs = w_ptr + n[:, None].to(tl.int64) * WIDTH + element[None, :]
    x_ptrs = x_ptr + rows[:, None] * K + k[None, :]
    y = tl.zeros((WIDE, BM), tl.float32)
    for k0 in tl.range(0, K, BK, num_stages=STAGES):
        first = k0 // UNIT * PER
        w = _load(w_ptrs + first, None if EVEN else is_row[:, None] & (first + element < WIDTH)[None, :])
        x = _load(x_ptrs + k0, is_pair[:, None] if EVEN else is_pair[:, None] & (k0 + k < K)[None, :])
        y = add_tile(
            y, w, x.T, scale_ptr, zero_ptr, offset_ptr, n, is_row, k0,
            KIND, WAY, UNIT, K, GROUP, GROUPS, ROWS, RAISED, WIDE, BK, EVEN,
        )  # fmt: skip
    if row_scale_ptr is not None:
        y *= tl.load(row_scale_ptr + n, mask=is_row, other=0.0)[:, None]
    if BIAS:
        y += tl.load(bias_ptr + n, mask=is_row, other=0.0).to(tl.float32)[:, None]
    if GATE != "":
        g, u = tl.split(tl.permute(tl.reshape(y, (BN, 2, BM)), (0, 2, 1)))
        y = gated(g, u, GATE, ALPHA, LIMIT)
    out_n = tl.program_id(0) * BN + tl.arange(0, BN)
    out_ptrs = out_ptr + pairs[None, :].to(tl.int64) * N + out_n[:, None]
    tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=is_pair[None, :] & (out_n < N)[:, None])
