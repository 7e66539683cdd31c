"""Products by weights W [N, K], for x [M, K]; which kernel is fastest was measured on an H200.

    M            norm            product
    1            in the product  _gemv: a program holds BN rows of W in registers before it waits for x
    2 to 32      its own kernel  _skinny for small weights and into the residual, else cuBLAS
    33 to 128    its own kernel  _tiled for small weights, but cuBLAS into the residual
    129 or more  its own kernel  cuBLAS

Bytes: W once, sizeof * N * K; operations: 2 M N K.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from . import activation, rms_norm
from .launch import has_pdl, is_interpreted, launch

__all__ = ["add_linear", "norm_gated_linear", "norm_linear"]

MAX_SKINNY = 32  # rows of x
MAX_TILED = 128
_SMALL_WEIGHT = 2**23  # elements; a larger one takes so long to read that cuBLAS' slower start does not show


def norm_linear(
    x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    if x.shape[0] == 1:
        out = torch.empty((1, weight.shape[0]), dtype=out_dtype, device=x.device)
        _launch_gemv(x, weight, bias, out, norm_weight, eps, add=False, gated=False)
        return out
    normed = rms_norm.rms_norm(x, norm_weight, eps)
    tiling = _skinny_tiling(x, weight, gated=False, add=False)
    if tiling is not None:
        out = torch.empty((x.shape[0], weight.shape[0]), dtype=out_dtype, device=x.device)
        _launch_skinny(tiling, normed, weight, bias, out, add=False, gated=False)
        return out
    if _suits_tiles(x, weight, gated=False):
        out = torch.empty((x.shape[0], weight.shape[0]), dtype=out_dtype, device=x.device)
        _launch_tiled(normed, weight, bias, out, gated=False)
        return out
    return _matmul(normed, weight, bias, out_dtype)


def norm_gated_linear(x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
    size = weight.shape[0] // 2
    if x.shape[0] == 1:
        out = torch.empty((1, size), dtype=x.dtype, device=x.device)
        _launch_gemv(x, weight, bias, out, norm_weight, eps, add=False, gated=True)
        return out
    normed = rms_norm.rms_norm(x, norm_weight, eps)
    tiling = _skinny_tiling(x, weight, gated=True, add=False)
    if tiling is not None:
        out = torch.empty((x.shape[0], size), dtype=x.dtype, device=x.device)
        _launch_skinny(tiling, normed, weight, bias, out, add=False, gated=True)
        return out
    if _suits_tiles(x, weight, gated=True):
        out = torch.empty((x.shape[0], size), dtype=x.dtype, device=x.device)
        _launch_tiled(normed, weight, bias, out, gated=True)
        return out
    return activation.silu_and_mul(_matmul(normed, weight, bias, x.dtype))


def add_linear(residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if x.shape[0] == 1:
        _launch_gemv(x, weight, bias, residual, None, 0.0, add=True, gated=False)
        return
    tiling = _skinny_tiling(x, weight, gated=False, add=True)
    if tiling is not None:
        _launch_skinny(tiling, x, weight, bias, residual, add=True, gated=False)
        return
    if bias is None:
        torch.addmm(residual, x, weight.t(), out=residual)
    else:  # not the bias first: the sum would be rounded once more, and it is larger than the product
        residual.add_(torch.nn.functional.linear(x, weight, bias))


def _matmul(x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    if out_dtype == x.dtype:
        return torch.nn.functional.linear(x, weight, bias)
    if x.is_cuda and out_dtype == torch.float32:
        out = torch.mm(x, weight.t(), out_dtype=out_dtype)  # not rounded to x's dtype in between
    else:
        out = torch.mm(x, weight.t()).to(out_dtype)
    return out if bias is None else out.add_(bias)


# -- one row


def _launch_gemv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    *,
    add: bool,
    gated: bool,
) -> None:
    size, k = out.shape[1], weight.shape[1]
    block_n, block_k, num_warps = _gemv_blocks(size, k)
    launch(
        _gemv,
        (triton.cdiv(size, block_n),),
        x,
        weight,
        out,
        norm_weight,
        bias,
        eps,
        N=size,
        K=k,
        BN=block_n,
        BK=block_k,
        NORM=norm_weight is not None,
        BIAS=bias is not None,
        ADD=add,
        GATED=gated,
        EVEN=size % block_n == 0 and k % block_k == 0,
        PDL=has_pdl(),
        num_warps=num_warps,
    )


def _gemv_blocks(n: int, k: int) -> tuple[int, int, int]:
    """BN, BK, warps: 32 to 128 weights a thread, all of a short row at once."""
    if k <= 1024:
        block_k = max(16, triton.next_power_of_2(k))
        return (8, block_k, 8) if n > 2**16 else (4, block_k, 2)
    if k == 4096:
        return (4, 2048, 2) if n <= 4096 else (2, 4096, 8)
    if k <= 4096:
        return (4, 2048, 4) if k % 2048 == 0 else (8, 1024, 4)
    return 8, 512, 2


@triton.jit
def _load_row(at, inside, EVEN: tl.constexpr):
    if EVEN:
        x = tl.load(at)
    else:
        x = tl.load(at, mask=inside, other=0.0)
    return x.to(tl.float32)


@triton.jit
def _gemv(
    x_ptr,
    w_ptr,
    out_ptr,
    norm_ptr,
    bias_ptr,
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    GATED: tl.constexpr,
    EVEN: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    row = w_ptr + n[:, None].to(tl.int64) * K
    squares = tl.zeros((BK,), tl.float32)
    for k0 in tl.static_range(0, K, BK):
        at = row + (k0 + k)[None, :]
        if EVEN:
            w = tl.load(at)
            if GATED:
                u = tl.load(at + N * K)
        else:
            tile = (n < N)[:, None] & (k0 + k < K)[None, :]
            w = tl.load(at, mask=tile, other=0.0)
            if GATED:
                u = tl.load(at + N * K, mask=tile, other=0.0)
        if PDL:
            if k0 == 0:
                gdc_wait()
        x = _load_row(x_ptr + k0 + k, k0 + k < K, EVEN)
        if NORM:
            squares += x * x
            x = x * _load_row(norm_ptr + k0 + k, k0 + k < K, EVEN)
            x = x.to(w_ptr.dtype.element_ty).to(tl.float32)  # as the product of larger batches rounds it
        if k0 == 0:  # not added to zeros: the products then join the sum over K in one instruction each
            acc = w.to(tl.float32) * x[None, :]
            if GATED:
                up = u.to(tl.float32) * x[None, :]
        else:
            acc += w.to(tl.float32) * x[None, :]
            if GATED:
                up += u.to(tl.float32) * x[None, :]
    y = tl.sum(acc, 1)
    if GATED:  # a sum of zeros is not free
        v = tl.sum(up, 1)
    if NORM:
        # The scale of the norm is the same for all of a row, so it can wait until the sum of squares is known.
        scale = 1.0 / tl.sqrt(tl.sum(squares, 0) / K + eps)
        y *= scale
        if GATED:
            v *= scale
    if BIAS:
        y += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)
        if GATED:
            v += tl.load(bias_ptr + N + n, mask=n < N, other=0.0).to(tl.float32)
    if GATED:
        y = y * v / (1 + tl.exp(-y))
    if ADD:
        y += tl.load(out_ptr + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(out_ptr + n, y.to(out_ptr.dtype.element_ty), mask=n < N)


# -- a few rows


class _Tiling(NamedTuple):
    block_m: int
    block_n: int
    num_groups: int  # of warps, each with its own part of every stretch of K, summed at the end
    block_k: int  # of one group
    num_warps: int
    num_stages: int


def _skinny_tiling(x: Tensor, weight: Tensor, *, gated: bool, add: bool) -> _Tiling | None:
    """How `_skinny` shall cut the product; None: cuBLAS is faster, or the shape does not fit."""
    rows, (n, k) = x.shape[0], weight.shape
    if rows > MAX_SKINNY or (x.dtype == torch.float32 and not is_interpreted):
        return None
    block_m = max(8, triton.next_power_of_2(rows))
    if add:
        if n >= 4096:
            if rows > 16:
                return None
            tiling = _Tiling(block_m, 32, 2, 256 if rows <= 8 else 128, 2, 4)
        else:
            tiling = _Tiling(block_m, 16, 4, 256, 4, 4) if rows <= 8 else _Tiling(block_m, 16, 2, 256, 2, 4)
    elif rows > 16 or n * k > _SMALL_WEIGHT:
        return None
    elif gated:
        tiling = _Tiling(block_m, 16, 4, 64, 4, 4)
    else:
        tiling = _Tiling(block_m, 16, 2, 256, 2 if rows <= 8 else 4, 4)
    while k % (tiling.num_groups * tiling.block_k) and tiling.block_k > 32:
        tiling = tiling._replace(block_k=tiling.block_k // 2)
    while k % (tiling.num_groups * tiling.block_k) and tiling.num_groups > 1:
        tiling = tiling._replace(num_groups=tiling.num_groups // 2)
    if k % (tiling.num_groups * tiling.block_k) or n % (tiling.block_n * (2 if gated else 1)):
        return None
    return tiling


def _launch_skinny(
    tiling: _Tiling, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, *, add: bool, gated: bool
) -> None:
    size = out.shape[1]
    launch(
        _skinny,
        (size // tiling.block_n,),
        x,
        weight,
        out,
        bias,
        x.shape[0],
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
    m = tl.arange(0, BM)
    group = tl.arange(0, GROUPS)[:, None, None] * BK
    k = tl.arange(0, BK)
    w_ptrs = w_ptr + n[None, :, None].to(tl.int64) * K + group + k[None, None, :]
    x_ptrs = x_ptr + m[None, None, :] * K + group + k[None, :, None]
    is_row = (m < M)[None, None, :]
    acc = tl.zeros((GROUPS, BN, BM), tl.float32)
    up = tl.zeros((GROUPS, BN, BM), tl.float32)
    if PDL:
        gdc_launch_dependents()
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


# -- some more rows


def _suits_tiles(x: Tensor, weight: Tensor, *, gated: bool) -> bool:
    n, k = weight.shape
    is_half = x.dtype != torch.float32 or is_interpreted
    fits = k % 128 == 0 and n % (128 if gated else 64) == 0
    return is_half and fits and x.shape[0] <= MAX_TILED and n * k <= _SMALL_WEIGHT


def _launch_tiled(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, *, gated: bool) -> None:
    rows, size = out.shape
    if rows <= 64:
        block_n, num_warps, num_stages = (32, 8, 4) if gated else (32, 4, 5)
    else:
        block_n, num_warps, num_stages = (64, 4, 3) if gated else (64, 4, 5)
    launch(
        _tiled,
        (size // block_n, triton.cdiv(rows, 64)),
        x,
        weight,
        out,
        bias,
        rows,
        N=size,
        K=weight.shape[1],
        BM=64,
        BN=block_n,
        BK=128,
        BIAS=bias is not None,
        GATED=gated,
        PDL=has_pdl(),
        STAGES=num_stages,
        num_warps=num_warps,
    )


@triton.jit(do_not_specialize=["M"])
def _tiled(
    x_ptr,
    w_ptr,
    out_ptr,
    bias_ptr,
    M,
    N: tl.constexpr,
    K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
    STAGES: tl.constexpr,
):
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    k = tl.arange(0, BK)
    w_ptrs = w_ptr + n[None, :].to(tl.int64) * K + k[:, None]
    x_ptrs = x_ptr + m[:, None].to(tl.int64) * K + k[None, :]
    is_row = (m < M)[:, None]
    y = tl.zeros((BM, BN), tl.float32)
    v = tl.zeros((BM, BN), tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    for k0 in tl.range(0, K, BK, num_stages=STAGES):
        x = tl.load(x_ptrs + k0, mask=is_row, other=0.0)
        y = tl.dot(x, tl.load(w_ptrs + k0), y, input_precision="ieee")
        if GATED:
            v = tl.dot(x, tl.load(w_ptrs + N * K + k0), v, input_precision="ieee")
    if BIAS:
        y += tl.load(bias_ptr + n).to(tl.float32)[None, :]
        if GATED:
            v += tl.load(bias_ptr + N + n).to(tl.float32)[None, :]
    if GATED:
        y = y * v / (1 + tl.exp(-y))
    out_ptrs = out_ptr + m[:, None].to(tl.int64) * N + n[None, :]
    tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=is_row)
