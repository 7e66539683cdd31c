"""The product of one row with the gated convolution behind it: a program has the rows of W that make b, c and x of BN
channels, in registers before it waits for the input, and these channels' states. The norm is part of it.

Bytes: W once, sizeof * 3 * channels * K.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..matrix import Matrix
from ..rms_norm import Norm
from ..short_conv import TokenConv
from .launch import has_pdl, launch, launch_next, wait_for_previous
from .linear_gemv import load_row, load_tile
from .short_conv import conv_of_state

__all__ = ["conv_gemv", "fits"]

_MOST_HELD = 4096  # columns of W that programs have in registers


def fits(x: Tensor, matrix: Matrix) -> bool:
    """Return whether `conv_gemv` computes the product by x."""
    weight = matrix.weight
    return len(x) == 1 and isinstance(weight, Tensor) and weight.dtype == x.dtype and weight.shape[1] <= _MOST_HELD


def _tiling(k: int) -> tuple[int, int, int]:
    """Return BN, BK, warps. Of 1,024 columns measured on an H100."""
    block_k = min(k & -k, 512)
    return 1, block_k if block_k >= 128 else max(16, triton.next_power_of_2(k)), 1 if k <= 2048 else 2


def conv_gemv(x: Tensor, norm: Norm, matrix: Matrix, conv: TokenConv) -> Tensor:
    weight, bias, _, _ = matrix
    assert isinstance(weight, Tensor)
    width, channels = conv.weight.shape
    out = torch.empty((1, channels), dtype=x.dtype, device=x.device)
    block_n, block_k, num_warps = _tiling(weight.shape[1])
    launch(
        _conv_gemv,
        (triton.cdiv(channels, block_n),),
        x,
        weight,
        out,
        norm.weight,
        bias,
        norm.eps,
        conv.weight,
        conv.bias,
        conv.memory,
        conv.pages,
        conv.begins.view(torch.uint8),
        conv.memory.stride(0),
        N=channels,
        K=weight.shape[1],
        BN=block_n,
        BK=block_k,
        WIDTH=width,
        EVEN=channels % block_n == 0 and weight.shape[1] % block_k == 0,
        PDL=has_pdl(),
        num_warps=num_warps,
    )
    return out


@triton.jit
def _sum(acc, factor, bias_ptr, n, inside, out_ptr):
    """The product whose terms are ``acc``, rounded as those of larger batches are: to the output's type."""
    y = tl.sum(acc, 1) * factor
    if bias_ptr is not None:
        y += tl.load(bias_ptr + n, mask=inside, other=0.0).to(tl.float32)
    return y.to(out_ptr.dtype.element_ty).to(tl.float32)


@triton.jit
def _conv_gemv(
    x_ptr,
    w_ptr,
    out_ptr,
    norm_ptr,
    bias_ptr,
    eps,
    filter_ptr,
    filter_bias_ptr,
    memory_ptr,
    pages_ptr,
    begins_ptr,
    stride_page,
    N: tl.constexpr,
    K: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    WIDTH: tl.constexpr,
    EVEN: tl.constexpr,
    PDL: tl.constexpr,
):
    launch_next(PDL)
    n, k = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BK)
    inside = n < N
    row = w_ptr + n[:, None].to(tl.int64) * K
    of_b = (load_tile(row, n, k, N, K, EVEN),)
    of_c = (load_tile(row + N * K, n, k, N, K, EVEN),)
    of_x = (load_tile(row + 2 * N * K, n, k, N, K, EVEN),)
    for k0 in tl.static_range(BK, K, BK):
        of_b = of_b + (load_tile(row, n, k0 + k, N, K, EVEN),)  # type: ignore[assignment]
        of_c = of_c + (load_tile(row + N * K, n, k0 + k, N, K, EVEN),)  # type: ignore[assignment]
        of_x = of_x + (load_tile(row + 2 * N * K, n, k0 + k, N, K, EVEN),)  # type: ignore[assignment]
    state = memory_ptr + tl.load(pages_ptr) * stride_page
    goes_on = inside & (tl.load(begins_ptr) == 0)
    y = conv_of_state(filter_ptr, filter_bias_ptr, state, n, N, inside, goes_on, WIDTH)
    last = tl.load(filter_ptr + (WIDTH - 1) * N + n, mask=inside, other=0.0)
    wait_for_previous(PDL)
    squares = tl.zeros((BK,), tl.float32)
    b = tl.zeros((BN, BK), tl.float32)
    c = tl.zeros((BN, BK), tl.float32)
    z = tl.zeros((BN, BK), tl.float32)
    for k0 in tl.static_range(0, K, BK):
        x = load_row(x_ptr + k0 + k, k0 + k < K, EVEN)
        squares += x * x
        x = x * load_row(norm_ptr + k0 + k, k0 + k < K, EVEN)
        if x_ptr.dtype.element_ty == tl.bfloat16:  # as in `gemv`
            x = x.to(tl.bfloat16).to(tl.float32)
        b += of_b[k0 // BK].to(tl.float32) * x[None, :]
        c += of_c[k0 // BK].to(tl.float32) * x[None, :]
        z += of_x[k0 // BK].to(tl.float32) * x[None, :]
    factor = 1.0 / tl.sqrt(tl.sum(squares, 0) / K + eps)
    own = _sum(b, factor, bias_ptr, n, inside, out_ptr) * _sum(z, factor, bias_ptr, 2 * N + n, inside, out_ptr)
    if WIDTH > 1:
        tl.store(state + (WIDTH - 2) * N + n, own, mask=inside)
    y = (y + own * last) * _sum(c, factor, bias_ptr, N + n, inside, out_ptr)
    tl.store(out_ptr + n, y.to(out_ptr.dtype.element_ty), mask=inside)
