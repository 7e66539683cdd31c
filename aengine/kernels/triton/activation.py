"""A stretch of a row a program. Bytes: 3 * sizeof * n * size; operations: about 6 n size."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import gdc_launch_dependents, gdc_wait, has_pdl, launch

__all__ = ["silu_and_mul"]

_BLOCK = 1024


def silu_and_mul(gate_up: Tensor) -> Tensor:
    n, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((n, size), dtype=gate_up.dtype, device=gate_up.device)
    launch(_silu_and_mul, (n, triton.cdiv(size, _BLOCK)), gate_up, out, SIZE=size, BLOCK=_BLOCK, PDL=has_pdl())
    return out


@triton.jit
def _silu_and_mul(x_ptr, out_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(x_ptr + row * 2 * SIZE + i, mask=i < SIZE, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * SIZE + SIZE + i, mask=i < SIZE, other=0.0).to(tl.float32)
    y = gate * up / (1 + tl.exp(-gate))
    tl.store(out_ptr + row * SIZE + i, y.to(out_ptr.dtype.element_ty), mask=i < SIZE)
