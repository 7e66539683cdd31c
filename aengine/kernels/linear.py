"""Matrix products of a decoder layer, together with what comes right before and after them.

    plain_linear         y = x W^T + b
    norm_linear          y = rms_norm(x) W^T + b
    norm_gated_linear    y = act(g) * u,  (g, u) = rms_norm(x) W^T + b
    norm_conv_linear     y = c * convolution(b * z),  (b, c, z) = rms_norm(x) W^T + b
    add_linear           residual += x W^T + b

W is of x's dtype, or of codes, which become numbers as they are multiplied: see `Matrix`. Where that says that x may be
rounded to FP8, FP8 tensor cores multiply more than eight rows of x by W in FP8. Otherwise, and of few rows, x is as
exact as its dtype.

At small batches the time is that of reading the weights once (2 N K bytes in 16 bit; 2 M N K operations are far below
the arithmetic limit) plus that of starting kernels, so on the GPU they are one launch each (M = 1) or two. Of many
rows the gated activation is left to the product that reads it (`Gated`), which does both in one pass.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .activation import Activation, Gated, act_and_mul, computed
from .dispatch import uses_triton
from .matrix import Matrix
from .rms_norm import Norm, rms_norm
from .scaled_product import product
from .short_conv import TokenConv, conv_of_tokens


def plain_linear(x: Tensor, matrix: Matrix) -> Tensor:
    """Return [n, out_features] in x's dtype, for x [n, in_features]."""
    matrix.check(x.shape)
    if uses_triton(x):
        from .triton import linear as triton_op

        return triton_op.linear(x, None, matrix, x.dtype)
    return product(x, matrix)


def norm_linear(x: Tensor, norm: Norm, matrix: Matrix, out_dtype: torch.dtype | None = None) -> Tensor:
    """Return [n, out_features] in x's dtype, or ``out_dtype``, summed in float32, for x [n, in_features]."""
    matrix.check(x.shape)
    if uses_triton(x):
        from .triton import linear as triton_op

        return triton_op.linear(x, norm, matrix, out_dtype or x.dtype)
    return product(rms_norm(x, norm.weight, norm.eps), matrix).to(out_dtype or x.dtype)


def norm_gated_linear(x: Tensor, norm: Norm, matrix: Matrix, activation: Activation = "silu") -> Tensor | Gated:
    """Return [n, size], for a matrix [2 * size, in_features] that has the gate's rows first."""
    matrix.check(x.shape)
    if uses_triton(x):
        from .triton import linear as triton_op

        return triton_op.gated_linear(x, norm, matrix, activation)
    return act_and_mul(product(rms_norm(x, norm.weight, norm.eps), matrix), activation)


def norm_conv_linear(x: Tensor, norm: Norm, matrix: Matrix, conv: TokenConv) -> Tensor:
    """Return [n, channels], one token of each sequence, for a matrix [3 * channels, in_features]."""
    matrix.check(x.shape)
    if uses_triton(x):
        from .triton import linear_conv as triton_op

        if triton_op.fits(x, matrix):
            return triton_op.conv_gemv(x, norm, matrix, conv)
    return conv_of_tokens(norm_linear(x, norm, matrix), *conv)


def add_linear(residual: Tensor, x: Tensor | Gated, matrix: Matrix) -> None:
    """Change ``residual`` [n, out_features] in place, for x [n, in_features]."""
    matrix.check(x.shape)
    assert residual.shape == (x.shape[0], matrix.shape[0]), f"{tuple(residual.shape)} gets {matrix.shape}"
    if uses_triton(residual):
        from .triton import linear as triton_op

        triton_op.add_linear(residual, x, matrix)
    else:
        residual.add_(product(computed(x), matrix))
