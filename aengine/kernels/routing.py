"""Routing: which experts each token takes, and with what weight.

softmax   softmax over all experts, the top_k largest. Renormalised, it is the softmax over the chosen logits.
          Shazeer et al. 2017, https://arxiv.org/abs/1701.06538; with groups, only experts of the groups whose best
          ones are best. DeepSeek-V2, 2024, https://arxiv.org/abs/2405.04434
sigmoid   each expert's own score; chosen by score + correction, weighted by the score; with groups, only experts of
          the groups whose two best add up to most. DeepSeek-V3, 2024, https://arxiv.org/abs/2412.19437
"""

from __future__ import annotations

import torch
from torch import Tensor

from .dispatch import uses_triton
from .expert_types import Routing, RoutingRule
from .matrix import Matrix
from .rms_norm import Norm


def route_after_norm(
    x: Tensor,
    norm: Norm,
    matrix: Matrix,
    rule: RoutingRule,
    correction: Tensor | None = None,
    own: range | None = None,
    rows: Tensor | None = None,
) -> Routing | None:
    """`route` by the logits norm(x) W^T + b; None: their product has to be made first."""
    if not uses_triton(x):
        return None
    from .triton import routing as triton_op

    matrix.check(x.shape)
    return triton_op.route_after_norm(x, norm, matrix, rule, correction, own, rows)


def route(
    logits: Tensor,
    rule: RoutingRule,
    correction: Tensor | None = None,
    own: range | None = None,
    rows: Tensor | None = None,
    *,
    is_compiled: bool = False,
) -> Routing:
    """Choose ``rule.top_k`` experts a token, of equal ones that of the lowest id.

    Args:
        logits: float32 [n, num_experts]. A row with a NaN gets valid ids and the weights NaN, or none that matter.
        correction: float32 [num_experts], added to the scores for the choice alone; for "sigmoid"
        own: the experts that are computed here: they count from 0 on, and another's id is their number, its weight 0
        rows: int64 [n], with ``own``: a token below 0 is padding, which takes no expert here; None: there is none
        is_compiled: a CPU's compiled kernels multiply the experts
    """
    num_experts = logits.shape[1]
    assert logits.dtype == torch.float32 and rule.top_k <= num_experts, f"{logits.dtype} {tuple(logits.shape)}, {rule}"
    assert num_experts % rule.num_groups == 0 and (rule.scoring == "sigmoid" or correction is None), rule
    if uses_triton(logits):
        from .triton import routing as triton_op

        return triton_op.route(logits, rule, correction, own, rows)
    if is_compiled and own is None and rule.num_groups == 1:
        from .cpu import expert_ops

        return expert_ops.route(logits, rule, correction)
    scores = logits.softmax(-1) if rule.scoring == "softmax" else logits.sigmoid()
    choice = scores if correction is None else scores + correction
    if rule.num_groups > 1:
        choice = _best_groups(choice, rule)
    expert_ids = choice.sort(dim=-1, descending=True, stable=True).indices[:, : rule.top_k]
    weights = scores.gather(1, expert_ids)
    if rule.renormalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    weights = weights * rule.scale
    if own is not None:
        is_own = (expert_ids >= own.start) & (expert_ids < own.stop)
        if rows is not None:
            is_own &= (rows >= 0)[:, None]
        expert_ids = torch.where(is_own, expert_ids - own.start, len(own))
        weights = weights.masked_fill(~is_own, 0.0)
    return Routing(expert_ids.to(torch.int32), weights)


def _best_groups(choice: Tensor, rule: RoutingRule) -> Tensor:
    """Return ``choice`` with -inf for the experts of all but the best groups."""
    groups = choice.view(len(choice), rule.num_groups, -1)
    sums = groups.topk(rule.group_best, -1).values.sum(-1)
    best = sums.sort(dim=-1, descending=True, stable=True).indices[:, : rule.top_groups]
    is_best = torch.zeros_like(sums, dtype=torch.bool).scatter_(1, best, True)
    return groups.masked_fill(~is_best[:, :, None], float("-inf")).view_as(choice)
