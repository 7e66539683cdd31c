"""RMS normalisation with its weight."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...kernels.rms_norm import rms_norm
from ..weights.slot import Slot

__all__ = ["RMSNorm"]


class RMSNorm:
    def __init__(self, name: str, size: int, eps: float, dtype: torch.dtype) -> None:
        self._name, self._size, self._dtype = name, size, dtype
        self.eps = eps
        self.weight: Tensor  # [size]

    def slots(self) -> Iterator[Slot]:
        yield Slot(f"{self._name}.weight", (self._size,), self._load)

    def _load(self, tensor: Tensor) -> None:
        self.weight = tensor.to(self._dtype)

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)
