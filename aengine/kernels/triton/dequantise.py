"""Some thousand numbers a program. Bytes: (1 + sizeof) * N * K; operations: 1 N K."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..grouped_codes import GroupedCodes
from .grouped_parts import columns_of, constants, group_values, pointers, raised
from .launch import has_pdl, known, launch, launch_next_and_wait
from .linear_parts import numbers

__all__ = ["dequantise", "dequantise_groups"]

_BLOCK = 4096
_BYTES = 2048


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
    width = k // given["UNIT"] * 16
    block = min(_BYTES, triton.next_power_of_2(width))
    launch(
        _dequantise_groups, (n, triton.cdiv(width, block)), *pointers(codes), out, **given, BLOCK=block, PDL=has_pdl()
    )
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
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    launch_next_and_wait(PDL)
    n = tl.program_id(0)
    byte = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    w = tl.load(w_ptr + n.to(tl.int64) * (K // UNIT * 16) + byte, mask=byte < K // UNIT * 16, other=0.0)
    for high in tl.static_range(UNIT // 16):
        at = columns_of(byte, UNIT) + high * 16
        scale, zero, offset = group_values(
            scale_ptr, zero_ptr, offset_ptr, n, at // GROUP, at < K, GROUPS, ROWS, RAISED
        )
        y = (raised(w, scale, high == 1, KIND) - zero) * scale + offset
        if row_scale_ptr is not None:
            y *= tl.load(row_scale_ptr + n)
        tl.store(out_ptr + n.to(tl.int64) * K + at, y.to(out_ptr.dtype.element_ty), mask=at < K)
