"""The product of blocks of slots, each of one expert, by codes with a scale a group: as expert_blocks.py, but codes
become numbers of 16 bits as they are multiplied, as in grouped_tiles.py, which says how.

Bytes: the codes and scales of each touched expert once for every block of its slots, all but the first out of the L2
cache; operations: 2 N K for every slot of a block that is used, and some 4 to make a number of a code.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..expert_tilings import ProductTile
from ..expert_types import ExpertCodes, ExpertGate, ExpertPlan
from .expert_gate import gate_constants, gated
from .grouped_parts import constants, pointers
from .grouped_tiles import add_tile, load_tile, values_of_tile, way_of, whole
from .launch import has_pdl, is_hopper, launch, launch_next_and_wait, max_shared_memory

__all__ = ["multiply_blocks"]


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
    k, unit, rows = given["K"], given["UNIT"], 1 if gate is None else 2
    way = way_of(matrices.codes, x.dtype)
    most = given["GROUP"] if way == "sums" and given["GROUPS"] > 1 else tile.block_k
    tile = tile._replace(
        block_n=min(tile.block_n, max(16, triton.next_power_of_2(size))),
        block_k=max(32, min(tile.block_k, most, triton.next_power_of_2(k))),
    )
    while _shared_bytes(tile, block_m, rows, unit, x.element_size()) > max_shared_memory():
        if tile.num_stages > 2:
            tile = tile._replace(num_stages=tile.num_stages - 1)
        else:
            tile = tile._replace(block_k=tile.block_k // 2)
    own, *others = pointers(matrices.codes)
    assert own is not None
    is_wide = gate is not None and gate.is_interleaved
    tiles = None
    if is_hopper():
        sizes = [tile.block_n * (2 if is_wide else 1), tile.block_k // unit * (4 if unit == 32 else 16)]
        tiles = TensorDescriptor.from_tensor(own, sizes)
    launch(
        _multiply_blocks,
        (triton.cdiv(size, tile.block_n), len(plan.blocks.experts)),
        tiles,
        x,
        own,
        *others,
        out,
        matrices.bias,
        plan.blocks.order,
        plan.blocks.experts,
        plan.num_pairs,
        **given,
        N=size,
        ALL=matrices.shape[1],
        ALL_ROWS=len(matrices.codes.codes),
        PAIRS_A_ROW=rows_of_x,
        WAY=way,
        BM=block_m,
        BN=tile.block_n,
        BK=tile.block_k,
        **gate_constants(gate),
        BIAS=matrices.bias is not None,
        EVEN=size % tile.block_n == 0 and k % tile.block_k == 0,
        PDL=has_pdl(),
        STAGES=tile.num_stages,
        num_warps=tile.num_warps,
    )


def _shared_bytes(tile: ProductTile, block_m: int, rows: int, unit: int, itemsize: int) -> int:
    """Shared memory needed at most: codes, their scales and inputs of some stages; or the outputs on their way.
    ``rows``: of codes for each output feature."""
    wide = tile.block_n * rows
    stage = wide * tile.block_k * 16 // unit + wide * tile.block_k // 16 * 4 + block_m * tile.block_k * itemsize
    return max((stage + 64) * tile.num_stages, 4 * wide * block_m)


@triton.jit
def _finished(y, n, is_row, row_scale_ptr, bias_ptr, BIAS: tl.constexpr):
    """Apply the rows' scales and biases to the sums y [len(n), BM]."""
    if row_scale_ptr is not None:
        y *= tl.load(row_scale_ptr + n, mask=is_row, other=0.0)[:, None]
    if BIAS:
        y += tl.load(bias_ptr + n, mask=is_row, other=0.0).to(tl.float32)[:, None]
    return y


