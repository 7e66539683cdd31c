"""A row a program. Bytes: 2 * sizeof * n * size, 3 if added; operations: 4 n size."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import has_pdl, launch, launch_next, wait_for_previous


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, weight, out, eps, add=False)
    return out


def add_rms_norm(residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
    _launch(x, weight, residual, eps, add=True)


def _launch(x: Tensor, weight: Tensor, out: Tensor, eps: float, *, add: bool) -> None:
    size = weight.shape[0]
    block = triton.next_power_of_2(size)
    num_warps = 4 if block <= 2048 else 8
    rows = (x.numel() // size,)
    launch(_rms_norm, rows, x, weight, out, eps, SIZE=size, BLOCK=block, ADD=add, PDL=has_pdl(), num_warps=num_warps)


@triton.jit
def _rms_norm(
    x_ptr, w_ptr, out_ptr, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr
):
    launch_next(PDL)
    i = tl.arange(0, BLOCK)
    begin = tl.program_id(0).to(tl.int64) * SIZE
    w = tl.load(w_ptr + i, mask=i < SIZE, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    x = tl.load(x_ptr + begin + i, mask=i < SIZE, other=0.0).to(tl.float32)
    y = x * w / tl.sqrt(tl.sum(x * x, 0) / SIZE + eps)
    if ADD:
        y += tl.load(out_ptr + begin + i, mask=i < SIZE, other=0.0).to(tl.float32)
    tl.store(out_ptr + begin + i, y.to(out_ptr.dtype.element_ty), mask=i < SIZE)
