"""RMS normalisation with its weight."""

from __future__ import annotations

from torch import Tensor

from ...kernels.rms_norm import rms_norm
from ..weights.scope import WeightScope

__all__ = ["RMSNorm"]


class RMSNorm:
    """x * weight / sqrt(mean(x^2) + eps), over the last dimension."""

    def __init__(self, scope: WeightScope, size: int, eps: float) -> None:
        self.weight: Tensor  # [size]
        self.eps = eps
        self._dtype = scope.formats.dtype
        scope.want("weight", (size,), self._dtype, self._put)

    def _put(self, tensor: Tensor) -> None:
        self.weight = tensor.to(self._dtype)

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)
