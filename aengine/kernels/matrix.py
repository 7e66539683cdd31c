"""A matrix as products take it: kernels/linear.py."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .grouped_codes import GroupedCodes


class Matrix(NamedTuple):
    """Numbers of x's dtype; or codes of 8 bits with a scale a row, W = scale * codes; or codes with a scale a group."""

    weight: Tensor | GroupedCodes  # [out_features, in_features]
    bias: Tensor | None = None  # [out_features]
    scale: Tensor | None = None  # float32 [out_features], of codes of 8 bits
    quantises_x: bool = False  # x may be rounded to FP8, with a scale a row of its largest number

    @property
    def shape(self) -> tuple[int, int]:
        n, k = self.weight.shape
        return n, k

    def check(self, x_shape: tuple[int, ...]) -> None:
        """Assert that it fits x, and that its own tensors fit each other."""
        weight, bias, scale, _ = self
        assert len(x_shape) == len(weight.shape) == 2 and x_shape[1] == weight.shape[1], f"{x_shape} x {weight.shape}^T"
        assert bias is None or bias.shape == weight.shape[:1], f"a bias of {tuple(bias.shape)} for {weight.shape}"
        if isinstance(weight, GroupedCodes):
            assert scale is None, "a scale beside those of groups"
            return
        assert (scale is not None) == (weight.element_size() == 1), f"a scale, or none, for {weight.dtype}"
        assert scale is None or (scale.shape == weight.shape[:1] and scale.dtype == torch.float32)
