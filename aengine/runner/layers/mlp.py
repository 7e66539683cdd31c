"""Feed-forward layers: the gated one of Llama and its kin, and the older one without a gate."""

from __future__ import annotations

from torch import Tensor

from ...kernels.activation import Activation
from ..weights.scope import WeightScope
from .linear import Features, Linear
from .norm import RMSNorm


class GatedMLP:
    """down(activation(gate(x)) * up(x)). Shazeer 2020, arXiv:2002.05202."""

    def __init__(
        self,
        scope: WeightScope,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: Activation,
        bias: bool = False,
        packed: bool = False,
        names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
        post_norm: RMSNorm | None = None,
        out_scale: float = 1.0,
    ) -> None:
        """
        Args:
            packed: the checkpoint has gate and up as one tensor, "gate_up_proj"
            names: of gate, up and down in the checkpoint
            post_norm: of the output, before it is added to the residual stream
            out_scale: of the output
        """
        inner = scope.share(intermediate_size)
        parts: dict[str, Features] = {names[0]: inner, names[1]: inner}
        self.gate_up = Linear(scope, hidden_size, {"gate_up_proj": (inner, inner)} if packed else parts, bias)
        self.down = Linear(scope, inner, {names[2]: hidden_size}, bias)
        self.activation: Activation = activation
        self.post_norm = post_norm
        self.out_scale = out_scale

    def __call__(self, residual: Tensor, norm: RMSNorm) -> None:
        """Add the layer's output for norm(residual) to ``residual`` [num_tokens, hidden_size], in place."""
        gated = self.gate_up.gated_after_norm(residual, norm, self.activation)
        self.down.add_to(residual, gated, self.post_norm, self.out_scale)

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """Add the layer's output for x to ``residual`` [num_tokens, hidden_size], in place; x may be ``residual``."""
        gated = self.gate_up.gated(x, self.activation)
        self.down.add_to(residual, gated, self.post_norm, self.out_scale)


class MLP:
    """down(activation(up(x)))."""

    def __init__(
        self,
        scope: WeightScope,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: Activation,
        names: tuple[str, str],
        bias: bool = True,
    ) -> None:
        """Build the layer. ``names``: names of the up and down matrices in the checkpoint."""
        inner = scope.share(intermediate_size)
        self.up = Linear(scope, hidden_size, {names[0]: inner}, bias)
        self.down = Linear(scope, inner, {names[1]: hidden_size}, bias)
        self.activation = activation

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """Add the layer's output for x to ``residual`` [num_tokens, hidden_size], in place."""
        self.down.add_to(residual, self.up.activated(x, self.activation))
