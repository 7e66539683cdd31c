"""Matrix products of a decoder layer, together with what comes right before and after them.

    plain_linear         y = x W^T + b
    norm_linear          y = rms_norm(x) W^T + b
    norm_gated_linear    y = act(g) * u,  (g, u) = rms_norm(x) W^T + b
    add_linear           residual += x W^T + b

W is of x's dtype, or of 8 bits (float8_e4m3fn, int8) with a scale a row, W = scale * codes, or `GroupedCodes` of 4 or 8
bits with a scale a group of columns. Codes become numbers as they are multiplied.

``quantises_x`` says that x may be rounded to FP8, with a scale a row of its largest number: then FP8 tensor cores
multiply many rows of x by W in FP8. Otherwise, and of few rows, x is as exact as its dtype.

At small batches the time is that of reading the weights once (2 N K bytes in 16 bit; 2 M N K operations are far below
the arithmetic limit) plus that of starting kernels, so on the GPU they are one launch each (M = 1) or two.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .activation import Activation, act_and_mul
from .dispatch import uses_triton
from .grouped_codes import GroupedCodes
from .rms_norm import rms_norm
from .scaled_product import product

__all__ = ["add_linear", "norm_gated_linear", "norm_linear", "plain_linear"]


def plain_linear(
    x: Tensor,
    weight: Tensor | GroupedCodes,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    quantises_x: bool = False,
) -> Tensor:
    """Return [n, out_features] in x's dtype, for x [n, in_features] and a weight [out_features, in_features]."""
    _check(x, weight, bias, scale)
    if uses_triton(x):
        from .triton import linear as triton_op

        return triton_op.plain_linear(x, weight, bias, scale, quantises_x)
    return product(x, weight, bias, scale)


def norm_linear(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor | GroupedCodes,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    scale: Tensor | None = None,
    quantises_x: bool = False,
) -> Tensor:
    """Return [n, out_features], in x's dtype or ``out_dtype``, summed in float32.

    Args:
        x: [n, in_features]
        norm_weight: [in_features]
        weight, bias: [out_features, in_features], [out_features]
        scale: float32 [out_features], of a weight in 8 bits
    """
    _check(x, weight, bias, scale)
    if uses_triton(x):
        from .triton import linear as triton_op

        return triton_op.norm_linear(x, norm_weight, eps, weight, bias, scale, out_dtype or x.dtype, quantises_x)
    return product(rms_norm(x, norm_weight, eps), weight, bias, scale).to(out_dtype or x.dtype)


def norm_gated_linear(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor | GroupedCodes,
    bias: Tensor | None = None,
    activation: Activation = "silu",
    scale: Tensor | None = None,
    quantises_x: bool = False,
) -> Tensor:
    """Return [n, size]; weight is [2 * size, in_features], the gate's rows first, bias and scale [2 * size]."""
    _check(x, weight, bias, scale)
    if uses_triton(x):
        from .triton import linear as triton_op

        return triton_op.norm_gated_linear(x, norm_weight, eps, weight, bias, scale, activation, quantises_x)
    return act_and_mul(product(rms_norm(x, norm_weight, eps), weight, bias, scale), activation)


def add_linear(
    residual: Tensor,
    x: Tensor,
    weight: Tensor | GroupedCodes,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    quantises_x: bool = False,
) -> None:
    """Change ``residual`` [n, out_features] in place, for x [n, in_features]."""
    _check(x, weight, bias, scale)
    assert residual.shape == (x.shape[0], weight.shape[0]), f"{tuple(residual.shape)} gets {tuple(weight.shape)}"
    if uses_triton(x):
        from .triton import linear as triton_op

        triton_op.add_linear(residual, x, weight, bias, scale, quantises_x)
    else:
        residual.add_(product(x, weight, bias, scale))


def _check(x: Tensor, weight: Tensor | GroupedCodes, bias: Tensor | None, scale: Tensor | None) -> None:
    assert x.dim() == len(weight.shape) == 2 and x.shape[1] == weight.shape[1], f"{x.shape} x {weight.shape}^T"
    assert bias is None or bias.shape == weight.shape[:1], f"a bias of {tuple(bias.shape)} for {tuple(weight.shape)}"
    if isinstance(weight, GroupedCodes):
        assert scale is None, "a scale beside those of groups"
        return
    assert (scale is not None) == (weight.element_size() == 1), f"a scale, or none, for {weight.dtype}"
    assert scale is None or (scale.shape == weight.shape[:1] and scale.dtype == torch.float32)
