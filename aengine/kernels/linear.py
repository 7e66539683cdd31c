"""Matrix products of a decoder layer, together with what comes right before and after them.

    plain_linear         y = x W^T + b
    norm_linear          y = rms_norm(x) W^T + b
    norm_gated_linear    y = act(g) * u,  (g, u) = rms_norm(x) W^T + b
    add_linear           residual += x W^T + b

At small batches the time is that of reading the weights once (2 N K bytes in 16 bit; 2 M N K operations are far below
the arithmetic limit) plus that of starting kernels, so on the GPU they are one launch each (M = 1) or two.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .activation import Activation, act_and_mul
from .dispatch import uses_triton
from .rms_norm import rms_norm

__all__ = ["add_linear", "norm_gated_linear", "norm_linear", "plain_linear"]


def plain_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """[n, out_features] in x's dtype, for x [n, in_features] and a weight [out_features, in_features]."""
    _check(x, weight, bias)
    if uses_triton(x):
        from .triton import linear as triton_op

        return triton_op.plain_linear(x, weight, bias)
    return F.linear(x, weight, bias)


def norm_linear(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """[n, out_features], in x's dtype or ``out_dtype``, summed in float32.

    Args:
        x: [n, in_features]
        norm_weight: [in_features]
        weight, bias: [out_features, in_features], [out_features]
    """
    _check(x, weight, bias)
    if uses_triton(x):
        from .triton import linear as triton_op

        return triton_op.norm_linear(x, norm_weight, eps, weight, bias, out_dtype or x.dtype)
    return F.linear(rms_norm(x, norm_weight, eps), weight, bias).to(out_dtype or x.dtype)


def norm_gated_linear(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: Activation = "silu",
) -> Tensor:
    """[n, size]; weight is [2 * size, in_features], the gate's rows first, bias [2 * size]."""
    _check(x, weight, bias)
    if uses_triton(x):
        from .triton import linear as triton_op

        return triton_op.norm_gated_linear(x, norm_weight, eps, weight, bias, activation)
    return act_and_mul(F.linear(rms_norm(x, norm_weight, eps), weight, bias), activation)


def add_linear(residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """Change ``residual`` [n, out_features] in place, for x [n, in_features]."""
    _check(x, weight, bias)
    assert residual.shape == (x.shape[0], weight.shape[0]), f"{tuple(residual.shape)} gets {tuple(weight.shape)}"
    if uses_triton(x):
        from .triton import linear as triton_op

        triton_op.add_linear(residual, x, weight, bias)
    else:
        residual.add_(F.linear(x, weight, bias))


def _check(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    assert x.dim() == weight.dim() == 2 and x.shape[1] == weight.shape[1], f"{tuple(x.shape)} x {tuple(weight.shape)}^T"
    assert bias is None or bias.shape == weight.shape[:1], f"a bias of {tuple(bias.shape)} for {tuple(weight.shape)}"
