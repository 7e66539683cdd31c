"""`LoraWeight`: a weight and what the adapters of a step's tokens add to its product."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...kernels.activation import Activation, Gated, computed
from ...kernels.lora import AdapterPlan, expand, expand_gated, shrink
from ...kernels.rms_norm import rms_norm
from ..weights.weight import Norm, Weight
from .matrices import SlotMatrices

if TYPE_CHECKING:
    from .rows import LoraRows


class LoraWeight(Weight):
    """In steps without adapters its verbs are those of the weight within.

    What is launched first is the adapters' smaller product: it keeps nothing waiting that reads the weight ahead.
    """

    __slots__ = ("_inner", "_matrices", "_rows")

    def __init__(self, inner: Weight, matrices: SlotMatrices, rows: LoraRows) -> None:
        self._inner, self._rows = inner, rows
        self._matrices = matrices.tensors
        self.bias = inner.bias

    @property
    def _plan(self) -> AdapterPlan | None:
        return self._rows.plan if self._rows.kind else None

    def multiply(self, x: Tensor) -> Tensor:
        if (plan := self._plan) is None:
            return self._inner.multiply(x)
        x = x.contiguous()
        h = shrink(x, None, self._matrices, plan)
        y = self._inner.multiply(x).contiguous()
        expand(y, h, self._matrices, plan)
        return y

    def after_norm(self, x: Tensor, norm: Norm, out_dtype: torch.dtype | None = None) -> Tensor:
        if (plan := self._plan) is None:
            return self._inner.after_norm(x, norm, out_dtype)
        if len(x) > 1:  # both products by one row have the norm within
            return self.multiply(rms_norm(x, norm.weight, norm.eps)).to(out_dtype or x.dtype)
        h = shrink(x.contiguous(), norm, self._matrices, plan)
        y = self._inner.after_norm(x, norm, out_dtype).contiguous()
        expand(y, h, self._matrices, plan)
        return y

    def gated_after_norm(self, x: Tensor, norm: Norm, activation: Activation = "silu") -> Tensor | Gated:
        if (plan := self._plan) is None:
            return self._inner.gated_after_norm(x, norm, activation)
        if len(x) > 1:
            return self.gated(rms_norm(x, norm.weight, norm.eps), activation)
        h = shrink(x.contiguous(), norm, self._matrices, plan)
        return expand_gated(self._inner.after_norm(x, norm).contiguous(), h, self._matrices, plan, activation)

    def gated(self, x: Tensor, activation: Activation = "silu") -> Tensor:
        if (plan := self._plan) is None:
            return self._inner.gated(x, activation)
        x = x.contiguous()
        h = shrink(x, None, self._matrices, plan)
        return expand_gated(self._inner.multiply(x).contiguous(), h, self._matrices, plan, activation)

    def activated(self, x: Tensor, activation: Activation) -> Tensor:
        return super().activated(x, activation) if self._plan else self._inner.activated(x, activation)

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        if (plan := self._plan) is None:
            self._inner.add_to(residual, x)
            return
        x = x.contiguous()
        h = shrink(x, None, self._matrices, plan)
        self._inner.add_to(residual, x)
        expand(residual, h, self._matrices, plan)

    def add_gated_to(self, residual: Tensor, gated: Gated) -> None:
        if self._plan:
            self.add_to(residual, computed(gated))
        else:
            self._inner.add_gated_to(residual, gated)

    def add_normed_to(self, residual: Tensor, x: Tensor, norm: Norm) -> None:
        if self._plan:
            super().add_normed_to(residual, x, norm)
        else:
            self._inner.add_normed_to(residual, x, norm)

    def add_scaled_to(self, residual: Tensor, x: Tensor, scale: float) -> None:
        if self._plan:
            super().add_scaled_to(residual, x, scale)
        else:
            self._inner.add_scaled_to(residual, x, scale)
