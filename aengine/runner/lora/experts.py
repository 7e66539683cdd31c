"""`LoraExperts`: the weights of a layer's experts and what the adapters of a step's tokens add to their products."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from ...kernels.expert_gate import gate_experts
from ...kernels.expert_types import ExpertGate, ExpertPlan
from ...kernels.grouped_codes import CodeKind
from ...kernels.lora import AdapterPlan, add_pairs, expand, expand_gated, shrink
from ...kernels.rms_norm import rms_norm
from ..weights.weight import ExpertWeights, Norm
from .matrices import ExpertMatrices

if TYPE_CHECKING:
    from .rows import LoraRows


class LoraExperts(ExpertWeights):
    """In steps without adapters its verbs are those of the weights within. In others rows are in the order of the
    pairs, between gate and up and their activation, too."""

    __slots__ = ("_inner", "_matrices", "_rows")

    def __init__(self, inner: ExpertWeights, matrices: ExpertMatrices, rows: LoraRows) -> None:
        self._inner, self._matrices, self._rows = inner, matrices.tensors, rows

    @property
    def can_group(self) -> bool:
        return not self._rows.kind and self._inner.can_group

    @property
    def kind(self) -> CodeKind | None:
        return self._inner.kind

    @property
    def is_compiled(self) -> bool:
        return not self._rows.kind and self._inner.is_compiled

    def room(self, expert: int, suffix: str, rows: slice) -> Tensor:
        return self._inner.room(expert, suffix, rows)

    def finish(self, expert: int) -> None:
        self._inner.finish(expert)

    def multiply(self, x: Tensor, plan: ExpertPlan) -> Tensor:
        y = self._inner.multiply(x, plan)
        if (pairs := self._pairs(plan)) is not None:
            expand(y, shrink(x, None, self._matrices, pairs, plan.shape.top_k), self._matrices, pairs)
        return y

    def gated_after_norm(self, x: Tensor, norm: Norm, plan: ExpertPlan, gate: ExpertGate) -> Tensor:
        if not self._rows.kind:
            return self._inner.gated_after_norm(x, norm, plan, gate)
        x = rms_norm(x, norm.weight, norm.eps)
        if (pairs := self._pairs(plan)) is None or gate.kind == "clamped_swiglu" or gate.is_interleaved:
            return gate_experts(self.multiply(x, plan), gate)
        h = shrink(x, None, self._matrices, pairs, plan.shape.top_k)
        return expand_gated(self._inner.multiply(x, plan), h, self._matrices, pairs, gate.kind)

    def add_to(self, residual: Tensor, hidden: Tensor, plan: ExpertPlan) -> None:
        self._inner.add_to(residual, hidden, plan)
        if (pairs := self._pairs(plan)) is not None:
            add_pairs(residual, shrink(hidden, None, self._matrices, pairs), self._matrices, pairs)

    def _pairs(self, plan: ExpertPlan) -> AdapterPlan | None:
        """Return the pairs that adapters add to; None: they add nothing, and on a CPU there may be no products."""
        pairs = self._rows.pairs_of(plan) if self._rows.kind else None
        return None if pairs is None or pairs.is_empty else pairs
