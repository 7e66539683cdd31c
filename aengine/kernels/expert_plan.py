"""Which rows each expert gets: the pairs of a token and one of its experts, sorted by expert.

On a GPU nothing here is read back by the host, so that a step can be captured in a graph: sizes are upper bounds, and
what is beyond is marked.
"""

from __future__ import annotations

from .dispatch import uses_triton
from .expert_tilings import ExpertShape, ExpertTiling
from .expert_types import ExpertPlan, Routing
from .grouped_codes import CodeKind


def plan_experts(
    routing: Routing,
    shape: ExpertShape,
    tiling: ExpertTiling | None = None,
    *,
    is_partial: bool = False,
    can_group: bool = False,
    kind: CodeKind | None = None,
    is_compiled: bool = False,
) -> ExpertPlan:
    """Return the plan for the products of a layer.

    Args:
        tiling: to be used on a GPU; None: the best known
        is_partial: some of the tokens' experts are not here, see `route`
        can_group: the layer's matrices fit torch's grouped product, see `expert_types.can_group`
        kind: of its codes, if these have a scale a group
        is_compiled: a CPU's compiled kernels multiply the layer's matrices, see `ExpertWeights.is_compiled`
    """
    assert routing.expert_ids.shape == routing.weights.shape and routing.expert_ids.shape[1] == shape.top_k, shape
    if uses_triton(routing.expert_ids):
        from .triton import expert_plan as triton_op

        return triton_op.plan_experts(routing, shape, tiling, is_partial, can_group, kind)
    if is_compiled:
        from .cpu import expert_ops

        slots = expert_ops.plan_experts(routing, shape.num_experts)
        return ExpertPlan(routing, shape, [], is_partial=is_partial, slots=slots)
    order = routing.expert_ids.flatten().argsort(stable=True)
    counts = routing.expert_ids.flatten().bincount(minlength=shape.num_experts).tolist()
    parts = order.split(counts)[: shape.num_experts]
    return ExpertPlan(
        routing, shape, [(expert, pairs) for expert, pairs in enumerate(parts) if len(pairs)], is_partial=is_partial
    )