@triton.jit(do_not_specialize=["num_pairs"])
def _multiply_blocks(
    w_tiles, x_ptr, w_ptr, scale_ptr, zero_ptr, offset_ptr, row_scale_ptr, out_ptr, bias_ptr, order_ptr, experts_ptr,
    num_pairs, K: tl.constexpr, KIND: tl.constexpr, UNIT: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    ROWS: tl.constexpr, RAISED: tl.constexpr, N: tl.constexpr, ALL: tl.constexpr, ALL_ROWS: tl.constexpr,
    PAIRS_A_ROW: tl.constexpr, WAY: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    GATE: tl.constexpr, INTERLEAVED: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, BIAS: tl.constexpr,
    EVEN: tl.constexpr, PDL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """ALL: rows of an expert, those of gate and up; ALL_ROWS: of all experts."""
    launch_next_and_wait(PDL)
    expert = tl.load(experts_ptr + tl.program_id(1))
    if expert < 0:
        return
    # Rows of gate and up that alternate are one tile, else two.
    WIDE: tl.constexpr = 2 * BN if GATE != "" and INTERLEAVED else BN
    TWICE: tl.constexpr = GATE != "" and not INTERLEAVED
    begin = expert * ALL + tl.program_id(0) * WIDE
    n = begin + tl.arange(0, WIDE)
    is_row = tl.program_id(0) * WIDE + tl.arange(0, WIDE) < ALL
    pairs = tl.load(order_ptr + tl.program_id(1).to(tl.int64) * BM + tl.arange(0, BM))
    is_pair = pairs < num_pairs
    k = tl.arange(0, BK)[None, :]
    x_ptrs = x_ptr + (pairs // PAIRS_A_ROW).to(tl.int64)[:, None] * K + k
    y = tl.zeros((WIDE, BM), tl.float32)
    v = tl.zeros((WIDE, BM), tl.float32)
    # Scales come as bytes, or far apart, so that no copy brings them ahead: they are loaded one round before their use.
    scale, zero, offset = values_of_tile(
        scale_ptr, zero_ptr, offset_ptr, n, is_row, 0, WAY, K, GROUP, GROUPS, ROWS, RAISED, BK, EVEN
    )
    if TWICE:
        up_scale, up_zero, up_offset = values_of_tile(
            scale_ptr, zero_ptr, offset_ptr, N + n, is_row, 0, WAY, K, GROUP, GROUPS, ROWS, RAISED, BK, EVEN
        )
    for k0 in tl.range(0, K, BK, num_stages=STAGES):
        next_scale, next_zero, next_offset = values_of_tile(
            scale_ptr, zero_ptr, offset_ptr, n, is_row, k0 + BK, WAY, K, GROUP, GROUPS, ROWS, RAISED, BK, False
        )
        if EVEN:
            x = tl.load(x_ptrs + k0, mask=is_pair[:, None], other=0.0).T
        else:
            x = tl.load(x_ptrs + k0, mask=is_pair[:, None] & (k0 + k < K), other=0.0).T
        w = load_tile(w_tiles, w_ptr, begin, k0, ALL_ROWS, K, UNIT, WIDE, BK, EVEN)
        y = add_tile(y, w, x, scale, zero, offset, KIND, WAY, UNIT, WIDE, BK)
        scale, zero, offset = next_scale, next_zero, next_offset
        if TWICE:
            next_scale, next_zero, next_offset = values_of_tile(
                scale_ptr, zero_ptr, offset_ptr, N + n, is_row, k0 + BK, WAY, K, GROUP, GROUPS, ROWS, RAISED, BK, False
            )
            w = load_tile(w_tiles, w_ptr, N + begin, k0, ALL_ROWS, K, UNIT, WIDE, BK, EVEN)
            v = add_tile(v, w, x, up_scale, up_zero, up_offset, KIND, WAY, UNIT, WIDE, BK)
            up_scale, up_zero, up_offset = next_scale, next_zero, next_offset
    y, v = whole(y, WAY), whole(v, WAY)
    y = _finished(y, n, is_row, row_scale_ptr, bias_ptr, BIAS)
    if TWICE:
        y = gated(y, _finished(v, N + n, is_row, row_scale_ptr, bias_ptr, BIAS), GATE, ALPHA, LIMIT)
    elif GATE != "":
        g, u = tl.split(tl.permute(tl.reshape(y, (BN, 2, BM)), (0, 2, 1)))
        y = gated(g, u, GATE, ALPHA, LIMIT)
    out_n = tl.program_id(0) * BN + tl.arange(0, BN)
    out_ptrs = out_ptr + pairs[None, :].to(tl.int64) * N + out_n[:, None]
    tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=is_pair[None, :] & (out_n < N)[:, None])
