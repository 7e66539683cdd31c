"""The product of blocks of slots, each of one expert: a tile of weights' rows by a block's slots a program. The rows of
weights are the long side of the matrix instruction, so that a block may be as narrow as 16 slots.

Bytes: the weights of each touched expert once for every block of its slots, all but the first out of the L2 cache;
operations: 2 N K for every slot of a block that is used, empty ones included.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ..expert_tilings import ProductTile
from ..expert_types import ExpertGate, ExpertMatrices
from .expert_frames import BlockKernels, store_block
from .launch import launch_next_and_wait, max_shared_memory


def _fit(
    matrices: ExpertMatrices, tile: ProductTile, x: Tensor, size: int, block_m: int, gate: ExpertGate | None
) -> ProductTile:
    k, rows = x.shape[1], 1 if gate is None else 2
    tile = tile._replace(
        block_n=min(tile.block_n, max(16, triton.next_power_of_2(size))),
        block_k=min(tile.block_k, max(16, triton.next_power_of_2(k))),
    )
    while tile.block_k > 32 and k % tile.block_k:
        tile = tile._replace(block_k=tile.block_k // 2)
    while _shared_bytes(tile, block_m, rows, x.element_size()) > max_shared_memory():
        if tile.num_stages > 2:
            tile = tile._replace(num_stages=tile.num_stages - 1)
        elif tile.block_k > 32:
            tile = tile._replace(block_k=tile.block_k // 2)
        else:
            tile = tile._replace(block_n=tile.block_n // 2)
    return tile


def _shared_bytes(tile: ProductTile, block_m: int, rows: int, itemsize: int) -> int:
    """Shared memory needed at most: a stretch of weights and inputs a stage, or the outputs on their way. ``rows``: of
    weights for each output feature."""
    stages = (tile.block_n * rows + block_m) * tile.block_k * itemsize * tile.num_stages
    return max(stages, 4 * tile.block_n * rows * block_m)


def _pointers(matrices: ExpertMatrices, tile: ProductTile, gate: ExpertGate | None) -> tuple[Any, ...]:
    return matrices.weight, matrices.scale


def _constants(matrices: ExpertMatrices, x: Tensor) -> dict[str, Any]:
    return {"K": x.shape[1], **dict(zip(("W_E", "W_N", "W_K"), matrices.weight.stride(), strict=True))}


@triton.jit(do_not_specialize=["num_pairs"])
def _multiply_blocks(
    x_ptr, w_ptr, scale_ptr, out_ptr, bias_ptr, order_ptr, experts_ptr, num_pairs, N: tl.constexpr, ALL: tl.constexpr,
    K: tl.constexpr, PAIRS_A_ROW: tl.constexpr, W_E: tl.constexpr, W_N: tl.constexpr,
    W_K: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GATE: tl.constexpr, INTERLEAVED: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, BIAS: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """ALL: rows of an expert, those of gate and up."""
    launch_next_and_wait(PDL)
    expert = tl.load(experts_ptr + tl.program_id(1)).to(tl.int64)
    if expert < 0:
        return
    # With a gate, the rows of gate and up of a feature are side by side in the tile, wherever they are in memory: so it
    # is one stream of loads and one product.
    WIDE: tl.constexpr = 2 * BN if GATE != "" else BN
    n = tl.program_id(0) * WIDE + tl.arange(0, WIDE)
    is_row = n < ALL
    if GATE != "" and not INTERLEAVED:
        n = n % 2 * N + n // 2
    k = tl.arange(0, BK)
    pairs = tl.load(order_ptr + tl.program_id(1).to(tl.int64) * BM + tl.arange(0, BM))
    is_pair = pairs < num_pairs
    rows = (pairs // PAIRS_A_ROW).to(tl.int64)
    w_ptrs = w_ptr + expert * W_E + n[:, None].to(tl.int64) * W_N + k[None, :].to(tl.int64) * W_K
    x_ptrs = x_ptr + rows[None, :] * K + k[:, None]
    y = tl.zeros((WIDE, BM), tl.float32)
    for k0 in tl.range(0, K, BK, num_stages=STAGES):
        if EVEN:
            x = tl.load(x_ptrs + k0, mask=is_pair[None, :], other=0.0)
            w = tl.load(w_ptrs + k0 * W_K)
        else:
            x = tl.load(x_ptrs + k0, mask=is_pair[None, :] & (k0 + k < K)[:, None], other=0.0)
            w = tl.load(w_ptrs + k0 * W_K, mask=is_row[:, None] & (k0 + k < K)[None, :], other=0.0)
        y = tl.dot(w.to(x.dtype), x, y, input_precision="ieee")
    store_block(
        y, y, expert * ALL + n, is_row, pairs, is_pair, out_ptr, scale_ptr, bias_ptr, N, BM, BN, False,
        GATE, ALPHA, LIMIT, BIAS,
    )  # fmt: skip


KERNELS = BlockKernels(_multiply_blocks, _fit, _pointers, _constants)
