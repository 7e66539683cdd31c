"""One row by codes with a scale a group, for the kernels that read units of 16 bytes of several rows of codes: products
of a unit are summed in the thread that read it, and get their group's scale and zero point once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .grouped_parts import group_values, raised

__all__ = ["codes_at", "dot_of_units", "finished", "load_codes", "load_x"]


@triton.jit
def load_codes(row, byte, n, N: tl.constexpr, BYTES: tl.constexpr, EVEN: tl.constexpr):
    if EVEN:
        w = tl.load(row + byte[None, :])
    else:
        w = tl.load(row + byte[None, :], mask=(n < N)[:, None] & (byte < BYTES)[None, :], other=0.0)
    return w


@triton.jit
def codes_at(
    u0: tl.constexpr,
    held,
    row,
    byte,
    n,
    N: tl.constexpr,
    BYTES: tl.constexpr,
    BU: tl.constexpr,
    HELD: tl.constexpr,
    EVEN: tl.constexpr,
):
    """The codes of units from ``u0`` on: held in registers, or loaded now."""
    if u0 < HELD:
        w = held[u0 // BU]
    else:
        w = load_codes(row, u0 * 16 + byte, n, N, BYTES, EVEN)
    return w


@triton.jit
def load_x(x_ptr, norm_ptr, at, squares, K: tl.constexpr, NORM: tl.constexpr, EVEN: tl.constexpr):
    """x at columns ``at``, float32, and its squares added to ``squares``."""
    if EVEN:
        x = tl.load(x_ptr + at).to(tl.float32)
    else:
        x = tl.load(x_ptr + at, mask=at < K, other=0.0).to(tl.float32)
    if NORM:
        squares += x * x
        if EVEN:
            x = x * tl.load(norm_ptr + at).to(tl.float32)
        else:
            x = x * tl.load(norm_ptr + at, mask=at < K, other=0.0).to(tl.float32)
        if x_ptr.dtype.element_ty == tl.bfloat16:  # as in linear_gemv.py
            x = x.to(tl.bfloat16).to(tl.float32)
    return x, squares


@triton.jit
def _by_units(y, BN: tl.constexpr, BU: tl.constexpr):
    """[BN, BU]: the sums of ``y`` [BN, 16 BU] over each unit's bytes, which one thread has."""
    return tl.sum(tl.reshape(y, (BN, BU, 16)), 2)


@triton.jit
def _beside(x, w, KIND: tl.constexpr):
    """x for each row of codes ``w``. That no code is negative the compiler finds out after it has chosen which thread
    has what: so a thread has x where it has codes, and sums of it that are the same for several rows are made once."""
    if KIND == "e4m3":
        y = x[None, :] + tl.zeros(w.shape, tl.float32)
    else:
        y = tl.where((w.to(tl.int32) & 255) >= 0, x[None, :], 0.0)
    return y


@triton.jit
def _scaled_sums(
    y,
    total,
    scale_ptr,
    zero_ptr,
    offset_ptr,
    n,
    column,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    RAISED: tl.constexpr,
):
    """[BN, BU]: sums ``y`` of raised codes times x, each of one group, whose x sums up to ``total``, times the group's
    scale."""
    # Read as [BU, BN], and not as contiguous, a thread gets what it has the codes of: nothing is moved between threads.
    inside = (column < K)[:, None] & (n < N)[None, :]
    at = tl.max_contiguous(column // GROUP, 1)
    scale, zero, offset = group_values(
        scale_ptr, zero_ptr, offset_ptr, n[None, :], at[:, None], inside, GROUPS, ROWS, RAISED
    )
    if RAISED != 0.0 or zero_ptr is not None:
        y -= tl.trans(zero) * total
    y *= tl.trans(scale)
    if offset_ptr is not None:
        y += tl.trans(offset) * total
    return y


@triton.jit
def dot_of_units(
    w,
    x_low,
    x_high,
    scale_ptr,
    zero_ptr,
    offset_ptr,
    n,
    column,
    KIND: tl.constexpr,
    UNIT: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BN: tl.constexpr,
    BU: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    RAISED: tl.constexpr,
):
    """[BN, BU]: the products of codes w [BN, 16 BU] and x; column: the first of each unit [BU]. Sums of x that are not
    needed the compiler leaves out."""
    y = _by_units(raised(w, x_low, False, KIND) * x_low[None, :], BN, BU)
    total = _by_units(_beside(x_low, w, KIND), BN, BU)
    if UNIT == 32:
        y_high = _by_units(raised(w, x_low, True, KIND) * x_high[None, :], BN, BU)
        total_high = _by_units(_beside(x_high, w, KIND), BN, BU)
        if GROUP == 16:
            y_high = _scaled_sums(
                y_high, total_high, scale_ptr, zero_ptr, offset_ptr, n, column + 16, N, K, GROUP, GROUPS, ROWS, RAISED
            )
        else:
            y += y_high
            total += total_high
    y = _scaled_sums(y, total, scale_ptr, zero_ptr, offset_ptr, n, column, N, K, GROUP, GROUPS, ROWS, RAISED)
    if UNIT == 32 and GROUP == 16:
        y += y_high
    return y


@triton.jit
def finished(y, n, inside, row_scale_ptr, bias_ptr, BIAS: tl.constexpr):
    if row_scale_ptr is not None:
        y *= tl.load(row_scale_ptr + n, mask=inside, other=0.0)
    if BIAS:
        y += tl.load(bias_ptr + n, mask=inside, other=0.0).to(tl.float32)
    return y
