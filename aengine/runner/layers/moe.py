"""The mixture-of-experts feed-forward layer: a router, experts of which each token takes a few, and perhaps an expert
that all tokens take.

                   ┌─ router ─ top k ──────────────┐
residual ─ norm ───┼─ gate, up of the chosen ─ act ─┴─ down of the chosen ─┐
                   └─ gate, up of the shared ─ act ─── down of the shared ─┴─ + residual

See kernels/routing.py for how experts are chosen, kernels/experts.py for their products.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels.expert_plan import plan_experts
from ...kernels.expert_tilings import ExpertShape
from ...kernels.expert_types import ExpertGate, RoutingRule
from ...kernels.routing import route
from ..weights.scope import WeightScope
from .expert_linear import ExpertLinear, PackedLayout
from .linear import Linear
from .mlp import GatedMLP
from .norm import RMSNorm

__all__ = ["Experts", "MoE", "Router", "SharedExpert"]


class Router:
    """The experts of each token, and their weights: a matrix [num_experts, hidden_size], then a rule."""

    def __init__(
        self,
        scope: WeightScope,
        hidden_size: int,
        num_experts: int,
        rule: RoutingRule,
        *,
        name: str = "gate",
        bias: bool = False,
        correction: str | None = None,
    ) -> None:
        """``correction``: name of the tensor that is added to the scores for the choice alone, if there is one."""
        self.rule = rule
        self.num_experts = num_experts
        self.linear = Linear(scope, hidden_size, {name: num_experts}, bias)
        self.correction: Tensor | None = None
        if correction is not None:
            scope.want(correction, (num_experts,), torch.float32, self._put)

    def _put(self, tensor: Tensor) -> None:
        self.correction = tensor.float()


class Experts:
    """down(act(gate(x), up(x))) of each expert."""

    def __init__(
        self,
        scope: WeightScope,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        *,
        gate: ExpertGate,
        gate_up: tuple[str, ...] = ("gate_proj", "up_proj"),
        down: str = "down_proj",
        bias: bool = False,
        layout: PackedLayout | None = None,
    ) -> None:
        """``gate_up``: the names of the first product's matrices, gate first; of one, if they are one tensor."""
        self.gate = gate
        self.intermediate_size = intermediate_size
        size = 2 * intermediate_size // len(gate_up)
        parts = dict.fromkeys(gate_up, size)
        self.gate_up = ExpertLinear(scope, num_experts, hidden_size, parts, bias=bias, layout=layout)
        self.down = ExpertLinear(scope, num_experts, intermediate_size, {down: hidden_size}, bias=bias, layout=layout)


class SharedExpert:
    """A feed-forward layer for all tokens, weighted by sigmoid(g x) if it has a ``gate`` [1, hidden_size]."""

    def __init__(self, mlp: GatedMLP, gate: Linear | None = None) -> None:
        self.mlp = mlp
        self.gate = gate

    def hidden(self, residual: Tensor, norm: RMSNorm) -> Tensor:
        hidden = self.mlp.gate_up.gated_after_norm(residual, norm, self.mlp.activation)
        if self.gate is not None:  # the product by `down` is linear, so its input may be weighted instead
            hidden *= torch.sigmoid(self.gate.after_norm(residual, norm, torch.float32)).to(hidden.dtype)
        return hidden


class MoE:
    def __init__(self, hidden_size: int, router: Router, experts: Experts, shared: SharedExpert | None = None) -> None:
        self.router = router
        self.experts = experts
        self.shared = shared
        self.shape = ExpertShape(router.num_experts, hidden_size, experts.intermediate_size, router.rule.top_k)

    def __call__(self, residual: Tensor, norm: RMSNorm) -> None:
        """Add the layer's output for norm(residual) to ``residual`` [num_tokens, hidden_size], in place."""
        logits = self.router.linear.after_norm(residual, norm, torch.float32)
        plan = plan_experts(route(logits, self.router.rule, self.router.correction), self.shape)
        shared = None if self.shared is None else self.shared.hidden(residual, norm)
        hidden = self.experts.gate_up.gated_after_norm(residual, norm, plan, self.experts.gate)
        self.experts.down.add_to(residual, hidden, plan)
        if self.shared is not None and shared is not None:
            self.shared.mlp.down.add_to(residual, shared)
