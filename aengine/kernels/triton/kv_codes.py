"""Keys and values in FP8: numbers to codes of float8_e4m3fn, and back.

Codes are made by integer operations, so on every GPU, and rounded to the nearest, halves to the even one, as the
hardware does. They are read by its instructions where these know the type, else by integer operations too. A cache of
plain numbers has no scales (None), and is only converted.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import HAS_PTX, has_fp8, has_pdl, is_interpreted


def as_known(kv_cache: Tensor, kv_scales: Tensor | None) -> Tensor:
    """The cache as the GPU reads it: codes as float8_e4m3fn where it converts that type to bfloat16 (9.0 and
    later: Triton 3.6 has no code for it on 8.9), else as int8."""
    if kv_scales is None:
        return kv_cache
    return kv_cache.view(torch.float8_e4m3fn if has_fp8() and (is_interpreted or has_pdl()) else torch.int8)


@triton.jit
def times_scale(x, scales, head):
    """x times a head's scale; ``head``: of values, those of keys are counted first. Without scales x as it is."""
    if scales is not None:
        x = x * tl.load(scales + head)
    return x


@triton.jit
def kept_number(x, scales, head, is_head, like):
    """What a cache of the type of ``like`` keeps of x: its code, int8; plain numbers without scales. ``head``: as in
    `times_scale`, [rows, 1] of x's rows where ``is_head``, or one."""
    if scales is None:
        y = x.to(like.dtype.element_ty)
    else:
        number = tl.div_rn(x.to(tl.float32), tl.load(scales + head, mask=is_head, other=1.0))
        bits = number.to(tl.int32, bitcast=True)
        size = tl.minimum(tl.abs(number), 448.0)
        rounded = size.to(tl.int32, bitcast=True)
        rounded = (rounded + 0x7FFFF + ((rounded >> 20) & 1)) >> 20  # three bits of the mantissa are kept
        # below 2^-6 codes are multiples of 2^-9: the sum leaves that multiple, rounded, in the last bits
        small = (size + 16384.0).to(tl.int32, bitcast=True) & 0xF
        code = tl.where(size < 0.015625, small, rounded - 960)
        code = tl.where(number != number, 0x7F, code)
        y = (code | ((bits >> 24) & 0x80)).to(tl.int8)
    return y


@triton.jit
def beside_codes(q, scales):
    """Queries in the dtype in which codes are multiplied: float16 in place of bfloat16, since one instruction makes two
    float16 numbers of codes, and four two of bfloat16. What is beyond float16's range saturates."""
    if scales is not None and q.dtype == tl.bfloat16:
        q = tl.clamp(q.to(tl.float32), -65504.0, 65504.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float16)
    return q


@triton.jit
def store_kept(place, kept, mask):
    """Store what `kept_number` returned."""
    if place.dtype.element_ty == kept.dtype:
        tl.store(place, kept, mask=mask)
    else:
        tl.store(place, kept.to(place.dtype.element_ty, bitcast=True), mask=mask)


@triton.jit
def numbers_of(kept, like):
    """What was loaded from a cache, or returned by `kept_number`, in the dtype of ``like``: scales are not in it."""
    if kept.dtype == tl.int8:  # sign, exponent and mantissa in their places in float32, whose bias is 120 more
        code = kept.to(tl.int32)
        y = ((code << 20) & -0x78100000).to(tl.float32, bitcast=True) * 1.329227995784916e36
        y = tl.where((code & 0x7F) == 0x7F, float("nan"), y).to(like.dtype)
    else:
        y = kept.to(like.dtype)
    return y


@triton.jit
def values_of(kept, like):
    """`numbers_of` for the values of a product. Four codes of a row at once, and only then put where the tensor cores
    want them: left to itself the compiler reads each code from shared memory by itself, since it turns them there."""
    if kept.dtype == tl.float8e4nv and like.dtype == tl.float16 and HAS_PTX:
        y = tl.inline_asm_elementwise(
            """
            {
                .reg .b16 low, high;
                mov.b32 {low, high}, $2;
                cvt.rn.f16x2.e4m3x2 $0, low;
                cvt.rn.f16x2.e4m3x2 $1, high;
            }
            """,
            "=r,=r,r",
            [kept],
            dtype=tl.float16,
            is_pure=False,  # a pure one is moved to where the codes have been turned
            pack=4,
        )
    else:
        y = numbers_of(kept, like)
    return y
