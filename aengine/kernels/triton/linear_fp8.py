"""The product of several rows by a weight in FP8 on Hopper, by its FP8 tensor cores, without rounding x to FP8.

x becomes the sum of two terms in FP8 with a scale a row: the first has the four leading bits of each number, the second
four of what is left. So x is off by 6e-4 of its norm, where bfloat16 costs it 1.6e-3, and nothing of W has to become
numbers of 16 bits. The terms of eight rows lie behind each other, so that both are multiplied by W in one
instruction, of twice the rows: as many operations as in 16 bits, and half the bytes.

The tensor cores add up few bits (some 14): their sums over BK are added up in float32.

Bytes: W once for every BM rows; terms once for every BN columns, mostly out of the L2 cache; operations: 4 M N K.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..linear_tilings import StreamedTiling
from .launch import has_pdl, launch, launch_next, wait_for_previous
from .linear_parts import prefetch_rows, store_product

__all__ = ["Terms", "split", "stream"]

Terms = tuple[Tensor, Tensor]
"""float8_e4m3fn [16 * ceil(M / 8), K], float32 [M]: row i of x is the sum of row 16 * (i // 8) + i % 8 and of the
eighth row after that, times the scale of row i."""
_LARGEST = tl.constexpr(448.0)  # the largest number of float8_e4m3fn


def split(x: Tensor, norm_weight: Tensor | None = None, eps: float = 0.0) -> Terms:
    """Return the terms of x [M, K], or of its norm."""
    rows, k = x.shape
    terms = torch.empty((16 * triton.cdiv(rows, 8), k), dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(rows, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(k)
    launch(
        _split,
        (rows,),
        x,
        norm_weight,
        terms,
        scale,
        eps,
        K=k,
        BLOCK=block,
        NORM=norm_weight is not None,
        PDL=has_pdl(),
        num_warps=min(16, max(4, block // 1024)),
    )
    return terms, scale


@triton.jit
def _split(
    x_ptr,
    norm_ptr,
    terms_ptr,
    scale_ptr,
    eps,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    launch_next(PDL)
    row = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    if NORM:
        w = tl.load(norm_ptr + i, mask=i < K, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    x = tl.load(x_ptr + row.to(tl.int64) * K + i, mask=i < K, other=0.0).to(tl.float32)
    if NORM:
        x = x * w / tl.sqrt(tl.sum(x * x, 0) / K + eps)
    largest = tl.maximum(tl.max(tl.abs(x), 0), 1e-30)
    x = x * (_LARGEST / largest)
    first = _of_four_bits(x)
    second = _of_four_bits(x - first)
    at = terms_ptr + (row // 8 * 16 + row % 8).to(tl.int64) * K + i
    tl.store(at, first.to(tl.float8e4nv), mask=i < K)
    tl.store(at + 8 * K, second.to(tl.float8e4nv), mask=i < K)
    # NaN if some x is none or infinite: its bits may have been rounded to those of a number.
    tl.store(scale_ptr + row, largest / _LARGEST + tl.sum(x * 0.0, 0))


@triton.jit
def _of_four_bits(x):
    """x, float32, rounded to four significant bits, ties to even, as FP8 rounds its normal numbers.

    By integers: what is converted to FP8 and back comes back wrong by the ptxas of CUDA 12.8, with more than two
    numbers a thread, and Triton's interpreter loses a carry.
    """
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)


def stream(
    tiling: StreamedTiling,
    x: Terms,
    weight: Tensor,
    bias: Tensor | None,
    scale: Tensor,
    out: Tensor,
    *,
    add: bool,
    activation: str | None = None,
) -> None:
    """Set out [M, N] to the product, or add it to out; rows of W are multiples of 16 bytes."""
    rows, size = out.shape
    terms, x_scale = x
    launch(
        _streamed,
        (triton.cdiv(rows, tiling.block_m), triton.cdiv(size, tiling.block_n)),
        TensorDescriptor.from_tensor(terms, [2 * tiling.block_m, tiling.block_k]),
        TensorDescriptor.from_tensor(weight, [tiling.block_n, tiling.block_k]),
        weight,
        out,
        bias,
        scale,
        x_scale,
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


@triton.jit(do_not_specialize=["M"])
def _streamed(
    x_tiles,
    w_tiles,
    w_ptr,
    out_ptr,
    bias_ptr,
    scale_ptr,
    x_scale_ptr,
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
    launch_next(PDL)
    if PDL:
        prefetch_rows(w_ptr, n, N, K)
        if GATED:
            prefetch_rows(w_ptr, N + n, 2 * N, K)
    wait_for_previous(PDL)
    y = tl.zeros((BN, 2 * BM), tl.float32)
    v = tl.zeros((BN, 2 * BM), tl.float32)
    for k0 in tl.range(0, K, BK, num_stages=STAGES):  # TMA copies zeros for what lies outside of x and W
        x = x_tiles.load([2 * m0, k0]).T
        y += tl.dot(w_tiles.load([n0, k0]), x)
        if GATED:
            v += tl.dot(w_tiles.load([N + n0, k0]), x)
    y = _of_terms(y, x_scale_ptr, m, M, BN, BM)
    if GATED:
        v = _of_terms(v, x_scale_ptr, m, M, BN, BM)
    out_ptrs = out_ptr + m[None, :].to(tl.int64) * N + n[:, None]
    is_inside = (n < N)[:, None] & (m < M)[None, :]
    store_product(y, v, bias_ptr, scale_ptr, n, out_ptrs, is_inside, N, 1, BIAS, True, ADD, GATED, ACTIVATION)


@triton.jit
def _of_terms(y, x_scale_ptr, m, M, BN: tl.constexpr, BM: tl.constexpr):
    """[BN, BM]: the sums over both terms of each row, times its scale."""
    both = tl.reshape(tl.sum(tl.reshape(y, (BN, BM // 8, 2, 8)), 2), (BN, BM))
    return both * tl.load(x_scale_ptr + m, mask=m < M, other=0.0)[None, :]
