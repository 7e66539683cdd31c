"""The product of two to some hundred rows on Hopper, whose copy engine (TMA) brings the tiles: a tile of the output a
program; tokens are the narrow side of the matrix instruction, so that weights are read once for all of them.

A program has some 200 KB of weights and x on their way, which few programs do with: 64 keep the memory as busy as 132,
and leave the other multiprocessors to the next launch, whose programs then wait there already.

Bytes: W once for every BM rows, x once for every BN columns, mostly out of the L2 cache; operations: 2 M N K.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..linear_tilings import LinearShape, StreamedTiling, choose_in_order
from .launch import device_name, gdc_launch_dependents, gdc_wait, has_pdl, launch, max_shared_memory
from .linear_parts import prefetch_rows, store_product


def fit(tiling: StreamedTiling, is_gated: bool, weight_bytes: int = 2, x_bytes: int = 2) -> StreamedTiling:
    """Return the tiling with fewer stages, and shorter stretches of K, if the GPU's shared memory demands it."""
    while tiling.shared_bytes(is_gated, weight_bytes, x_bytes) > max_shared_memory():
        if tiling.num_stages > 2:
            tiling = tiling._replace(num_stages=tiling.num_stages - 1)
        else:
            tiling = tiling._replace(block_k=tiling.block_k // 2, num_stages=3)
    return tiling


def stream(
    tiling: StreamedTiling,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    *,
    add: bool,
    activation: str | None = None,
) -> None:
    """Set out [M, N] to the product, or add it to out; rows of x and W are multiples of 16 bytes."""
    rows, size = out.shape
    launch(
        _streamed,
        (triton.cdiv(rows, tiling.block_m), triton.cdiv(size, tiling.block_n)),
        TensorDescriptor.from_tensor(x, [tiling.block_m, tiling.block_k]),
        TensorDescriptor.from_tensor(weight, [tiling.block_n, tiling.block_k]),
        weight,
        out,
        bias,
        rows,
        size,
        weight.shape[1],
        BN=tiling.block_n,
        BM=tiling.block_m,
        BK=tiling.block_k,
        BIAS=bias is not None,
        ADD=add,
        GATED=activation is not None,
        ACTIVATION=activation,
        PDL=has_pdl(),
        STAGES=tiling.num_stages,
        num_warps=tiling.num_warps,
    )


def multiply_in_order(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, *, add: bool, activation: str | None = None
) -> None:
    """`stream` with a tiling for so many rows, none of which changes a row's bits."""
    (rows, size), is_gated = out.shape, activation is not None
    shape = LinearShape("gated" if is_gated else "add" if add else "plain", size, weight.shape[1])
    tiling = fit(choose_in_order(device_name(), shape, rows), is_gated)
    if rows:
        stream(tiling, x, weight, bias, out, add=add, activation=activation)


@triton.jit(do_not_specialize=["M"])
def _streamed(
    x_tiles,
    w_tiles,
    w_ptr,
    out_ptr,
    bias_ptr,
    M,
    N,
    K,
    BN: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
    STAGES: tl.constexpr,
):
    m0 = tl.program_id(0) * BM
    n0 = tl.program_id(1) * BN
    m = m0 + tl.arange(0, BM)
    n = n0 + tl.arange(0, BN)
    if PDL:
        gdc_launch_dependents()
        prefetch_rows(w_ptr, n, N, 2 * K)
        if GATED:
            prefetch_rows(w_ptr, N + n, 2 * N, 2 * K)
        gdc_wait()
    y = tl.zeros((BN, BM), tl.float32)
    v = tl.zeros((BN, BM), tl.float32)
    for k0 in tl.range(0, K, BK, num_stages=STAGES):  # TMA copies zeros for what lies outside of x and W
        x = x_tiles.load([m0, k0]).T
        y = tl.dot(w_tiles.load([n0, k0]), x, y, input_precision="ieee")
        if GATED:
            v = tl.dot(w_tiles.load([N + n0, k0]), x, v, input_precision="ieee")
    out_ptrs = out_ptr + m[None, :].to(tl.int64) * N + n[:, None]
    is_inside = (n < N)[:, None] & (m < M)[None, :]
    store_product(y, v, bias_ptr, None, n, out_ptrs, is_inside, N, 1, BIAS, False, ADD, GATED, ACTIVATION)
