"""The product of a few rows: tokens are the narrow side of the matrix instruction, weights the long one, and groups of
warps share out K among them.

Bytes: W once for every BM rows, mostly out of the L2 cache; operations: 2 M N K.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from .launch import max_shared_memory
from .linear_parts import numbers, store_product, wait_for_rows


class SkinnyTiling(NamedTuple):
    block_m: int
    block_n: int
    num_groups: int  # groups of warps, each with its own part of every stretch of K; their sums are added at the end
    block_k: int  # columns of K that a group reads at a time
    num_warps: int
    num_stages: int

    def shared_bytes(self, gated: bool) -> int:
        """Shared memory needed at most: a stretch of W and x, in 16 bit, a stage."""
        rows = self.block_n * (2 if gated else 1) + self.block_m
        return 2 * rows * self.num_groups * self.block_k * self.num_stages


def fit(tiling: SkinnyTiling, n: int, k: int, gated: bool) -> SkinnyTiling | None:
    """Return the tiling with shorter stretches of K if the shape or the GPU's shared memory demands it; None if it
    can't cut the shape."""
    while tiling.shared_bytes(gated) > max_shared_memory() and tiling.block_k > 32:
        tiling = tiling._replace(block_k=tiling.block_k // 2)
    while k % (tiling.num_groups * tiling.block_k) and tiling.block_k > 32:
        tiling = tiling._replace(block_k=tiling.block_k // 2)
    while k % (tiling.num_groups * tiling.block_k) and tiling.num_groups > 1:
        tiling = tiling._replace(num_groups=tiling.num_groups // 2)
    return None if k % (tiling.num_groups * tiling.block_k) or n % tiling.block_n else tiling


@triton.jit(do_not_specialize=["M"])
def skinny(
    x_ptr,
    w_ptr,
    out_ptr,
    bias_ptr,
    scale_ptr,
    M,
    N: tl.constexpr,
    K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    GROUPS: tl.constexpr,
    BK: tl.constexpr,
    BIAS: tl.constexpr,
    SCALED: tl.constexpr,
    FP8: tl.constexpr,
    ADD: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Set out [M, N] to the product, or add it to out; N a multiple of BN, K of GROUPS * BK."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    group = tl.arange(0, GROUPS)[:, None, None] * BK
    k = tl.arange(0, BK)
    w_ptrs = w_ptr + n[None, :, None].to(tl.int64) * K + group + k[None, None, :]
    x_ptrs = x_ptr + m[None, None, :] * K + group + k[None, :, None]
    is_row = (m < M)[None, None, :]
    acc = tl.zeros((GROUPS, BN, BM), tl.float32)
    up = tl.zeros((GROUPS, BN, BM), tl.float32)
    if PDL:
        wait_for_rows(w_ptr, N, K, BN, GATED)
    for k0 in tl.range(0, K, GROUPS * BK, num_stages=STAGES):
        x = tl.load(x_ptrs + k0, mask=is_row, other=0.0)
        w = numbers(tl.load(w_ptrs + k0), x, FP8)
        acc = tl.dot(w, x, acc, input_precision="ieee")
        if GATED:
            up = tl.dot(numbers(tl.load(w_ptrs + N * K + k0), x, FP8), x, up, input_precision="ieee")
    y = tl.sum(acc, 0)
    v = y
    if GATED:
        v = tl.sum(up, 0)
    out_ptrs = out_ptr + m[None, :] * N + n[:, None]
    store_product(y, v, bias_ptr, scale_ptr, n, out_ptrs, (m < M)[None, :], N, 1, BIAS, SCALED, ADD, GATED, ACTIVATION)
