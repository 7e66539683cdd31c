"""The product of blocks of slots, each of one expert: a tile of weights' rows by a block's slots a program. The rows of
weights are the long side of the matrix instruction, so that a block may be as narrow as 16 slots.

Bytes: the weights of each touched expert once for every block of its slots, all but the first out of the L2 cache;
operations: 2 N K for every slot of a block that is used, empty ones included.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..expert_tilings import ProductTile
from ..expert_types import ExpertGate, ExpertMatrices, ExpertPlan
from .expert_gate import gate_constants, gated
from .launch import gdc_launch_dependents, gdc_wait, has_pdl, launch, max_shared_memory

__all__ = ["fit", "multiply_blocks"]


def fit(tile: ProductTile, n: int, k: int, block_m: int, rows: int, itemsize: int) -> ProductTile:
    """Return the tile cut to the shape, and to the GPU's shared memory. ``rows``: of weights for each output
    feature."""
    tile = tile._replace(
        block_n=min(tile.block_n, max(16, triton.next_power_of_2(n))),
        block_k=min(tile.block_k, max(16, triton.next_power_of_2(k))),
    )
    while tile.block_k > 32 and k % tile.block_k:
        tile = tile._replace(block_k=tile.block_k // 2)
    while shared_bytes(tile, block_m, rows, itemsize) > max_shared_memory():
        if tile.num_stages > 2:
            tile = tile._replace(num_stages=tile.num_stages - 1)
        elif tile.block_k > 32:
            tile = tile._replace(block_k=tile.block_k // 2)
        else:
            tile = tile._replace(block_n=tile.block_n // 2)
    return tile


def shared_bytes(tile: ProductTile, block_m: int, rows: int, itemsize: int) -> int:
    """Shared memory needed at most: a stretch of weights and inputs a stage, or the outputs on their way."""
    stages = (tile.block_n * rows + block_m) * tile.block_k * itemsize * tile.num_stages
    return max(stages, 4 * tile.block_n * rows * block_m)


def multiply_blocks(
    x: Tensor,
    matrices: ExpertMatrices,
    plan: ExpertPlan,
    gate: ExpertGate | None,
    out: Tensor,
    tile: ProductTile,
    rows_of_x: int,
) -> None:
    """Compute out [pairs, size] for x [pairs / rows_of_x, in_features]."""
    assert plan.tiling is not None and plan.blocks is not None
    weight, bias, scale = matrices
    size, k = out.shape[1], weight.shape[2]
    tile = fit(tile, size, k, plan.tiling.block_m, 1 if gate is None else 2, x.element_size())
    launch(
        _multiply_blocks,
        (triton.cdiv(size, tile.block_n), len(plan.blocks.experts)),
        x,
        weight,
        out,
        bias,
        scale,
        plan.blocks.order,
        plan.blocks.experts,
        plan.num_pairs,
        N=size,
        K=k,
        PAIRS_A_ROW=rows_of_x,
        W_E=weight.stride(0),
        W_N=weight.stride(1),
        W_K=weight.stride(2),
        BM=plan.tiling.block_m,
        BN=tile.block_n,
        BK=tile.block_k,
        **gate_constants(gate),
        BIAS=bias is not None,
        SCALED=scale is not None,
        EVEN=size % tile.block_n == 0 and k % tile.block_k == 0,
        PDL=has_pdl(),
        STAGES=tile.num_stages,
        num_warps=tile.num_warps,
    )


@triton.jit(do_not_specialize=["num_pairs"])
def _multiply_blocks(
    x_ptr,
    w_ptr,
    out_ptr,
    bias_ptr,
    scale_ptr,
    order_ptr,
    experts_ptr,
    num_pairs,
    N: tl.constexpr,
    K: tl.constexpr,
    PAIRS_A_ROW: tl.constexpr,
    W_E: tl.constexpr,
    W_N: tl.constexpr,
    W_K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GATE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    BIAS: tl.constexpr,
    SCALED: tl.constexpr,
    EVEN: tl.constexpr,
    PDL: tl.constexpr,
    STAGES: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    expert = tl.load(experts_ptr + tl.program_id(1)).to(tl.int64)
    if expert < 0:
        return
    # With a gate, the rows of gate and up of a feature are side by side in the tile, wherever they are in memory: so it
    # is one stream of loads and one product.
    WIDE: tl.constexpr = 2 * BN if GATE != "" else BN
    ROWS: tl.constexpr = 2 * N if GATE != "" else N
    n = tl.program_id(0) * WIDE + tl.arange(0, WIDE)
    is_row = (n < ROWS)[:, None]
    if GATE != "" and not INTERLEAVED:
        n = n % 2 * N + n // 2
    k = tl.arange(0, BK)
    pairs = tl.load(order_ptr + tl.program_id(1).to(tl.int64) * BM + tl.arange(0, BM))
    is_pair = (pairs < num_pairs)[None, :]
    rows = (pairs // PAIRS_A_ROW).to(tl.int64)
    w_ptrs = w_ptr + expert * W_E + n[:, None].to(tl.int64) * W_N + k[None, :].to(tl.int64) * W_K
    x_ptrs = x_ptr + rows[None, :] * K + k[:, None]
    y = tl.zeros((WIDE, BM), tl.float32)
    for k0 in tl.range(0, K, BK, num_stages=STAGES):
        if EVEN:
            x = tl.load(x_ptrs + k0, mask=is_pair, other=0.0)
            w = tl.load(w_ptrs + k0 * W_K)
        else:
            x = tl.load(x_ptrs + k0, mask=is_pair & (k0 + k < K)[:, None], other=0.0)
            w = tl.load(w_ptrs + k0 * W_K, mask=is_row & (k0 + k < K)[None, :], other=0.0)
        y = tl.dot(w.to(x.dtype), x, y, input_precision="ieee")
    if SCALED:
        y *= tl.load(scale_ptr + expert * ROWS + n[:, None], mask=is_row, other=0.0)
    if BIAS:
        y += tl.load(bias_ptr + expert * ROWS + n[:, None], mask=is_row, other=0.0).to(tl.float32)
    if GATE != "":
        g, u = tl.split(tl.permute(tl.reshape(y, (BN, 2, BM)), (0, 2, 1)))
        y = gated(g, u, GATE, ALPHA, LIMIT)
    out_n = tl.program_id(0) * BN + tl.arange(0, BN)
    out_ptrs = out_ptr + pairs[None, :].to(tl.int64) * N + out_n[:, None]
    tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=is_pair & (out_n < N)[:, None])
