"""Weights as torch has them: float32, bfloat16 or float16 on a GPU, float32 or bfloat16 on a CPU."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.activation import Activation, Gated
from ...kernels.linear import add_linear, norm_conv_linear, norm_gated_linear, norm_linear, plain_linear
from ...kernels.matrix import Matrix
from ...kernels.short_conv import TokenConv
from .expert_weights import StackedExperts
from .weight import ExpertWeights, Norm, StoredTensor, Weight, WeightFormat

__all__ = ["MatrixWeight", "NumbersOf", "PlainFormat", "PlainWeight", "plain_tensors"]


class MatrixWeight(Weight):
    """A weight every verb of which is an op of its own (kernels/linear.py)."""

    __slots__ = ()

    @property
    @abstractmethod
    def matrix(self) -> Matrix:
        """What the ops multiply by."""

    def multiply(self, x: Tensor) -> Tensor:
        return plain_linear(x, self.matrix)

    def after_norm(self, x: Tensor, norm: Norm, out_dtype: torch.dtype | None = None) -> Tensor:
        return norm_linear(x, norm, self.matrix, out_dtype)

    def gated_after_norm(self, x: Tensor, norm: Norm, activation: Activation = "silu") -> Tensor | Gated:
        return norm_gated_linear(x, norm, self.matrix, activation)

    def conv_after_norm(self, x: Tensor, norm: Norm, conv: TokenConv) -> Tensor:
        return norm_conv_linear(x, norm, self.matrix, conv)

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        add_linear(residual, x, self.matrix)

    def add_gated_to(self, residual: Tensor, gated: Gated) -> None:
        add_linear(residual, gated, self.matrix)


class PlainWeight(MatrixWeight):
    """A weight of plain numbers, multiplied as it is."""

    __slots__ = ("weight",)

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight
        self.bias = bias

    @property
    def matrix(self) -> Matrix:
        return Matrix(self.weight, self.bias)


def plain_tensors(out_features: int, in_features: int, has_bias: bool, dtype: torch.dtype) -> list[StoredTensor]:
    """Return the tensors of a matrix that the checkpoint keeps as plain numbers."""
    weight = StoredTensor("weight", (out_features, in_features), dtype, out_features * in_features, in_dim=1)
    return [weight, StoredTensor("bias", (out_features,), dtype, out_features)] if has_bias else [weight]


@dataclass(frozen=True, slots=True)
class PlainFormat:
    dtype: torch.dtype

    @property
    def name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def tensors(self, out_features: int, in_features: int, has_bias: bool) -> list[StoredTensor]:
        return plain_tensors(out_features, in_features, has_bias, self.dtype)

    def make(self, tensors: Mapping[str, Tensor]) -> Weight:
        bias = tensors.get("bias")
        return PlainWeight(tensors["weight"].to(self.dtype), None if bias is None else bias.to(self.dtype))

    def make_experts(self, num_experts: int, tensors: Sequence[StoredTensor], device: torch.device) -> ExpertWeights:
        return StackedExperts(num_experts, tensors, device)


@dataclass(frozen=True, slots=True)
class NumbersOf:
    """Matrices of another format, which become plain numbers as they are loaded."""

    form: WeightFormat
    in_features: int
    dtype: torch.dtype

    @property
    def name(self) -> str:
        return self.form.name

    def tensors(self, out_features: int, in_features: int, has_bias: bool) -> list[StoredTensor]:
        return self.form.tensors(out_features, in_features, has_bias)

    def make(self, tensors: Mapping[str, Tensor]) -> Weight:
        made = self.form.make(tensors)
        if isinstance(made, PlainWeight):
            return made
        columns = torch.eye(self.in_features, dtype=self.dtype, device=next(iter(tensors.values())).device)
        return PlainWeight(made.multiply(columns).t().contiguous(), None)

    def make_experts(self, num_experts: int, tensors: Sequence[StoredTensor], device: torch.device) -> ExpertWeights:
        return self.form.make_experts(num_experts, tensors, device)
