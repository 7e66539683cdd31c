"""The matrices of a layer's experts, in two ways.

    StackedExperts     one tensor for all experts, through the ops of kernels/experts.py; on a GPU without a look at
                       which experts were chosen, so that a step can be captured
    SeparateExperts    a `Weight` for each, of any format; on a CPU, where the chosen ones are known

Each expert's tensors are handed over on their own, as the checkpoint's come, and go to their place at once: beside the
stack there is never more than what an expert has, nor than one tensor of the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from threading import Lock

import torch
from torch import Tensor

from ...kernels.expert_gate import gate_experts
from ...kernels.expert_types import ExpertGate, ExpertMatrices, ExpertPlan, InputNorm, can_group
from ...kernels.experts import add_experts, add_weighted, expert_product
from ...kernels.rms_norm import rms_norm
from .weight import ExpertWeights, Norm, Weight

__all__ = ["SeparateExperts", "StackedExperts"]


class StackedExperts(ExpertWeights):
    """Numbers of one dtype, or, where the experts' tensors have a "weight_scale", int8 codes."""

    __slots__ = ("_bias_dtype", "_dtype", "_lock", "_num_experts", "matrices")

    def __init__(self, num_experts: int, dtype: torch.dtype, bias_dtype: torch.dtype | None = None) -> None:
        self.matrices: ExpertMatrices | None = None
        self._num_experts = num_experts
        self._dtype = dtype
        self._bias_dtype = bias_dtype or dtype
        self._lock = Lock()

    @property
    def can_group(self) -> bool:
        return self.matrices is not None and can_group(self.matrices)

    def put(self, expert: int, parts: Sequence[Mapping[str, Tensor]]) -> None:
        with self._lock:
            if self.matrices is None:
                self.matrices = self._allocate(parts)
        weight, bias, scale = self.matrices
        row = 0
        for part in parts:
            rows = slice(row, row + len(part["weight"]))
            row = rows.stop
            weight[expert, rows].copy_(part["weight"])
            if bias is not None:
                bias[expert, rows].copy_(part["bias"])
            if scale is not None:
                scale[expert, rows].copy_(part["weight_scale"].flatten())

    def _allocate(self, parts: Sequence[Mapping[str, Tensor]]) -> ExpertMatrices:
        first, rows = parts[0], sum(len(part["weight"]) for part in parts)
        device, shape = first["weight"].device, (self._num_experts, rows)
        return ExpertMatrices(
            torch.empty((*shape, first["weight"].shape[1]), dtype=self._dtype, device=device),
            torch.empty(shape, dtype=self._bias_dtype, device=device) if "bias" in first else None,
            torch.empty(shape, dtype=torch.float32, device=device) if "weight_scale" in first else None,
        )

    def gated_after_norm(self, x: Tensor, norm: Norm, plan: ExpertPlan, gate: ExpertGate) -> Tensor:
        assert self.matrices is not None
        return expert_product(x, self.matrices, plan, gate, InputNorm(norm.weight, norm.eps))

    def add_to(self, residual: Tensor, hidden: Tensor, plan: ExpertPlan) -> None:
        assert self.matrices is not None
        add_experts(residual, hidden, self.matrices, plan)


class SeparateExperts(ExpertWeights):
    __slots__ = ("_make", "_weights")

    def __init__(self, make: Callable[[Sequence[Mapping[str, Tensor]]], Weight]) -> None:
        self._make = make
        self._weights: dict[int, Weight] = {}

    def put(self, expert: int, parts: Sequence[Mapping[str, Tensor]]) -> None:
        self._weights[expert] = self._make(parts)

    def gated_after_norm(self, x: Tensor, norm: Norm, plan: ExpertPlan, gate: ExpertGate) -> Tensor:
        if not plan.chosen:
            return x.new_empty(plan.num_pairs, 0)
        x = rms_norm(x, norm.weight, norm.eps)
        return gate_experts(self._multiply([x[pairs // plan.shape.top_k] for _, pairs in plan.chosen], plan), gate)

    def add_to(self, residual: Tensor, hidden: Tensor, plan: ExpertPlan) -> None:
        if plan.chosen:
            add_weighted(residual, self._multiply([hidden[pairs] for _, pairs in plan.chosen], plan), plan)

    def _multiply(self, rows: Sequence[Tensor], plan: ExpertPlan) -> Tensor:
        """[pairs, out_features], for the rows of each chosen expert's pairs."""
        products = [self._weights[expert].multiply(x) for (expert, _), x in zip(plan.chosen, rows, strict=True)]
        joined = torch.cat(products)
        out = joined.new_zeros(plan.num_pairs, joined.shape[1])  # an expert that is not here adds nothing
        out[torch.cat([pairs for _, pairs in plan.chosen])] = joined
        return out
