"""The activation of gated experts: what joins the halves of their first product.

silu              silu(g) * u                                      Shazeer 2020, https://arxiv.org/abs/2002.05202
gelu_tanh         gelu(g) * u, by its approximation with tanh
clamped_swiglu    g sigmoid(alpha g) * (u + 1), g <= limit, -limit <= u <= limit
"""

from __future__ import annotations

import torch
from torch import Tensor

from .activation import act_and_mul
from .dispatch import uses_triton
from .expert_types import ExpertGate


def gate_experts(gate_up: Tensor, gate: ExpertGate) -> Tensor:
    """Return [n, size] for gate_up [n, 2 * size]."""
    assert gate_up.dim() == 2 and gate_up.shape[1] % 2 == 0, f"gate_up has the shape {tuple(gate_up.shape)}"
    if uses_triton(gate_up):
        from .triton import expert_gate as triton_op

        return triton_op.gate_experts(gate_up, gate)
    g, u = (gate_up[:, ::2], gate_up[:, 1::2]) if gate.is_interleaved else gate_up.chunk(2, -1)
    if gate.kind == "clamped_swiglu":
        g, u = g.clamp(max=gate.limit), u.clamp(-gate.limit, gate.limit)
        return g * torch.sigmoid(g * gate.alpha) * (u + 1)
    return act_and_mul(torch.cat((g, u), 1) if gate.is_interleaved else gate_up, gate.kind)
