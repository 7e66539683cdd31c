"""One row by codes with a scale a group, for the kernels that read units of 16 bytes of several rows of codes: products
of a unit are summed in the thread that read it, and get their group's scale and zero point once.

A unit is four words, of 32 codes of 4 bits, or 16 codes of 8 bits: PER elements of UNIT columns.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .grouped_parts import group_values, halves, joined_halves, masked_or, no_number, raised, times_plus
from .launch import HAS_PTX


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
def load_x(
    x_ptr, norm_ptr, at, squares, K: tl.constexpr, UNIT: tl.constexpr, NORM: tl.constexpr, EVEN: tl.constexpr,
    PACKED: tl.constexpr = False,
):  # fmt: skip
    """The numbers of x, float32, that elements of codes are multiplied by, of words two for each fourth pair; PACKED:
    words of two quarters of numbers, as `_dot_of_halves` takes them, and the numbers' sum. And their squares added to
    ``squares``. ``at``: from `places_of`, beyond K where there are none."""
    if UNIT == 16:
        x, squares = _load(x_ptr, norm_ptr, at, squares, K, NORM, EVEN)
        xs = (x,)
    else:
        a, b, squares = _load_pairs(x_ptr, norm_ptr, at, squares, K, NORM, EVEN, PACKED)
        c, d, squares = _load_pairs(x_ptr, norm_ptr, at + 4, squares, K, NORM, EVEN, PACKED)
        e, f, squares = _load_pairs(x_ptr, norm_ptr, at + 8, squares, K, NORM, EVEN, PACKED)
        g, h, squares = _load_pairs(x_ptr, norm_ptr, at + 12, squares, K, NORM, EVEN, PACKED)
        if PACKED:
            like: tl.constexpr = x_ptr.dtype.element_ty
            words = _packed(a, b, like), _packed(c, d, like), _packed(e, f, like), _packed(g, h, like)
            total = (a + b + c + d + e + f + g + h) * 4.0
            xs = (words[0], words[1], words[2], words[3], total)  # type: ignore[assignment]
        else:
            xs = (a, b, c, d, e, f, g, h)  # type: ignore[assignment]
    return xs, squares


@triton.jit
def _packed(x, y, dtype: tl.constexpr):
    """Words of two numbers of float16; what is beyond their range saturates. ``dtype``: what they were: GPUs that have
    bfloat16 have an instruction for it."""
    if HAS_PTX and dtype == tl.bfloat16:
        words = tl.inline_asm_elementwise(
            "cvt.rn.satfinite.f16x2.f32 $0, $2, $1;", "=r,f,f", [x, y], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        x = tl.clamp(x, -65504.0, 65504.0, propagate_nan=tl.PropagateNan.ALL)
        y = tl.clamp(y, -65504.0, 65504.0, propagate_nan=tl.PropagateNan.ALL)
        words = joined_halves(x.to(tl.float16), y.to(tl.float16))
    return words


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
def _load_pairs(
    x_ptr, norm_ptr, at, squares, K: tl.constexpr, NORM: tl.constexpr, EVEN: tl.constexpr, PACKED: tl.constexpr
):
    """PACKED: a quarter of each number."""
    IS_BF16: tl.constexpr = x_ptr.dtype.element_ty == tl.bfloat16
    both = _load_both(x_ptr, at, K, EVEN)
    if NORM:
        x, y = halves(both, x_ptr.dtype.element_ty)
        squares += x * x + y * y
    if NORM and not (IS_BF16 and norm_ptr.dtype.element_ty == tl.bfloat16):
        a, b = halves(_load_both(norm_ptr, at, K, EVEN), norm_ptr.dtype.element_ty)
        x = _rounded(x * a, x_ptr.dtype.element_ty)
        y = _rounded(y * b, x_ptr.dtype.element_ty)
        if PACKED:
            x *= 0.25
            y *= 0.25
    else:
        if NORM:
            both = times_plus(both, _load_both(norm_ptr, at, K, EVEN), no_number((1,)), tl.bfloat16)
        if PACKED and IS_BF16:  # in one instruction for two
            both = times_plus(both, tl.full((1,), 0x3E803E80, tl.int32), no_number((1,)), tl.bfloat16)
        x, y = halves(both, x_ptr.dtype.element_ty)
        if PACKED and not IS_BF16:
            x *= 0.25
            y *= 0.25
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
def _centred(words, INDEX: tl.constexpr):
    """Words of two numbers of float16: an eighth of codes INDEX and INDEX + 4 of words, less 8."""
    q = words >> 8 if INDEX > 1 else words
    one = tl.full((1,), 0x3C003C00, tl.int32)
    if INDEX % 2 == 0:  # in the last bits of 128
        y = times_plus(masked_or(q, 0x000F000F, 0x58005800), one, tl.full((1,), -0x27F727F8, tl.int32), tl.float16)
    else:  # in bits of 8 that count as much
        y = times_plus(masked_or(q, 0x00F000F0, 0x48004800), one, tl.full((1,), -0x377F3780, tl.int32), tl.float16)
    return y


@triton.jit
def _added_halves(a, b):
    return times_plus(a, a * 0 + 0x3C003C00, b, tl.float16)


@triton.jit
def _dot_of_halves(w, xs, BN: tl.constexpr, BU: tl.constexpr):
    """[BN, BU]: the sums of a unit's codes less 8 times ``xs``, a thirty-second of the products by x. In float16: off
    by some 3e-4, in half as many instructions as in float32."""
    y = times_plus(_centred(w, 0), xs[0][None, :], tl.zeros((1, 1), tl.int32), tl.float16)
    y = times_plus(_centred(w, 1), xs[1][None, :], y, tl.float16)
    y = times_plus(_centred(w, 2), xs[2][None, :], y, tl.float16)
    y = times_plus(_centred(w, 3), xs[3][None, :], y, tl.float16)
    low, high = halves(tl.reduce(tl.reshape(y, (BN, BU, y.shape[1] // BU)), 2, _added_halves), tl.float16)
    return low + high


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
    RAISED: tl.constexpr, PACKED: tl.constexpr = False,
):  # fmt: skip
    """[BN, BU]: the products of codes w [BN, PER * BU] and ``xs`` of `load_x`; column: the first of each unit [BU].
    Sums of x that are not needed the compiler leaves out."""
    FACTOR: tl.constexpr = 16384.0 if KIND == "e2m1" else 1.0
    x = xs[0]
    if PACKED:
        x = xs[4]
        y = _dot_of_halves(w, xs, BN, BU) * 32.0
    elif UNIT == 16:
        y = raised(w, x, 0, KIND) * x[None, :]
    else:
        y = _add_pairs(tl.zeros(w.shape, tl.float32), w, x, xs[1], 0, KIND)
        y = _add_pairs(y, w, xs[2], xs[3], 1, KIND)
        x += xs[1] + xs[2] + xs[3]
        if GROUP == 16:
            first = _scaled_sums(
                _by_units(y, BN, BU) * FACTOR, _sums_of_x(x, w, KIND, BN, BU), scale_ptr, zero_ptr, offset_ptr, n,
                column, N, K, GROUP, GROUPS, ROWS, RAISED,
            )  # fmt: skip
            y = tl.zeros(w.shape, tl.float32)
            x = tl.zeros(x.shape, tl.float32)
            column += 16
        y = _add_pairs(y, w, xs[4], xs[5], 2, KIND)
        y = _add_pairs(y, w, xs[6], xs[7], 3, KIND)
        x += xs[4] + xs[5] + xs[6] + xs[7]
    if not PACKED:
        y = _by_units(y, BN, BU) * FACTOR
    z = _scaled_sums(
        y, _sums_of_x(x, w, KIND, BN, BU), scale_ptr, zero_ptr, offset_ptr, n, column,
        N, K, GROUP, GROUPS, ROWS, RAISED - 24.0 if PACKED else RAISED,
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
