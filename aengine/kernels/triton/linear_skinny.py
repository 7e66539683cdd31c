"""The product of a few rows: tokens are the narrow side of the matrix instruction, weights the long one, and groups of
warps share out K among them.

Bytes: W once for every BM rows, mostly out of the L2 cache; operations: 2 M N K.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from .launch import gdc_launch_dependents, gdc_wait, has_pdl, launch, max_shared_memory, prefetch

__all__ = ["SkinnyTiling", "fit", "skinny"]


class SkinnyTiling(NamedTuple):
    block_m: int
    block_n: int
    num_groups: int  # of warps, each with its own part of every stretch of K, summed at the end
    block_k: int  # of one group
    num_warps: int
    num_stages: int

    def shared_bytes(self, gated: bool) -> int:
        """Shared memory needed at most: a stretch of W and x, in 16 bit, a stage."""
        rows = self.block_n * (2 if gated else 1) + self.block_m
        return 2 * rows * self.num_groups * self.block_k * self.num_stages


def fit(tiling: SkinnyTiling, n: int, k: int, gated: bool) -> SkinnyTiling | None:
    """The tiling with shorter stretches of K if the shape or the GPU's shared memory demands it; None if it can't cut
    the shape."""
    while tiling.shared_bytes(gated) > max_shared_memory() and tiling.block_k > 32:
        tiling = tiling._replace(block_k=tiling.block_k // 2)
    while k % (tiling.num_groups * tiling.block_k) and tiling.block_k > 32:
        tiling = tiling._replace(block_k=tiling.block_k // 2)
    while k % (tiling.num_groups * tiling.block_k) and tiling.num_groups > 1:
        tiling = tiling._replace(num_groups=tiling.num_groups // 2)
    return None if k % (tiling.num_groups * tiling.block_k) or n % tiling.block_n else tiling


def skinny(
    tiling: SkinnyTiling, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, *, add: bool, gated: bool
) -> None:
    """out [M, N] = the product, or is added to."""
    rows, size = out.shape
    launch(
        _skinny,
        (size // tiling.block_n, triton.cdiv(rows, tiling.block_m)),
        x,
        weight,
        out,
        bias,
        rows,
        N=size,
        K=weight.shape[1],
        BM=tiling.block_m,
        BN=tiling.block_n,
        GROUPS=tiling.num_groups,
        BK=tiling.block_k,
        BIAS=bias is not None,
        ADD=add,
        GATED=gated,
        PDL=has_pdl(),
        STAGES=tiling.num_stages,
        num_warps=tiling.num_warps,
    )


@triton.jit(do_not_specialize=["M"])
def _skinny(
    x_ptr,
    w_ptr,
    out_ptr,
    bias_ptr,
    M,
    N: tl.constexpr,
    K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    GROUPS: tl.constexpr,
    BK: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
    STAGES: tl.constexpr,
):
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
        gdc_launch_dependents()
        if tl.program_id(1) == 0:
            prefetch(w_ptr, tl.program_id(0), BN * K)
            if GATED:
                prefetch(w_ptr + N * K, tl.program_id(0), BN * K)
        gdc_wait()
    for k0 in tl.range(0, K, GROUPS * BK, num_stages=STAGES):
        w = tl.load(w_ptrs + k0)
        x = tl.load(x_ptrs + k0, mask=is_row, other=0.0)
        acc = tl.dot(w, x, acc, input_precision="ieee")
        if GATED:
            up = tl.dot(tl.load(w_ptrs + N * K + k0), x, up, input_precision="ieee")
    y = tl.sum(acc, 0)
    if GATED:
        v = tl.sum(up, 0)
    if BIAS:
        y += tl.load(bias_ptr + n).to(tl.float32)[:, None]
        if GATED:
            v += tl.load(bias_ptr + N + n).to(tl.float32)[:, None]
    if GATED:
        y = y * v / (1 + tl.exp(-y))
    out_ptrs = out_ptr + m[None, :] * N + n[:, None]
    if ADD:
        y += tl.load(out_ptrs, mask=(m < M)[None, :], other=0.0).to(tl.float32)
    tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=(m < M)[None, :])
