"""The product of one row: a program has BN rows of W, or their first HELD columns, in registers before it waits for x;
the norm is part of it.

Bytes: W once, sizeof * N * K; operations: 2 N K (4 N K with a gate).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..matrix import Matrix
from ..rms_norm import Norm
from .activation import activate_and_multiply
from .launch import gdc_wait, has_pdl, known, launch, launch_next, prefetch
from .linear_parts import numbers

__all__ = ["gemv", "load_row", "load_tile"]


def gemv(
    x: Tensor, matrix: Matrix, out: Tensor, norm: Norm | None, *, add: bool, activation: str | None = None
) -> None:
    """Set out [1, N] to the product, or add it to out; ``norm``: None if x is not to be normalised; ``activation``:
    that of the gate, None if there is none; the matrix' scale: float32 [N], or [N / 128, ceil(K / 128)] of blocks of
    rows and columns, with K of 128 or more and, with a gate, N a multiple of 128."""
    weight, bias, scale, _ = matrix
    assert isinstance(weight, Tensor)
    size, k = out.shape[1], weight.shape[1]
    is_of_blocks = scale is not None and scale.dim() == 2
    choose = _gemv_blocks if scale is None else _gemv_blocks_of_codes
    block_n, block_k, held, num_warps = choose(size, k, activation is not None)
    launch(
        _gemv,
        (triton.cdiv(size, block_n),),
        x,
        known(weight),
        out,
        None if norm is None else norm.weight,
        bias,
        scale,
        0.0 if norm is None else norm.eps,
        N=size,
        K=k,
        BN=block_n,
        BK=block_k,
        HELD=min(k, block_k * held),
        NORM=norm is not None,
        BIAS=bias is not None,
        SCALED=scale is not None and not is_of_blocks,
        BLOCK=128 if is_of_blocks else 0,
        FP8=weight.dtype == torch.float8_e4m3fn,
        ADD=add,
        GATED=activation is not None,
        ACTIVATION=activation,
        EVEN=size % block_n == 0 and k % block_k == 0,
        PDL=has_pdl(),
        num_warps=num_warps,
    )


_MEASURED = {
    (3072, 4096, False): (8, 1024, 3, 4),
    (4096, 2048, False): (4, 512, 3, 2),
    (7168, 4096, True): (2, 1024, 4, 4),
    (4096, 7168, False): (2, 1024, 7, 4),
    (1536, 4096, False): (2, 1024, 2, 2),
    (3584, 4096, True): (2, 1024, 4, 4),
    (4096, 3584, False): (2, 512, 7, 2),
    (4096, 1024, False): (4, 512, 2, 2),
    (1024, 2048, False): (2, 512, 4, 1),
    (3072, 1024, True): (1, 1024, 1, 1),
    (1024, 3072, False): (8, 1024, 3, 4),
    (1024, 1024, False): (1, 256, 4, 1),
    (4608, 1024, True): (4, 1024, 1, 1),
    (1024, 4608, False): (2, 512, 9, 2),
}
"""`_gemv_blocks` of whole layers: Llama-3.1-8B's on two and four ranks, 59.4 us on two instead of 65.1 (H200); then
Qwen3-0.6B's, 14.2 us instead of 15.4, and LFM2-350M's with a convolution, 16.0 instead of 18.7 (H100)."""


def _gemv_blocks(n: int, k: int, is_gated: bool) -> tuple[int, int, int, int]:
    """BN, BK, how many stretches of BK are held in registers, warps. Measured on an H200."""
    if (measured := _MEASURED.get((n, k, is_gated))) is not None:
        return measured
    if k <= 1024:
        block_k = max(16, triton.next_power_of_2(k))
        return (8, block_k, 1, 8) if n > 2**16 else (4, block_k, 1, 2)
    if k == 4096:
        return (4, 2048, 2, 2) if n <= 4096 else (2, 4096, 1, 8)
    if k <= 4096:
        return (4, 2048, 2, 4) if k % 2048 == 0 else (4, 1024, 4, 8)
    if k % 2048 == 0:
        # Two rows of 14,336 in registers as a whole: 116 us a layer of Llama-3.1-8B, 122 with 6,144 of each of four.
        return (2, 2048, k // 2048, 8) if 8192 < k <= 16384 else (4, 2048, 3, 4)
    return (8, 512, 3, 2)


def _gemv_blocks_of_codes(n: int, k: int, is_gated: bool) -> tuple[int, int, int, int]:
    """Return what `_gemv_blocks` does, for weights in 8 bits. Measured on an H100 and an H200."""
    if k <= 1024:
        return (8, min(512, max(16, triton.next_power_of_2(k))), 1, 4)
    if k < 4096:
        return (4, 512, min(3, k // 512), 2)
    if k == 4096:
        return (4, 4096, 1, 4)
    return (4, 2048, min(7, k // 2048), 8) if k % 2048 == 0 else (16, 512, 3, 4)


@triton.jit
def load_tile(row, n, k, N: tl.constexpr, K: tl.constexpr, EVEN: tl.constexpr):
    if EVEN:
        w = tl.load(row + k[None, :])
    else:
        w = tl.load(row + k[None, :], mask=(n < N)[:, None] & (k < K)[None, :], other=0.0)
    return w


@triton.jit
def load_row(at, inside, EVEN: tl.constexpr):
    if EVEN:
        x = tl.load(at)
    else:
        x = tl.load(at, mask=inside, other=0.0)
    return x.to(tl.float32)


@triton.jit
def _products(w, x, scale_ptr, row, k0: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, FP8: tl.constexpr):
    """w [BN, BK] times x [BK], the columns from ``k0`` on; with BLOCK summed up over the blocks, and times their scales
    in ``row`` of W, which all rows of a program share: [BN, BK / BLOCK]."""
    y = numbers(w, x, FP8) * x[None, :]
    if BLOCK:
        COUNT: tl.constexpr = w.shape[1] // BLOCK
        y = tl.sum(tl.reshape(y, (w.shape[0], COUNT, BLOCK)), 2)
        block = k0 // BLOCK + tl.arange(0, COUNT)
        at = scale_ptr + row // BLOCK * tl.cdiv(K, BLOCK) + block
        y *= tl.load(at, mask=block < tl.cdiv(K, BLOCK), other=0.0)[None, :]
    return y


@triton.jit
def _scaled_and_biased(y, rows, inside, scale_ptr, bias_ptr, SCALED: tl.constexpr, BIAS: tl.constexpr):
    """The sums ``y`` by rows of W, times their scales and with their biases."""
    if SCALED:
        y *= tl.load(scale_ptr + rows, mask=inside, other=0.0)
    if BIAS:
        y += tl.load(bias_ptr + rows, mask=inside, other=0.0).to(tl.float32)
    return y


@triton.jit
def _gemv(
    x_ptr,
    w_ptr,
    out_ptr,
    norm_ptr,
    bias_ptr,
    scale_ptr,
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    HELD: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
    FP8: tl.constexpr,
    ADD: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    EVEN: tl.constexpr,
    PDL: tl.constexpr,
):
    launch_next(PDL)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    row = w_ptr + n[:, None].to(tl.int64) * K
    ws = (load_tile(row, n, k, N, K, EVEN),)  # into registers, before the wait
    us = (load_tile(row + N * K, n, k, N, K, EVEN),) if GATED else ws
    for k0 in tl.static_range(BK, HELD, BK):
        ws = ws + (load_tile(row, n, k0 + k, N, K, EVEN),)  # type: ignore[assignment]
        if GATED:
            us = us + (load_tile(row + N * K, n, k0 + k, N, K, EVEN),)  # type: ignore[assignment]
    if PDL:
        if HELD < K:
            if tl.program_id(0) * BN + BN <= N:  # the last program's rows may be fewer, and what follows not ours
                prefetch(w_ptr, tl.program_id(0), BN * K)
                if GATED:
                    prefetch(w_ptr + N * K, tl.program_id(0), BN * K)
        gdc_wait()
    squares = tl.zeros((BK,), tl.float32)
    for k0 in tl.static_range(0, K, BK):
        if k0 < HELD:
            w = ws[k0 // BK]
            if GATED:
                u = us[k0 // BK]
        else:
            w = load_tile(row, n, k0 + k, N, K, EVEN)
            if GATED:
                u = load_tile(row + N * K, n, k0 + k, N, K, EVEN)
        x = load_row(x_ptr + k0 + k, k0 + k < K, EVEN)
        if NORM:
            squares += x * x
            x = x * load_row(norm_ptr + k0 + k, k0 + k < K, EVEN)
            if x_ptr.dtype.element_ty == tl.bfloat16:  # float16 could overflow here, before the norm is applied
                x = x.to(tl.bfloat16).to(tl.float32)  # rounded as the product of larger batches rounds it
        row0 = tl.program_id(0) * BN
        y = _products(w, x, scale_ptr, row0, k0, K, BLOCK, FP8)
        # Added to zeros the first products would take one instruction more.
        acc = y if k0 == 0 else acc + y  # type: ignore[has-type]  # noqa: F821
        if GATED:
            v = _products(u, x, scale_ptr, N + row0, k0, K, BLOCK, FP8)
            up = v if k0 == 0 else up + v  # type: ignore[has-type]  # noqa: F821
    y = tl.sum(acc, 1)
    if GATED:  # a sum of zeros is not free
        v = tl.sum(up, 1)
    if NORM:
        # The scale of the norm is the same for all of a row, so it can wait until the sum of squares is known.
        factor = 1.0 / tl.sqrt(tl.sum(squares, 0) / K + eps)
        y *= factor
        if GATED:
            v *= factor
    y = _scaled_and_biased(y, n, n < N, scale_ptr, bias_ptr, SCALED, BIAS)
    if GATED:
        v = _scaled_and_biased(v, N + n, n < N, scale_ptr, bias_ptr, SCALED, BIAS)
        y = activate_and_multiply(y, v, ACTIVATION)
    if ADD:
        y += tl.load(out_ptr + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(out_ptr + n, y.to(out_ptr.dtype.element_ty), mask=n < N)
