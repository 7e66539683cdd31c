"""Products of a mixture of experts: each row by the matrices of the experts that it takes.

    expert_product     y[pair] = rms_norm(x[token]) W[expert]^T + b[expert], or the gated activation of that
    add_experts        residual[token] += sum over its pairs of weight * (h[pair] W[expert]^T + b[expert])

The time at small batches is that of reading the experts that are touched, once: of E experts, p pairs touch some
E (1 - (1 - 1 / E)^p).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .dispatch import uses_triton
from .expert_gate import gate_experts
from .expert_types import ExpertCodes, ExpertGate, ExpertMatrices, ExpertPlan, InputNorm
from .grouped_codes import numbers
from .rms_norm import rms_norm


def expert_product(
    x: Tensor,
    matrices: ExpertMatrices | ExpertCodes,
    plan: ExpertPlan,
    gate: ExpertGate | None = None,
    norm: InputNorm | None = None,
) -> Tensor:
    """Return [pairs, out_features], or half as wide with a ``gate``, for x [n, in_features]: in x's dtype, summed in
    float32.

    The order of the pairs is the plan's, which `add_experts` knows.
    """
    _check(x, matrices, plan)
    assert x.shape[0] == plan.routing.expert_ids.shape[0], f"{x.shape[0]} rows, {plan.routing.expert_ids.shape}"
    if uses_triton(x):
        from .triton import experts as triton_op

        return triton_op.expert_product(x, matrices, plan, gate, norm)
    if norm is not None:
        x = rms_norm(x, norm.weight, norm.eps)
    out = x.new_zeros(plan.num_pairs, matrices.shape[1])  # an expert that is not here adds nothing
    for expert, pairs in plan.chosen:
        out[pairs] = _multiply(x[pairs // plan.shape.top_k], matrices, expert)
    return out if gate is None else gate_experts(out, gate)


def add_experts(residual: Tensor, hidden: Tensor, matrices: ExpertMatrices | ExpertCodes, plan: ExpertPlan) -> None:
    """Change ``residual`` [n, out_features] in place, for hidden [pairs, in_features]."""
    _check(hidden, matrices, plan)
    assert hidden.shape[0] == plan.num_pairs and residual.shape[1] == matrices.shape[1], f"{residual.shape}"
    if uses_triton(residual):
        from .triton import experts as triton_op

        return triton_op.add_experts(residual, hidden, matrices, plan)
    out = residual.new_zeros(plan.num_pairs, residual.shape[1])
    for expert, pairs in plan.chosen:
        out[pairs] = _multiply(hidden[pairs], matrices, expert)
    add_weighted(residual, out, plan)
    return None


def add_weighted(residual: Tensor, out: Tensor, plan: ExpertPlan) -> None:
    """Add each token's weighted sum of its experts' outputs ``out`` [pairs, size] to ``residual``; on the CPU."""
    weights = plan.routing.weights[:, None].to(out.dtype)
    residual.add_(torch.bmm(weights, out.view(len(residual), plan.shape.top_k, -1)).squeeze(1))


def _multiply(x: Tensor, matrices: ExpertMatrices | ExpertCodes, expert: int) -> Tensor:
    bias = None if matrices.bias is None else matrices.bias[expert]
    if isinstance(matrices, ExpertCodes):
        out = F.linear(x.float(), numbers(matrices.of(expert)))
    elif matrices.scale is None:
        return F.linear(x, matrices.weight[expert], bias)
    else:  # codes alone may pass float16
        out = F.linear(x.float(), matrices.weight[expert].float()) * matrices.scale[expert]
    return (out if bias is None else out + bias).to(x.dtype)


def _check(x: Tensor, matrices: ExpertMatrices | ExpertCodes, plan: ExpertPlan) -> None:
    shape, bias = matrices.shape, matrices.bias
    assert shape[0] == plan.shape.num_experts and x.shape[1] == shape[2], f"{x.shape} x {shape}"
    assert bias is None or bias.shape == shape[:2], f"a bias of {tuple(bias.shape)} for {shape}"
