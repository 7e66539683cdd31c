"""Low-rank adapters of a matrix, of each token its own: y += B (A x). Hu et al. 2021, arXiv:2106.09685.

    plan_adapters    the step's tokens, sorted by slot: once a step, for all layers
    plan_pairs       of a layer of experts, the pairs of a token and an expert, each of which has a slot of its own
    shrink           h = A x, of the tokens that have an adapter
    expand           y += B h, in place
    expand_gated     activation(gate + B h) * (up + B h), of all tokens
    add_pairs        residual += sum over a token's pairs of weight * (B h)

Each slot has the A and B of one adapter in memory; whatever scale there is, B has it. Where a matrix is made of several
(q, k, v), each of these parts has an A of its own, and B is that of its own rows: h has ``rank`` numbers a part.

Bytes: A and B of each slot that the step uses, some 1% of the matrix' own at a rank of 16. On a GPU the shapes of all
launches follow from the numbers of tokens and of slots alone, so that a step can be captured in a graph.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .activation import Activation, act_and_mul
from .dispatch import uses_triton
from .expert_types import Routing
from .lora_types import AdapterMatrices, AdapterPlan
from .rms_norm import Norm, rms_norm

__all__ = [
    "AdapterMatrices",
    "AdapterPlan",
    "add_pairs",
    "expand",
    "expand_gated",
    "plan_adapters",
    "plan_pairs",
    "shrink",
]


def plan_adapters(slots: Tensor, num_slots: int) -> AdapterPlan:
    """Return the plan of a step whose tokens have these ``slots``, int32 [n]; ``num_slots``: none."""
    assert slots.dtype == torch.int32 and slots.dim() == 1
    if uses_triton(slots):
        from .triton import lora as triton_op

        return triton_op.plan_adapters(slots, num_slots)
    return AdapterPlan(slots, _by_slot(slots, num_slots))


def plan_pairs(tokens: AdapterPlan, routing: Routing, num_slots: int, num_experts: int) -> AdapterPlan:
    """Return the plan of the pairs that ``routing`` makes of a step's tokens: that of slot s and expert e has the slot
    s * num_experts + e, and none if its expert is not here."""
    n, top_k = routing.expert_ids.shape
    assert len(tokens.slots) == n, f"{n} rows of {len(tokens.slots)} tokens"
    if tokens.block_slots is not None:
        from .triton import lora as triton_op

        return triton_op.plan_pairs(tokens, routing, num_slots, num_experts)
    slots, experts = tokens.slots.repeat_interleave(top_k), routing.expert_ids.flatten()
    has_one = (slots < num_slots) & (experts < num_experts)
    slots = torch.where(has_one, slots * num_experts + experts, num_slots * num_experts)
    weights = routing.weights.flatten().masked_fill(~has_one, 0.0)
    return AdapterPlan(slots, _by_slot(slots, num_slots * num_experts), weights=weights)


def _by_slot(slots: Tensor, num_slots: int) -> list[tuple[int, Tensor]]:
    used = [slot for slot in slots.unique().tolist() if slot < num_slots]
    return [(slot, (slots == slot).nonzero()[:, 0]) for slot in used]


def shrink(x: Tensor, norm: Norm | None, matrices: AdapterMatrices, plan: AdapterPlan, top_k: int = 1) -> Tensor:
    """Return A x, or A norm(x), for x [n / top_k, in_features]: float32 [pieces, n, parts * rank], to be summed over
    the pieces. Rows of tokens without an adapter hold anything. ``top_k``: pairs of each row of x."""
    assert x.shape == (len(plan.slots) // top_k, matrices.a.shape[2]), f"{tuple(x.shape)} x {tuple(matrices.a.shape)}^T"
    if plan.block_slots is not None:
        from .triton import lora as triton_op

        return triton_op.shrink(x, norm, matrices, plan, top_k)
    x = x if norm is None else rms_norm(x, norm.weight, norm.eps)
    h = x.new_zeros((1, len(plan.slots), matrices.a.shape[1]), dtype=torch.float32)
    for slot, tokens in plan.by_slot:
        h[0, tokens] = (x.index_select(0, tokens // top_k) @ matrices.a[slot].t()).float()
    return h


def expand(y: Tensor, h: Tensor, matrices: AdapterMatrices, plan: AdapterPlan) -> None:
    """Add B h to ``y`` [n, out_features], in place, for what `shrink` returned."""
    assert y.shape == (len(plan.slots), matrices.b.shape[1]), f"{tuple(y.shape)} gets {tuple(matrices.b.shape)}"
    if plan.block_slots is not None:
        from .triton import lora as triton_op

        triton_op.expand(y, h, matrices, plan)
        return
    h = h.sum(0).to(matrices.b.dtype)
    for slot, tokens in plan.by_slot:
        own, first = h.index_select(0, tokens).split(matrices.rank, 1), 0
        for part, size in zip(own, matrices.sizes, strict=True):
            added = part @ matrices.b[slot, first : first + size].t()
            y[tokens, first : first + size] += added.to(y.dtype)  # index_add_ asks all threads for a few numbers
            first += size


def expand_gated(
    y: Tensor, h: Tensor, matrices: AdapterMatrices, plan: AdapterPlan, activation: Activation = "silu"
) -> Tensor:
    """Return activation(gate) * up, [n, out_features / 2], of y + B h, for y [n, out_features], the gate's half first.
    ``y`` may be changed."""
    if plan.block_slots is not None:
        from .triton import lora as triton_op

        return triton_op.expand_gated(y, h, matrices, plan, activation)
    expand(y, h, matrices, plan)
    return act_and_mul(y, activation)


def add_pairs(residual: Tensor, h: Tensor, matrices: AdapterMatrices, plan: AdapterPlan) -> None:
    """Add each token's weighted sum of B h over its pairs to ``residual`` [tokens, out_features], in place."""
    assert plan.weights is not None and residual.shape[1] == matrices.b.shape[1], f"{tuple(residual.shape)}"
    if plan.block_slots is not None:
        from .triton import lora as triton_op

        triton_op.add_pairs(residual, h, matrices, plan)
        return
    added = residual.new_zeros(len(plan.slots), residual.shape[1])
    expand(added, h, matrices, plan)
    weights = plan.weights.view(len(residual), 1, -1).to(added.dtype)
    residual += torch.bmm(weights, added.view(len(residual), weights.shape[2], -1)).squeeze(1)
