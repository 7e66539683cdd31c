"""A stretch of a row a program, and the activation itself for the products of experts.

Bytes: 3 * sizeof * n * size; operations: about 8 n size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..expert_types import ExpertGate
from .activation import activate_and_multiply
from .launch import gdc_launch_dependents, gdc_wait, has_pdl, launch

_BLOCK = 1024


def gate_constants(gate: ExpertGate | None) -> dict[str, object]:
    """Return the arguments of a kernel that calls `gated`; None: it does not, and GATE is ""."""
    if gate is None:
        return gate_constants(ExpertGate()) | {"GATE": ""}
    return {"GATE": gate.kind, "INTERLEAVED": gate.is_interleaved, "ALPHA": gate.alpha, "LIMIT": gate.limit}


def gate_experts(gate_up: Tensor, gate: ExpertGate) -> Tensor:
    n, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((n, size), dtype=gate_up.dtype, device=gate_up.device)
    grid = (n, triton.cdiv(size, _BLOCK))
    launch(_gate_experts, grid, gate_up, out, SIZE=size, BLOCK=_BLOCK, **gate_constants(gate), PDL=has_pdl())
    return out


@triton.jit
def gated(g, u, GATE: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """Return the activation for gates ``g`` and ups ``u``, float32 of one shape."""
    if GATE != "clamped_swiglu":
        y = activate_and_multiply(g, u, GATE)
    else:
        g = tl.minimum(g, LIMIT)
        y = g * (tl.minimum(tl.maximum(u, -LIMIT), LIMIT) + 1) / (1 + tl.exp(-ALPHA * g))
    return y


@triton.jit
def _gate_experts(
    x_ptr, out_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr, GATE: tl.constexpr, INTERLEAVED: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = x_ptr + row * 2 * SIZE
    if INTERLEAVED:
        g = tl.load(at + 2 * i, mask=i < SIZE, other=0.0).to(tl.float32)
        u = tl.load(at + 2 * i + 1, mask=i < SIZE, other=0.0).to(tl.float32)
    else:
        g = tl.load(at + i, mask=i < SIZE, other=0.0).to(tl.float32)
        u = tl.load(at + SIZE + i, mask=i < SIZE, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * SIZE + i, gated(g, u, GATE, ALPHA, LIMIT).to(out_ptr.dtype.element_ty), mask=i < SIZE)
