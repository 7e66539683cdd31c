"""One row by codes with a scale a group, for the kernels that read units of 16 bytes of several rows of codes: products
of a unit are summed in the thread that read it, and get their group's scale and zero point once.

A unit is four words, of 32 codes of 4 bits, or 16 codes of 8 bits: PER elements of UNIT columns.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .grouped_parts import group_values, halves, no_number, raised, times_plus


@triton.jit
def load_codes(row, element, n, N: tl.constexpr, WIDTH: tl.constexpr, EVEN: tl.constexpr):
    if EVEN:
        w = tl.load(row + element[None, :])
    else:
        w = tl.load(row + element[None, :], mask=(n < N)[:, None] & (element < WIDTH)[None, :], other=0.0)
    return w


@triton.jit
def codes_at(
    u0: tl.constexpr, held, row, element, n, N: tl.constexpr, WIDTH: tl.constexpr, BU: tl.constexpr,
    HELD: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """The codes of units from ``u0`` on: held in registers, or loaded now."""
    if u0 < HELD:
        w = held[u0 // BU]
    else:
        w = load_codes(row, element + u0 * (element.shape[0] // BU), n, N, WIDTH, EVEN)
    return w


@triton.jit
def places_of(element, UNIT: tl.constexpr):
    """Where `load_x` begins for each element of a row's codes: the index of a pair of numbers, or of a number."""
    return element // 4 * 16 + element % 4 if UNIT == 32 else element


@triton.jit
def load_x(x_ptr, norm_ptr, at, squares, K: tl.constexpr, UNIT: tl.constexpr, NORM: tl.constexpr, EVEN: tl.constexpr):
    """The numbers of x, float32, that elements of codes are multiplied by, of words two for each fourth pair; and their
    squares added to ``squares``. ``at``: from `places_of`, beyond K where there are none."""
    if UNIT == 16:
        x, squares = _load(x_ptr, norm_ptr, at, squares, K, NORM, EVEN)
        xs = (x,)
    else:
        a, b, squares = _load_pairs(x_ptr, norm_ptr, at, squares, K, NORM, EVEN)
        c, d, squares = _load_pairs(x_ptr, norm_ptr, at + 4, squares, K, NORM, EVEN)
        e, f, squares = _load_pairs(x_ptr, norm_ptr, at + 8, squares, K, NORM, EVEN)
        g, h, squares = _load_pairs(x_ptr, norm_ptr, at + 12, squares, K, NORM, EVEN)
        xs = (a, b, c, d, e, f, g, h)  # type: ignore[assignment]
    return xs, squares


@triton.jit
def _load(x_ptr, norm_ptr, at, squares, K: tl.constexpr, NORM: tl.constexpr, EVEN: tl.constexpr):
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
        x = _rounded(x, x_ptr.dtype.element_ty)
    return x, squares


@triton.jit
def _load_pairs(x_ptr, norm_ptr, at, squares, K: tl.constexpr, NORM: tl.constexpr, EVEN: tl.constexpr):
    both = _load_both(x_ptr, at, K, EVEN)
    x, y = halves(both, x_ptr.dtype.element_ty)
    if NORM:
        squares += x * x + y * y
        if x_ptr.dtype.element_ty == tl.bfloat16 and norm_ptr.dtype.element_ty == tl.bfloat16:
            both = times_plus(both, _load_both(norm_ptr, at, K, EVEN), no_number((1,)), tl.bfloat16)
            x, y = halves(both, tl.bfloat16)
        else:
            a, b = halves(_load_both(norm_ptr, at, K, EVEN), norm_ptr.dtype.element_ty)
            x = _rounded(x * a, x_ptr.dtype.element_ty)
            y = _rounded(y * b, x_ptr.dtype.element_ty)
    return x, y, squares


@triton.jit
def _load_both(ptr, at, K: tl.constexpr, EVEN: tl.constexpr):
    """Numbers 2 at and 2 at + 1, read as one integer, so that a thread reads those of a unit 16 bytes at a time."""
    ptrs = ptr.to(tl.pointer_type(tl.int64 if ptr.dtype.element_ty == tl.float32 else tl.int32)) + at
    if EVEN:
        both = tl.load(ptrs)
    else:
        both = tl.load(ptrs, mask=2 * at < K, other=0)
    return both


@triton.jit
def _rounded(x, dtype: tl.constexpr):
    return x.to(tl.bfloat16).to(tl.float32) if dtype == tl.bfloat16 else x  # as in linear_gemv.py


