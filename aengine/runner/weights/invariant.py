"""Weights by which a row's product has the same bits whatever else is multiplied, for batch-invariant policies.

    RowTiledWeight    on a CPU: of any format, as many rows at a time
    InOrderWeight     on a GPU: of plain 16-bit numbers, by a kernel that adds up in one order

A CPU's compiled kernels add up row by row anyway, and have no other weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ...errors import InternalError, ModelLoadError
from ...kernels.activation import Activation, computed
from ...kernels.ordered_linear import ROW_ELEMENTS, add_ordered_linear, ordered_linear
from ...kernels.policy import KernelPolicy
from ...kernels.rms_norm import rms_norm
from .plain import PlainFormat, plain_tensors
from .weight import ExpertWeights, Norm, NotMultiplied, StoredTensor, Weight, WeightFormat

__all__ = ["invariant_format"]


def invariant_format(form: WeightFormat, name: str, policy: KernelPolicy, device: torch.device) -> WeightFormat:
    """Return what makes such weights of the matrix ``name``. Raises ModelLoadError: its format has none there."""
    if device.type == "cpu":
        return RowTiledFormat(form, policy)
    if not isinstance(form, PlainFormat):
        raise ModelLoadError(
            f"batch_invariant=True: {name} is in {form.name}, and on a GPU the products of plain 16-bit numbers alone "
            f"have one order of sums: leave it at False here"
        )
    return InOrderFormat(form.dtype)


class InOrderWeight(Weight):
    """A weight of plain numbers, for `ordered_linear`. What is done beside its products is done row by row, too."""

    __slots__ = ("weight",)

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight
        self.bias = bias

    def multiply(self, x: Tensor) -> Tensor:
        return ordered_linear(x, self.weight, self.bias)

    def after_norm(self, x: Tensor, norm: Norm, out_dtype: torch.dtype | None = None) -> Tensor:
        return ordered_linear(rms_norm(x, norm.weight, norm.eps), self.weight, self.bias, out_dtype)

    def gated(self, x: Tensor, activation: Activation = "silu") -> Tensor:
        return ordered_linear(x, self.weight, self.bias, activation=activation)

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        add_ordered_linear(residual, x, self.weight, self.bias)


class InOrderFormat(PlainFormat):
    def tensors(self, out_features: int, in_features: int, has_bias: bool) -> list[StoredTensor]:
        if in_features % ROW_ELEMENTS:
            raise NotMultiplied(f"batch_invariant=True needs rows of a multiple of {ROW_ELEMENTS}: leave it at False")
        return plain_tensors(out_features, in_features, has_bias, self.dtype)

    def make(self, tensors: Mapping[str, Tensor]) -> Weight:
        bias = tensors.get("bias")
        return InOrderWeight(tensors["weight"].to(self.dtype), None if bias is None else bias.to(self.dtype))


class RowTiledWeight(Weight):
    """A weight of any format that multiplies as many rows at a time as a `KernelPolicy` says.

    Which kernel multiplies, and in which order it adds up, is chosen by the number of rows in most formats, and in the
    libraries below them: so none needs to know of the policy. The sums into the residual stream are element by element.
    """

    __slots__ = ("_inner", "_policy")

    def __init__(self, inner: Weight, policy: KernelPolicy) -> None:
        self._inner = inner
        self._policy = policy
        self.bias = inner.bias

    def multiply(self, x: Tensor) -> Tensor:
        return self._policy.by_rows(self._inner.multiply, x)

    def after_norm(self, x: Tensor, norm: Norm, out_dtype: torch.dtype | None = None) -> Tensor:
        return self._policy.by_rows(partial(self._inner.after_norm, norm=norm, out_dtype=out_dtype), x)

    def gated_after_norm(self, x: Tensor, norm: Norm, activation: Activation = "silu") -> Tensor:
        return self._policy.by_rows(lambda rows: computed(self._inner.gated_after_norm(rows, norm, activation)), x)

    def add_scaled_to(self, residual: Tensor, x: Tensor, scale: float) -> None:
        """See `Weight`: in two steps, as torch rounds a sum with a factor in another way in its last few elements."""
        residual.add_(self.multiply(x).mul_(scale))


@dataclass(frozen=True, slots=True)
class RowTiledFormat:
    """A `WeightFormat` around another, whose weights are `RowTiledWeight`s."""

    inner: WeightFormat
    policy: KernelPolicy

    @property
    def name(self) -> str:
        return self.inner.name

    def tensors(self, out_features: int, in_features: int, has_bias: bool) -> list[StoredTensor]:
        return self.inner.tensors(out_features, in_features, has_bias)

    def make(self, tensors: Mapping[str, Tensor]) -> Weight:
        return RowTiledWeight(self.inner.make(tensors), self.policy)

    def make_experts(self, num_experts: int, tensors: Sequence[StoredTensor], device: torch.device) -> ExpertWeights:
        raise InternalError("experts of row tiles: `choose_policy` refuses the model before")
