"""transformers' modules of experts through our products, over the module's own parameters: nothing is copied.

`run_experts` is what `ALL_EXPERTS_FUNCTIONS.register` takes. The module says how its parameters lie: ``is_transposed``,
``is_concatenated``, ``has_bias``, ``has_gate``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...kernels.activation import Activation
from ...kernels.expert_plan import plan_experts
from ...kernels.expert_tilings import ExpertShape
from ...kernels.expert_types import ExpertGate, ExpertMatrices, Routing, can_group
from ...kernels.experts import add_experts, expert_product

_ACTIVATIONS: dict[str, Activation] = {
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
}
"""The kernels' activation for each class of a module's ``act_fn``. Other classes are called as they are, between the
products."""


def can_run_experts(module: Any) -> bool:
    """Return whether `run_experts` computes what the module does: all but norms of each expert's output, and shards."""
    return not (getattr(module, "has_post_expert_norm", False) or getattr(module, "_is_expert_parallel", False))


def run_experts(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Return [n, hidden_size]: the weighted sums over each row's experts.

    Args:
        hidden_states: [n, hidden_size]
        top_k_index, top_k_weights: [n, top_k]; an index may be the number of experts, which is none of them
    """
    first = _matrices(module, "gate_up_proj" if module.has_gate else "up_proj")
    second = _matrices(module, "down_proj")
    shape = ExpertShape(first.weight.shape[0], hidden_states.shape[1], second.weight.shape[2], top_k_index.shape[1])
    weights = top_k_weights.to(torch.float32).masked_fill(top_k_index >= shape.num_experts, 0.0)
    routing = Routing(top_k_index.clamp(max=shape.num_experts - 1).to(torch.int32).contiguous(), weights.contiguous())
    plan = plan_experts(routing, shape, can_group=can_group(first, second))
    x = hidden_states.contiguous()
    gate = _gate(module)
    hidden = expert_product(x, first, plan, gate)
    if gate is None:
        hidden = (module._apply_gate(hidden) if module.has_gate else module.act_fn(hidden)).contiguous()
    out = torch.zeros_like(x)
    add_experts(out, hidden, second, plan)
    return out


def _matrices(module: Any, name: str) -> ExpertMatrices:
    weight = getattr(module, name).detach()
    bias = getattr(module, f"{name}_bias").detach() if module.has_bias else None
    return ExpertMatrices(weight.transpose(1, 2) if module.is_transposed else weight, bias)


def _gate(module: Any) -> ExpertGate | None:
    """Return the module's gate, if the products can do it; a class with a gate of its own is asked between them."""
    activation = _ACTIVATIONS.get(type(getattr(module, "act_fn", None)).__name__)
    is_usual = getattr(type(module)._apply_gate, "__name__", "") == "_default_apply_gate"
    if not module.has_gate or activation is None or not is_usual:
        return None
    return ExpertGate(activation, is_interleaved=False)
