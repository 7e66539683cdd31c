"""A row a program. Bytes: 2 * sizeof * n * size; operations: 4 n size."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import gdc_launch_dependents, gdc_wait, has_pdl, launch

__all__ = ["rms_norm"]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    size = weight.shape[0]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = x.numel() // size
    block = triton.next_power_of_2(size)
    num_warps = 4 if block <= 2048 else 8
    launch(_rms_norm, (rows,), x, weight, out, eps, SIZE=size, BLOCK=block, PDL=has_pdl(), num_warps=num_warps)
    return out


@triton.jit
def _rms_norm(x_ptr, w_ptr, out_ptr, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
    i = tl.arange(0, BLOCK)
    begin = tl.program_id(0).to(tl.int64) * SIZE
    w = tl.load(w_ptr + i, mask=i < SIZE, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    x = tl.load(x_ptr + begin + i, mask=i < SIZE, other=0.0).to(tl.float32)
    y = x * w / tl.sqrt(tl.sum(x * x, 0) / SIZE + eps)
    tl.store(out_ptr + begin + i, y.to(out_ptr.dtype.element_ty), mask=i < SIZE)
