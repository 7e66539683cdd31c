"""What the kernels over `GroupedCodes` share: what codes and scales are in float32.

A unit is 16 bytes of a row's codes: four words of 32 columns in 4 bits (see grouped_codes.py), or 16 columns in 8 bits.

Codes become float32 by putting their bits into the mantissa of a power of two. That is their value and a constant more,
which is subtracted together with the zero point: from the codes, or, in a sum of products, as many sums of x.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..grouped_codes import GroupedCodes
from ..rms_norm import Norm
from .launch import HAS_PTX, has_pdl, known, launch
from .linear_parts import numbers

_RAISED_BY = {"int4": 24.0, "uint4": 16.0, "iq4_nl": 384.0, "int8": 384.0, "uint8": 256.0}
_IQ4_0 = tl.constexpr(0x3F2D1801)  # llama.cpp's numbers, each plus 128, a byte each
_IQ4_1 = tl.constexpr(0x766A5D4F)
_IQ4_2 = tl.constexpr(-0x5966727F)
_IQ4_3 = tl.constexpr(-0x0E263A4B)


def pointers(codes: GroupedCodes) -> tuple[Tensor | None, ...]:
    """Return what kernels take of the codes: codes (of 4 bits, words of eight), scale, zero, offset, row_scale."""
    scale = codes.scale.view(torch.uint8) if codes.scale.dtype == torch.float8_e8m0fnu else known(codes.scale)
    own = codes.codes.view(torch.int32) if codes.has_4_bits else known(codes.codes)
    return own, scale, codes.zero, codes.offset, codes.row_scale


def constants(codes: GroupedCodes) -> dict[str, Any]:
    k = codes.shape[-1]
    return {
        "K": k,
        "KIND": codes.kind,
        "UNIT": 32 if codes.has_4_bits else 16,
        "GROUP": min(codes.group, k),
        "GROUPS": codes.scale.shape[-1],
        "ROWS": codes.rows,
        "RAISED": _RAISED_BY.get(codes.kind, 0.0),
    }


def launch_row(
    kernel: Any,
    rows: int,
    x: Tensor,
    codes: GroupedCodes,
    bias: Tensor | None,
    out: Tensor,
    norm: Norm | None,
    *counts: int,
    add: bool,
    activation: str | None,
    **own: Any,
) -> None:
    """Set out [1, N] to the product by x, or add it to out. ``rows``: output features of a program; ``counts`` and
    ``own``: what the kernel is given beside what all of them are."""
    size = out.shape[1]
    launch(
        kernel,
        (triton.cdiv(size, rows),),
        x,
        *pointers(codes),
        out,
        None if norm is None else norm.weight,
        bias,
        0.0 if norm is None else norm.eps,
        *counts,
        N=size,
        NORM=norm is not None,
        BIAS=bias is not None,
        ADD=add,
        GATED=activation is not None,
        ACTIVATION=activation,
        PDL=has_pdl(),
        **own,
    )


@triton.jit
def masked_or(words, MASK: tl.constexpr, BITS: tl.constexpr):
    """words & MASK | BITS, in one instruction, for which the compiler takes two."""
    if HAS_PTX:
        lop3: tl.constexpr = f"lop3.b32 $0, $1, {MASK}, {BITS}, 0xea;"
        y = tl.inline_asm_elementwise(lop3, "=r,r", [words], dtype=tl.int32, is_pure=True, pack=1)
    else:
        y = words & MASK | BITS
    return y


@triton.jit
def halves(both, dtype: tl.constexpr):
    """The two numbers of ``dtype`` in each word (of float32: in 64 bits), in float32."""
    if dtype == tl.float32:
        low, high = both.to(tl.int32).to(dtype, bitcast=True), (both >> 32).to(tl.int32).to(dtype, bitcast=True)
    elif dtype == tl.bfloat16:
        low, high = (both << 16).to(tl.float32, bitcast=True), (both & -65536).to(tl.float32, bitcast=True)
    else:
        low = both.to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
        high = (both >> 16).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
    return low, high


@triton.jit
def times_plus(words, factor, addend, dtype: tl.constexpr):
    """Words of the two numbers of ``dtype`` in each word, times those in ``factor``, plus those in ``addend``: one
    instruction for both, for which the compiler, given halves, takes three."""
    if HAS_PTX:
        asm: tl.constexpr = "fma.rn.f16x2 $0, $1, $2, $3;" if dtype == tl.float16 else "fma.rn.bf16x2 $0, $1, $2, $3;"
        y = tl.inline_asm_elementwise(asm, "=r,r,r,r", [words, factor, addend], dtype=tl.int32, is_pure=True, pack=1)
    else:
        low, high = halves(words, dtype)
        low_factor, high_factor = halves(factor, dtype)
        low_addend, high_addend = halves(addend, dtype)
        low = (low * low_factor + low_addend).to(dtype).to(tl.int16, bitcast=True)
        high = (high * high_factor + high_addend).to(dtype).to(tl.int16, bitcast=True)
        y = low.to(tl.int32) & 65535 | high.to(tl.int32) << 16
    return y


@triton.jit
def no_number(shape: tl.constexpr):
    return tl.full(shape, -0x7FFF8000, tl.int32)  # -0


@triton.jit
def raised(codes, like, INDEX: tl.constexpr, KIND: tl.constexpr):
    """Codes' values plus their kind's constant, float32, the dtype of ``like``. INDEX: which eighth of words, of 4
    bits: columns 8 (INDEX % 4) + INDEX // 4 behind twice the word's place among four."""
    if KIND == "int8" or KIND == "uint8":
        q = codes.to(tl.int32) & 255
    elif KIND == "e4m3":
        q = codes
    else:
        q = codes >> 4 * INDEX
    if KIND == "int4" or KIND == "uint4":
        q = codes << 19 - 4 * INDEX if INDEX < 5 else codes >> 4 * INDEX - 19
        y = masked_or(q, 0x780000, 0x41800000).to(tl.float32, bitcast=True)
    elif KIND == "e2m1":  # sign, exponent and mantissa in their places in float32, whose bias is 126 more
        y = ((q & 7) << 22 | (q & 8) << 28).to(tl.float32, bitcast=True) * 8.507059173023462e37
    elif KIND == "iq4_nl":
        word = tl.where((q & 8) != 0, tl.where((q & 4) != 0, _IQ4_3, _IQ4_2), tl.where((q & 4) != 0, _IQ4_1, _IQ4_0))
        y = (((word >> ((q & 3) << 3)) & 255) << 15 | 0x43800000).to(tl.float32, bitcast=True)
    elif KIND == "int8":
        y = ((q ^ 128) << 15 | 0x43800000).to(tl.float32, bitcast=True)
    elif KIND == "uint8":
        y = (q << 15 | 0x43800000).to(tl.float32, bitcast=True)
    else:
        y = numbers(q, like, True)
    return y


