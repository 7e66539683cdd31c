"""Some thousand numbers a program. Bytes: (1 + sizeof) * N * K; operations: 1 N K."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import has_pdl, known, launch, launch_next_and_wait
from .linear_parts import numbers

__all__ = ["dequantise"]

_BLOCK = 4096


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
