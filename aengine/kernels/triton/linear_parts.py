"""Parts that the linear kernels for several rows share: what they do before the sums over K, and after them."""

from __future__ import annotations

import triton
import triton.language as tl

from .activation import activate_and_multiply
from .launch import gdc_launch_dependents, gdc_wait, prefetch

PREFETCHED = tl.constexpr(512)  # bytes of a row of W; more hold up the product that is still running


@triton.jit
def prefetch_rows(w_ptr, n, num_rows, row_bytes):
    """Prefetch the first bytes of rows ``n`` [BN] of W into the L2 cache, in lines of 128 bytes."""
    at = w_ptr.to(tl.int64, bitcast=True) + tl.minimum(n, num_rows - 1).to(tl.int64) * row_bytes
    for begin in range(0, tl.minimum(row_bytes, PREFETCHED), 128):
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at + begin], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def numbers(w, like, FP8: tl.constexpr):
    """``w`` in the dtype of ``like``, exactly. FP8: bytes are codes of float8_e4m3fn, on GPUs that do not know them."""
    if FP8 and w.dtype == tl.int8:  # sign, exponent and mantissa in their places in float32, whose bias is 120 more
        y = ((w.to(tl.int32) << 20) & -0x78100000).to(tl.float32, bitcast=True) * 1.329227995784916e36
    else:
        y = w
    return y.to(like.dtype)


@triton.jit
def wait_for_rows(w_ptr, N: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, GATED: tl.constexpr):
    """Prefetch this program's rows of W, then wait for x; with PDL alone."""
    gdc_launch_dependents()
    if tl.program_id(1) == 0:
        prefetch(w_ptr, tl.program_id(0), BN * K)
        if GATED:
            prefetch(w_ptr + N * K, tl.program_id(0), BN * K)
    gdc_wait()


@triton.jit
def store_product(
    y,
    up,
    bias_ptr,
    scale_ptr,
    n,
    out_ptrs,
    is_inside,
    N,
    AXIS: tl.constexpr,
    BIAS: tl.constexpr,
    SCALED: tl.constexpr,
    ADD: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """Store the sums ``y`` times the rows' scales, with bias, gated by ``up``, added to what is there. AXIS: that of
    the tokens; n: [BN]."""
    if SCALED:
        y *= tl.expand_dims(tl.load(scale_ptr + n, mask=n < N, other=0.0), AXIS)
        if GATED:
            up *= tl.expand_dims(tl.load(scale_ptr + N + n, mask=n < N, other=0.0), AXIS)
    if BIAS:
        y += tl.expand_dims(tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32), AXIS)
        if GATED:
            up += tl.expand_dims(tl.load(bias_ptr + N + n, mask=n < N, other=0.0).to(tl.float32), AXIS)
    if GATED:
        y = activate_and_multiply(y, up, ACTIVATION)
    if ADD:
        y += tl.load(out_ptrs, mask=is_inside, other=0.0).to(tl.float32)
    tl.store(out_ptrs, y.to(out_ptrs.dtype.element_ty), mask=is_inside)
