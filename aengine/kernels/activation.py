"""The gated activation of a feed-forward layer. Shazeer 2020, https://arxiv.org/abs/2002.05202."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from .dispatch import uses_triton

__all__ = ["silu_and_mul"]


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, [n, size], for gate_up [n, 2 * size]: the gate's half first."""
    assert gate_up.dim() == 2 and gate_up.shape[1] % 2 == 0, f"gate_up has the shape {tuple(gate_up.shape)}"
    if uses_triton(gate_up):
        from .triton import activation as triton_op

        return triton_op.silu_and_mul(gate_up)
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)
