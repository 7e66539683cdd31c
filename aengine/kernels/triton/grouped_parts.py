"""What the kernels over `GroupedCodes` share: what codes and scales are in float32.

A unit is 16 bytes of a row's codes, which one thread reads: 32 columns in 4 bits, of which byte j has column j in its
low half and column 16 + j in its high one; 16 columns in 8 bits.

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
from .launch import known
from .linear_parts import numbers

__all__ = ["UNIT_BYTES", "columns_of", "constants", "group_values", "pointers", "raised", "scale_of"]

UNIT_BYTES = 16
_RAISED_BY = {"int4": 24.0, "uint4": 16.0, "iq4_nl": 384.0, "int8": 384.0, "uint8": 256.0}
_IQ4_0 = tl.constexpr(0x3F2D1801)  # llama.cpp's numbers, each plus 128, a byte each
_IQ4_1 = tl.constexpr(0x766A5D4F)
_IQ4_2 = tl.constexpr(-0x5966727F)
_IQ4_3 = tl.constexpr(-0x0E263A4B)


def pointers(codes: GroupedCodes) -> tuple[Tensor | None, ...]:
    """Return what kernels take of the codes: codes, scale, zero, offset, row_scale."""
    scale = codes.scale.view(torch.uint8) if codes.scale.dtype == torch.float8_e8m0fnu else known(codes.scale)
    return known(codes.codes), scale, codes.zero, codes.offset, codes.row_scale


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


@triton.jit
def raised(codes, like, HIGH: tl.constexpr, KIND: tl.constexpr):
    """Codes' values plus their kind's constant, float32, the dtype of ``like``. HIGH: of the high halves of bytes."""
    q = codes
    if KIND != "e4m3":
        q = codes.to(tl.int32) & 255
        if KIND != "int8" and KIND != "uint8":
            q = q >> 4 if HIGH else q & 15
    if KIND == "int4" or KIND == "uint4":
        y = (q << 19 | 0x41800000).to(tl.float32, bitcast=True)
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
def columns_of(byte, UNIT: tl.constexpr):
    """The column of each byte of a row's codes: that of its low half, in 4 bits."""
    return byte // 16 * UNIT + byte % 16


@triton.jit
def scale_of(stored):
    """Scales in float32, as ``stored`` has them in memory."""
    if stored.dtype == tl.uint8:  # a power of two
        scale = (stored.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    else:
        scale = numbers(stored, tl.zeros(stored.shape, tl.float32), True)
    return scale


@triton.jit
def group_values(
    scale_ptr,
    zero_ptr,
    offset_ptr,
    n,
    group,
    inside,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    RAISED: tl.constexpr,
):
    """Scale, what is to be subtracted from raised codes, and offset, float32, of each row ``n`` and group, which are
    broadcast against each other."""
    at = (n // ROWS).to(tl.int64) * GROUPS + group
    s = tl.load(scale_ptr + at, mask=inside, other=0.0)
    scale = scale_of(s)
    zero = tl.full(scale.shape, RAISED, tl.float32)
    if zero_ptr is not None:
        zero += tl.load(zero_ptr + at, mask=inside, other=0).to(tl.float32)
    offset = tl.zeros(scale.shape, tl.float32)
    if offset_ptr is not None:
        offset = tl.load(offset_ptr + at, mask=inside, other=0.0).to(tl.float32)
    return scale, zero, offset
