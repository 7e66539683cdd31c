"""Weights of 8-bit codes with a scale a row: W = scale * codes. A product reads the codes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ....kernels.activation import Activation
from ....kernels.expert_types import ExpertMatrices
from ....kernels.linear import add_linear, norm_gated_linear, norm_linear, plain_linear
from ..expert_weights import StackedExperts
from ..weight import Norm, StoredTensor, Weight

__all__ = ["ScaledExperts", "ScaledWeight"]


class ScaledWeight(Weight):
    """codes int8 or float8_e4m3fn [out_features, in_features]; scale float32 [out_features]. ``quantises_x``: see
    kernels/linear.py."""

    __slots__ = ("codes", "quantises_x", "scale")

    def __init__(self, codes: Tensor, scale: Tensor, bias: Tensor | None, quantises_x: bool = False) -> None:
        self.codes = codes
        self.scale = scale
        self.bias = bias
        self.quantises_x = quantises_x

    def multiply(self, x: Tensor) -> Tensor:
        return plain_linear(x, self.codes, self.bias, self.scale, self.quantises_x)

    def after_norm(self, x: Tensor, norm: Norm, out_dtype: torch.dtype | None = None) -> Tensor:
        return norm_linear(x, norm.weight, norm.eps, self.codes, self.bias, out_dtype, self.scale, self.quantises_x)

    def gated_after_norm(self, x: Tensor, norm: Norm, activation: Activation = "silu") -> Tensor:
        return norm_gated_linear(
            x, norm.weight, norm.eps, self.codes, self.bias, activation, self.scale, self.quantises_x
        )

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        add_linear(residual, x, self.codes, self.bias, self.scale, self.quantises_x)


class ScaledExperts(StackedExperts):
    """Stacked matrices of experts: "weight" of codes, "weight_scale" [num_experts, out_features, 1]."""

    __slots__ = ("_scale",)

    def __init__(
        self, num_experts: int, tensors: Sequence[StoredTensor], device: torch.device, scale: str = "weight_scale"
    ) -> None:
        """``scale``: name of the scales' tensor."""
        super().__init__(num_experts, tensors, device)
        self._scale = scale

    def _matrices(self) -> ExpertMatrices:
        return ExpertMatrices(self.stacks["weight"], self.stacks.get("bias"), self.stacks[self._scale].squeeze(2))
