"""A stretch of a row a program. Bytes: 3 * sizeof * n * size; operations: about 6 n size."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import has_pdl, launch, launch_next_and_wait

_BLOCK = 1024


def act_and_mul(gate_up: Tensor, activation: str) -> Tensor:
    n, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((n, size), dtype=gate_up.dtype, device=gate_up.device)
    launch(
        _act_and_mul,
        (n, triton.cdiv(size, _BLOCK)),
        gate_up,
        out,
        SIZE=size,
        BLOCK=_BLOCK,
        ACTIVATION=activation,
        PDL=has_pdl(),
    )
    return out


@triton.jit
def _act_and_mul(x_ptr, out_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr, PDL: tl.constexpr):
    launch_next_and_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(x_ptr + row * 2 * SIZE + i, mask=i < SIZE, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * SIZE + SIZE + i, mask=i < SIZE, other=0.0).to(tl.float32)
    y = activate_and_multiply(gate, up, ACTIVATION)
    tl.store(out_ptr + row * SIZE + i, y.to(out_ptr.dtype.element_ty), mask=i < SIZE)


def weigh(x: Tensor, logits: Tensor) -> None:
    n, size = x.shape
    launch(_weigh, (n, triton.cdiv(size, _BLOCK)), x, logits, SIZE=size, BLOCK=_BLOCK, PDL=has_pdl())


@triton.jit
def _weigh(x_ptr, logits_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    launch_next_and_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = x_ptr + row * SIZE + i
    x = tl.load(at, mask=i < SIZE, other=0.0).to(tl.float32)
    y = x / (1 + tl.exp(tl.minimum(-tl.load(logits_ptr + row), 80.0)))  # beyond, exp would overflow
    tl.store(at, y.to(x_ptr.dtype.element_ty), mask=i < SIZE)


@triton.jit
def activate_and_multiply(gate, up, ACTIVATION: tl.constexpr):
    """Return activation(gate) * up, in float32."""
    if ACTIVATION == "gelu":
        y = 0.5 * gate * up * (1 + tl.erf(gate * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        # (1 + tanh(z)) / 2 is 1 / (1 + exp(-2 z)). From -2 z = 80 on it is zero, and exp would soon overflow.
        exponent = -1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        y = gate * up / (1 + tl.exp(tl.minimum(exponent, 80.0)))
    else:
        y = gate * up / (1 + tl.exp(-gate))
    return y