@triton.jit
def _by_units(y, BN: tl.constexpr, BU: tl.constexpr):
    """[BN, BU]: the sums of ``y`` over each unit's elements, which one thread has."""
    return tl.sum(tl.reshape(y, (BN, BU, y.shape[1] // BU)), 2)


@triton.jit
def _sums_of_x(x, w, KIND: tl.constexpr, BN: tl.constexpr, BU: tl.constexpr):
    """[BN, BU]: the sums of x over units, for each row of codes ``w``. That no code is negative the compiler finds out
    after it has chosen which thread has what: so a thread has x where it has codes, and sums of it that are the same
    for several rows are made once."""
    if KIND == "e4m3":
        y = x[None, :] + tl.zeros(w.shape, tl.float32)
    else:
        y = tl.where((w.to(tl.int32) & 255) >= 0, x[None, :], 0.0)
    return _by_units(y, BN, BU)


@triton.jit
def _scaled_sums(
    y, total, scale_ptr, zero_ptr, offset_ptr, n, column, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr,
    GROUPS: tl.constexpr, ROWS: tl.constexpr, RAISED: tl.constexpr,
):  # fmt: skip
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
def _add_pairs(y, w, x, x_2, INDEX: tl.constexpr, KIND: tl.constexpr):
    """y and the products of codes INDEX and INDEX + 4 of words; of kind e2m1 2^-14 of them."""
    if KIND == "e2m1":  # sign, exponent and mantissa in their places in two numbers of float16
        SHIFT: tl.constexpr = 9 - 4 * INDEX
        both = (w << SHIFT if SHIFT > 0 else w >> -SHIFT) & 0x0E000E00 | w << 12 - 4 * INDEX & -0x7FFF8000
        low = both.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        high = (both >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        low = raised(w, x, INDEX, KIND)
        high = raised(w, x, INDEX + 4, KIND)
    return y + low * x[None, :] + high * x_2[None, :]  # in this order each is one instruction


@triton.jit
def dot_of_units(
    w, xs, scale_ptr, zero_ptr, offset_ptr, n, column, KIND: tl.constexpr, UNIT: tl.constexpr, N: tl.constexpr,
    K: tl.constexpr, BN: tl.constexpr, BU: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr,
    RAISED: tl.constexpr,
):  # fmt: skip
    """[BN, BU]: the products of codes w [BN, PER * BU] and ``xs`` of `load_x`; column: the first of each unit [BU].
    Sums of x that are not needed the compiler leaves out."""
    FACTOR: tl.constexpr = 16384.0 if KIND == "e2m1" else 1.0
    x = xs[0]
    if UNIT == 16:
        y = raised(w, x, 0, KIND) * x[None, :]
    else:
        y = _add_pairs(tl.zeros(w.shape, tl.float32), w, x, xs[1], 0, KIND)
        y = _add_pairs(y, w, xs[2], xs[3], 1, KIND)
        x += xs[1] + xs[2] + xs[3]
        if GROUP == 16:
            first = _scaled_sums(
                _by_units(y, BN, BU) * FACTOR,
                _sums_of_x(x, w, KIND, BN, BU), scale_ptr, zero_ptr, offset_ptr, n, column, N, K, GROUP, GROUPS, ROWS,
                RAISED,
            )  # fmt: skip
            y = tl.zeros(w.shape, tl.float32)
            x = tl.zeros(x.shape, tl.float32)
            column += 16
        y = _add_pairs(y, w, xs[4], xs[5], 2, KIND)
        y = _add_pairs(y, w, xs[6], xs[7], 3, KIND)
        x += xs[4] + xs[5] + xs[6] + xs[7]
    z = _scaled_sums(
        _by_units(y, BN, BU) * FACTOR,
        _sums_of_x(x, w, KIND, BN, BU), scale_ptr, zero_ptr, offset_ptr, n, column, N, K, GROUP, GROUPS, ROWS, RAISED,
    )  # fmt: skip
    if UNIT == 32 and GROUP == 16:
        z += first
    return z


@triton.jit
def finished(y, n, inside, row_scale_ptr, bias_ptr, BIAS: tl.constexpr):
    if row_scale_ptr is not None:
        y *= tl.load(row_scale_ptr + n, mask=inside, other=0.0)
    if BIAS:
        y += tl.load(bias_ptr + n, mask=inside, other=0.0).to(tl.float32)
    return y
