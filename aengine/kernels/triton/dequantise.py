"""Some thousand numbers a program. Bytes: (1 + sizeof) * N * K; operations: 1 N K."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..grouped_codes import GroupedCodes
from .grouped_parts import constants, group_values, pointers, raised_columns
from .launch import has_pdl, known, launch, launch_next_and_wait
from .linear_parts import numbers

_BLOCK = 4096
_UNITS = 128


def dequantise(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """scale * codes [N, K] in ``dtype``, for codes int8 or float8_e4m3fn and scale float32 [N]."""
    n, k = codes.shape
    out = torch.empty((n, k), dtype=dtype, device=codes.device)
    launch(
        _dequantise,
        (n, triton.cdiv(k, _BLOCK)),
        known(codes),
        scale,
        out,
        K=k,
        BLOCK=min(_BLOCK, triton.next_power_of_2(k)),
        FP8=codes.dtype == torch.float8_e4m3fn,
        PDL=has_pdl(),
    )
    return out


@triton.jit
def _dequantise(
    codes_ptr, scale_ptr, out_ptr, K: tl.constexpr, BLOCK: tl.constexpr, FP8: tl.constexpr, PDL: tl.constexpr
):
    launch_next_and_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    scale = tl.load(scale_ptr + row)
    y = numbers(tl.load(codes_ptr + row * K + i, mask=i < K, other=0.0), scale, FP8) * scale
    tl.store(out_ptr + row * K + i, y.to(out_ptr.dtype.element_ty), mask=i < K)


def dequantise_groups(codes: GroupedCodes, dtype: torch.dtype) -> Tensor:
    """What the codes mean, [N, K] in ``dtype``."""
    (n, k), given = codes.shape, constants(codes)
    out = torch.empty((n, k), dtype=dtype, device=codes.device)
    units = k // given["UNIT"]
    block = min(_UNITS, triton.next_power_of_2(units))
    launch(_dequantise_groups, (n, triton.cdiv(units, block)), *pointers(codes), out, **given, BU=block, PDL=has_pdl())
    return out


@triton.jit
def _dequantise_groups(
    w_ptr,
    scale_ptr,
    zero_ptr,
    offset_ptr,
    row_scale_ptr,
    out_ptr,
    K: tl.constexpr,
    KIND: tl.constexpr,
    UNIT: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    RAISED: tl.constexpr,
    BU: tl.constexpr,
    PDL: tl.constexpr,
):
    launch_next_and_wait(PDL)
    n = tl.program_id(0)
    PER: tl.constexpr = 4 if UNIT == 32 else 16  # elements of a unit
    element = tl.program_id(1) * (BU * PER) + tl.arange(0, BU * PER)
    w = tl.load(w_ptr + n.to(tl.int64) * (K // UNIT * PER) + element, mask=element < K // UNIT * PER, other=0.0)
    at = tl.program_id(1) * (BU * UNIT) + tl.arange(0, BU * UNIT)
    scale, zero, offset = group_values(scale_ptr, zero_ptr, offset_ptr, n, at // GROUP, at < K, GROUPS, ROWS, RAISED)
    y = tl.reshape(raised_columns(w[None, :], scale, KIND, UNIT, 1, BU * UNIT), (BU * UNIT,))
    y = (y - zero) * scale + offset
    if row_scale_ptr is not None:
        y *= tl.load(row_scale_ptr + n)
    tl.store(out_ptr + n.to(tl.int64) * K + at, y.to(out_ptr.dtype.element_ty), mask=at < K)
