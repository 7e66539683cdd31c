"""The mixture-of-experts feed-forward layer: a router, experts of which each token takes a few, and perhaps an expert
that all tokens take.

                   ┌─ router ─ top k ──────────────┐
residual ─ norm ───┼─ gate, up of the chosen ─ act ─┴─ down of the chosen ─┐
                   └─ gate, up of the shared ─ act ─── down of the shared ─┴─ + residual

See kernels/routing.py for how experts are chosen, kernels/experts.py for their products.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ...errors import ModelLoadError
from ...kernels.activation import computed, weigh
from ...kernels.expert_plan import plan_experts
from ...kernels.expert_tilings import ExpertShape
from ...kernels.expert_types import ExpertGate, ExpertPlan, Routing, RoutingRule
from ...kernels.routing import route, route_after_norm
from ..distributed.experts_group import ExpertsGroup
from ..weights.packed_experts import PackedLayout
from ..weights.plain import PlainWeight
from ..weights.scope import WeightScope
from ..weights.weight import put_into
from .expert_linear import ExpertLinear
from .linear import Features, Linear
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
        put_into(self, "correction", tensor.float())

    def choose(self, x: Tensor, norm: RMSNorm, own: range | None, rows: Tensor | None, is_compiled: bool) -> Routing:
        """Return the experts of each row of norm(x). ``own``, ``rows``, ``is_compiled``: see `route`."""
        weight = self.linear.weight
        if isinstance(weight, PlainWeight):
            routing = route_after_norm(x, norm, weight.matrix, self.rule, self.correction, own, rows)
            if routing is not None:
                return routing
        logits = self.linear.after_norm(x, norm, torch.float32)
        return route(logits, self.rule, self.correction, own, rows, is_compiled=is_compiled)


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
        """``gate_up``: the names of the first product's matrices, gate first; of one, if they are one tensor.
        ``intermediate_size``: of this rank."""
        self.gate = gate
        self.intermediate_size = intermediate_size
        self.share = scope.experts(num_experts)
        self.spread = scope.experts_group
        self.policy = scope.formats.policy
        inner = scope.share_of_expert(intermediate_size)
        features: Features = inner
        if len(gate_up) == 1:
            features = replace(inner, size=2 * inner.size) if gate.is_interleaved else (inner, inner)
        parts = dict.fromkeys(gate_up, features)
        self.gate_up = ExpertLinear(scope, self.share, hidden_size, parts, bias=bias, layout=layout)
        self.down = ExpertLinear(scope, self.share, inner, {down: hidden_size}, bias=bias, layout=layout)

    @property
    def can_group(self) -> bool:
        """Whether torch's grouped product takes the loaded matrices, in the step that is run."""
        return self.gate_up.weights.can_group and self.down.weights.can_group

    @property
    def is_compiled(self) -> bool:
        """Whether a CPU's compiled kernels multiply the loaded matrices, in the step that is run. Raises
        ModelLoadError: batch invariance needs these, which take no experts of several formats, or on a GPU plain
        numbers of 16 bits."""
        is_compiled = self.gate_up.weights.is_compiled and self.down.weights.is_compiled
        if self.policy.batch_invariant and not (is_compiled or self.can_group):
            raise ModelLoadError(
                "batch_invariant=True: a layer's experts are quantised, or have several formats: leave it at False here"
            )
        return is_compiled


class SharedExpert:
    """A feed-forward layer for all tokens, weighted by sigmoid(g x) if it has a ``gate`` [1, hidden_size]."""

    def __init__(self, mlp: GatedMLP, gate: Linear | None = None) -> None:
        self.mlp = mlp
        self.gate = gate

    def hidden(self, residual: Tensor, norm: RMSNorm) -> Tensor:
        hidden = computed(self.mlp.gate_up.gated_after_norm(residual, norm, self.mlp.activation))
        if self.gate is not None:  # the product by `down` is linear, so its input may be weighted instead
            weigh(hidden, self.gate.after_norm(residual, norm, torch.float32))
        return hidden


class MoE:
    """The layer. Every rank of a group routes alike, computes its share, and their sum is added. Where the experts are
    divided among the ranks of several replicas, each computes its own for the tokens of all."""

    def __init__(self, hidden_size: int, router: Router, experts: Experts, shared: SharedExpert | None = None) -> None:
        self.router = router
        self.experts = experts
        self.shared = shared
        num_experts, top_k = experts.share.size, router.rule.top_k
        self.shape = ExpertShape(num_experts, hidden_size, experts.intermediate_size, top_k)
        self._own = range(*experts.share.range) if experts.share.is_divided else None
        self._group = router.linear.group
        self._spread = experts.spread

    def __call__(self, residual: Tensor, norm: RMSNorm) -> None:
        """Add the layer's output for norm(residual) to ``residual`` [num_tokens, hidden_size], in place."""
        if self._spread is not None:
            self._add_spread(residual, norm, self._spread)
            return
        hidden, plan = self._hidden(residual, norm)
        shared = None if self.shared is None else self.shared.hidden(residual, norm)
        if self._group.size == 1:
            self._add_to(residual, hidden, plan, shared)
            return
        partial = torch.zeros_like(residual)
        self._add_to(partial, hidden, plan, shared)
        self._group.add_sum(residual, partial)

    def join(self, residual: Tensor, norm: RMSNorm) -> None:
        """Take part in a round in which this replica has no tokens: ``residual`` [0, hidden_size]."""
        if self._spread is not None:
            self._add_spread(residual, norm, self._spread)

    def _add_spread(self, residual: Tensor, norm: RMSNorm, spread: ExpertsGroup) -> None:
        rows = spread.gather(residual)
        hidden, plan = self._hidden(rows, norm, spread.rows)
        partial = torch.zeros_like(rows)
        self.experts.down.add_to(partial, hidden, plan)
        if self.shared is not None and len(residual):
            own = partial[spread.own(len(residual))]
            self.shared.mlp.down.add_part_to(own, self.shared.hidden(residual, norm))
        spread.add_sum(residual, rows, partial)

    def _hidden(self, x: Tensor, norm: RMSNorm, rows: Tensor | None = None) -> tuple[Tensor, ExpertPlan]:
        """Return the inner features of the chosen experts that are this rank's, for norm(x) [num_tokens, hidden_size];
        ``rows``: see `route`."""
        is_compiled = self.experts.is_compiled
        routing = self.router.choose(x, norm, self._own, rows, is_compiled)
        plan = plan_experts(
            routing,
            self.shape,
            self.experts.policy.expert_tiling(self.shape, len(x)),
            is_partial=self._own is not None,
            can_group=self.experts.can_group,
            kind=self.experts.gate_up.weights.kind,
            is_compiled=is_compiled,
        )
        return self.experts.gate_up.gated_after_norm(x, norm, plan, self.experts.gate), plan

    def _add_to(self, residual: Tensor, hidden: Tensor, plan: ExpertPlan, shared: Tensor | None) -> None:
        self.experts.down.add_to(residual, hidden, plan)
        if self.shared is not None and shared is not None:
            self.shared.mlp.down.add_part_to(residual, shared)
