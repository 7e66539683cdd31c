"""The product of some more rows: a tile of the output a program, as matrix products are commonly cut.

Bytes: W once for every BM rows and x once for every BN columns, mostly out of the L2 cache; operations: 2 M N K.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from .launch import max_shared_memory
from .linear_parts import numbers, store_product, wait_for_rows


class TiledTiling(NamedTuple):
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    block_k: int = 128

    def shared_bytes(self, gated: bool) -> int:
        """Shared memory needed at most: a stretch of W and x, in 16 bit, a stage."""
        rows = self.block_n * (2 if gated else 1) + self.block_m
        return 2 * rows * self.block_k * self.num_stages


def fit(tiling: TiledTiling, n: int, k: int, gated: bool) -> TiledTiling | None:
    """Return the tiling with shorter stretches of K if the GPU's shared memory demands it; None if it can't cut the
    shape."""
    while tiling.shared_bytes(gated) > max_shared_memory() and tiling.block_k > 32:
        tiling = tiling._replace(block_k=tiling.block_k // 2)
    return None if k % tiling.block_k or n % tiling.block_n else tiling


@triton.jit(do_not_specialize=["M"])
def tiled(
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
    """Set out [M, N] to the product, or add it to out; N a multiple of BN, K of BK."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    k = tl.arange(0, BK)
    w_ptrs = w_ptr + n[None, :].to(tl.int64) * K + k[:, None]
    x_ptrs = x_ptr + m[:, None].to(tl.int64) * K + k[None, :]
    is_row = (m < M)[:, None]
    y = tl.zeros((BM, BN), tl.float32)
    v = tl.zeros((BM, BN), tl.float32)
    if PDL:
        wait_for_rows(w_ptr, N, K, BN, GATED)
    for k0 in tl.range(0, K, BK, num_stages=STAGES):
        x = tl.load(x_ptrs + k0, mask=is_row, other=0.0)
        y = tl.dot(x, numbers(tl.load(w_ptrs + k0), x, FP8), y, input_precision="ieee")
        if GATED:
            v = tl.dot(x, numbers(tl.load(w_ptrs + N * K + k0), x, FP8), v, input_precision="ieee")
    out_ptrs = out_ptr + m[:, None].to(tl.int64) * N + n[None, :]
    store_product(y, v, bias_ptr, scale_ptr, n, out_ptrs, is_row, N, 0, BIAS, SCALED, ADD, GATED, ACTIVATION)
