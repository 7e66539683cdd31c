"""Weights of 8-bit codes with a scale a row: W = scale * codes. A product reads the codes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ....kernels.expert_types import ExpertMatrices
from ....kernels.matrix import Matrix
from ..expert_weights import StackedExperts
from ..plain import MatrixWeight
from ..weight import StoredTensor

__all__ = ["ScaledExperts", "ScaledWeight"]


class ScaledWeight(MatrixWeight):
    """codes int8 or float8_e4m3fn [out_features, in_features]; scale float32 [out_features]. ``quantises_x``: see
    `Matrix`."""

    __slots__ = ("codes", "quantises_x", "scale")

    def __init__(self, codes: Tensor, scale: Tensor, bias: Tensor | None, quantises_x: bool = False) -> None:
        self.codes = codes
        self.scale = scale
        self.bias = bias
        self.quantises_x = quantises_x

    @property
    def matrix(self) -> Matrix:
        return Matrix(self.codes, self.bias, self.scale, self.quantises_x)


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
