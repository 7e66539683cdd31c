"""The gated feed-forward layer of Llama and its kin."""

from __future__ import annotations

from torch import Tensor

from ..weights.scope import WeightScope
from .linear import Linear
from .norm import RMSNorm

__all__ = ["GatedMLP"]


class GatedMLP:
    """down(silu(gate(x)) * up(x)). Shazeer 2020, arXiv:2002.05202."""

    def __init__(self, scope: WeightScope, hidden_size: int, intermediate_size: int, *, bias: bool = False) -> None:
        gate_up = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        self.gate_up = Linear(scope, hidden_size, gate_up, bias)
        self.down = Linear(scope, intermediate_size, {"down_proj": hidden_size}, bias)

    def __call__(self, residual: Tensor, norm: RMSNorm) -> None:
        """Add the layer's output for norm(residual) to ``residual`` [num_tokens, hidden_size], in place."""
        self.down.add_to(residual, self.gate_up.gated_after_norm(residual, norm))
