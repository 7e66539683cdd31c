"""RMS normalisation with its weight."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

from ...kernels.rms_norm import rms_norm
from ..weights.scope import WeightScope

__all__ = ["RMSNorm"]


class RMSNorm:
    """x * weight / sqrt(mean(x^2) + eps), over the last dimension.

    ``plus_one``: the checkpoint has the weight less one (Gemma). The sum is kept in float32: most such weights lie near
    zero, where 16 bits tell numbers apart that they don't near one.
    """

    def __init__(self, scope: WeightScope, size: int, eps: float, *, plus_one: bool = False) -> None:
        self.weight: Tensor  # [size]
        self.eps = eps
        self._plus_one = plus_one
        self._dtype = torch.float32 if plus_one else scope.formats.dtype
        scope.want("weight", (size,), self._dtype, self._put)

    @classmethod
    def of(cls, weight: Tensor, eps: float) -> Self:
        """Make a norm of a weight that is loaded already."""
        norm = cls.__new__(cls)
        norm.weight, norm.eps = weight, eps
        return norm

    def _put(self, tensor: Tensor) -> None:
        self.weight = tensor.to(self._dtype)
        if self._plus_one:
            self.weight = self.weight + 1.0

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)
