"""Parts that the linear kernels for several rows share: what they do before the sums over K, and after them."""

from __future__ import annotations

import triton
import triton.language as tl

from .activation import activate_and_multiply
from .launch import gdc_launch_dependents, gdc_wait, prefetch

__all__ = ["store_product", "wait_for_rows"]


@triton.jit
def wait_for_rows(w_ptr, N: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, GATED: tl.constexpr):
    """With PDL: prefetch this program's rows of W, then wait for x."""
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
    n,
    out_ptrs,
    is_inside,
    N,
    AXIS: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """Store the sums ``y`` with bias, gated by ``up``, added to what is there. AXIS: that of the tokens; n: [BN]."""
    if BIAS:
        y += tl.expand_dims(tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32), AXIS)
        if GATED:
            up += tl.expand_dims(tl.load(bias_ptr + N + n, mask=n < N, other=0.0).to(tl.float32), AXIS)
    if GATED:
        y = activate_and_multiply(y, up, ACTIVATION)
    if ADD:
        y += tl.load(out_ptrs, mask=is_inside, other=0.0).to(tl.float32)
    tl.store(out_ptrs, y.to(out_ptrs.dtype.element_ty), mask=is_inside)