@triton.jit
def in_columns(a, b, c, d, BN: tl.constexpr, BK: tl.constexpr):
    """[BN, BK]: numbers in the order of their columns. Each of four [BN, BK / 8, 2] has codes INDEX and INDEX + 4 of
    words. Nothing moves between threads, where they have words as the matrix instruction wants its numbers."""
    y = tl.join(tl.join(a, b), tl.join(c, d))
    y = tl.reshape(y, (BN, BK // 32, 4, 2, 2, 2))  # a word of four; + 1 column; + 8; + 16
    return tl.reshape(tl.permute(y, (0, 1, 5, 4, 2, 3)), (BN, BK))


@triton.jit
def raised_columns(w, like, KIND: tl.constexpr, UNIT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """[BN, BK]: what `raised` gives for all codes of elements ``w``."""
    if UNIT == 16:
        y = raised(w, like, 0, KIND)
    else:
        y = in_columns(
            tl.join(raised(w, like, 0, KIND), raised(w, like, 4, KIND)),
            tl.join(raised(w, like, 1, KIND), raised(w, like, 5, KIND)),
            tl.join(raised(w, like, 2, KIND), raised(w, like, 6, KIND)),
            tl.join(raised(w, like, 3, KIND), raised(w, like, 7, KIND)),
            BN, BK,
        )  # fmt: skip
    return y


@triton.jit
def _load(ptrs, inside):
    if inside is None:
        y = tl.load(ptrs)
    else:
        y = tl.load(ptrs, mask=inside, other=0.0)
    return y


@triton.jit
def group_values(
    scale_ptr, zero_ptr, offset_ptr, n, group, inside, GROUPS: tl.constexpr, ROWS: tl.constexpr, RAISED: tl.constexpr,
):  # fmt: skip
    """Scale, what is to be subtracted from raised codes, and offset, float32, of each row ``n`` and group, which are
    broadcast against each other. ``inside``: where there are some; None: everywhere."""
    at = (n // ROWS).to(tl.int64) * GROUPS + group
    s = _load(scale_ptr + at, inside)
    if s.dtype == tl.uint8:  # a power of two
        scale = (s.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    else:
        scale = numbers(s, tl.zeros(s.shape, tl.float32), True)
    zero = tl.full(scale.shape, RAISED, tl.float32)
    if zero_ptr is not None:
        zero += _load(zero_ptr + at, inside).to(tl.float32)
    offset = tl.zeros(scale.shape, tl.float32)
    if offset_ptr is not None:
        offset = _load(offset_ptr + at, inside).to(tl.float32)
    return scale, zero, offset
