"""Linear layers: names in the checkpoint on one side, a weight that multiplies on the other."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from threading import Lock

import torch
from torch import Tensor

from ...kernels.activation import Activation
from ..weights.scope import WeightScope
from ..weights.weight import Norm, Weight

__all__ = ["Linear"]


class Linear:
    """y = x W^T + b, possibly of several of the checkpoint's matrices below each other (q, k, v; gate, up).

    A checkpoint that has them packed in one tensor, in this order, names that one as the only part.

    When the last of their tensors has come, the format makes one weight of them, and they are let go. The verbs are
    those of `Weight`.
    """

    def __init__(self, scope: WeightScope, in_features: int, parts: Mapping[str, int], bias: bool = False) -> None:
        """``parts``: name and output features of each matrix."""
        self.weight: Weight
        self._format = scope.format_of(list(parts))
        self._parts: list[dict[str, Tensor]] = [{} for _ in parts]
        self._num_missing = 0
        self._lock = Lock()  # several threads may load
        for i, (name, out_features) in enumerate(parts.items()):
            for stored in self._format.tensors(out_features, in_features, bias):
                put = partial(self._put, i, stored.suffix)
                scope.want(f"{name}.{stored.suffix}", stored.shape, stored.dtype, put, stored.num_parameters)
                self._num_missing += 1

    def _put(self, part: int, suffix: str, tensor: Tensor) -> None:
        with self._lock:
            self._parts[part][suffix] = tensor
            self._num_missing -= 1
            is_last = self._num_missing == 0
        if is_last:
            self.weight = self._format.make(self._parts)
            self._parts = []

    def multiply(self, x: Tensor) -> Tensor:
        return self.weight.multiply(x)

    def after_norm(self, x: Tensor, norm: Norm, out_dtype: torch.dtype | None = None) -> Tensor:
        return self.weight.after_norm(x, norm, out_dtype)

    def gated_after_norm(self, x: Tensor, norm: Norm, activation: Activation = "silu") -> Tensor:
        return self.weight.gated_after_norm(x, norm, activation)

    def add_to(self, residual: Tensor, x: Tensor, post_norm: Norm | None = None, scale: float = 1.0) -> None:
        """Add the product by x to ``residual``, in place; before that it is normalised, or multiplied by ``scale``."""
        if post_norm is not None:
            self.weight.add_normed_to(residual, x, post_norm)
        elif scale != 1.0:
            self.weight.add_scaled_to(residual, x, scale)
        else:
            self.weight.add_to(residual, x)
