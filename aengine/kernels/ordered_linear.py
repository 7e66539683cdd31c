"""Matrix products of which a row's bits depend on that row alone: sums over K have one order, whatever the number of
rows. For GPUs of compute capability 9.0.

    ordered_linear        y = x W^T + b, or the gated activation of that
    add_ordered_linear    residual += x W^T + b

Those of kernels/linear.py take the fastest kernel for the number of rows, cuBLAS among them, each of which adds up in
an order of its own. Here one kernel multiplies (triton/linear_streamed.py), a row by itself as well as thousands.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .activation import Activation, act_and_mul
from .dispatch import uses_triton
from .policy import KernelPolicy

ROW_ELEMENTS = 8
"""In features are a multiple of this: the copy engine takes rows of multiples of 16 bytes."""


def ordered_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype | None = None,
    activation: Activation | None = None,
) -> Tensor:
    """Return [n, out_features] in x's dtype, or ``out_dtype``, for x [n, in_features]; summed in float32. With an
    ``activation`` activation(gate) * up, half as wide, for a matrix that has the gate's rows first."""
    size = _check(x, weight)
    if uses_triton(x):
        from .triton import linear_streamed as triton_op

        out = x.new_empty((len(x), size // (1 if activation is None else 2)), dtype=out_dtype or x.dtype)
        triton_op.multiply_in_order(x, weight, bias, out, add=False, activation=activation)
        return out
    y = _product(x, weight, bias)
    return (y if activation is None else act_and_mul(y, activation)).to(out_dtype or x.dtype)


def add_ordered_linear(residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Change ``residual`` [n, out_features] in place, for x [n, in_features]."""
    assert residual.shape == (len(x), _check(x, weight)), f"{tuple(residual.shape)} gets {tuple(weight.shape)}"
    if uses_triton(residual):
        from .triton import linear_streamed as triton_op

        triton_op.multiply_in_order(x, weight, bias, residual, add=True)
    else:
        residual.add_(_product(x, weight, bias))


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return KernelPolicy(batch_invariant=True).by_rows(lambda rows: F.linear(rows, weight, bias), x)


def _check(x: Tensor, weight: Tensor) -> int:
    assert x.shape[1:] == weight.shape[1:] and x.dtype == weight.dtype, f"{tuple(x.shape)} x {tuple(weight.shape)}^T"
    assert weight.shape[1] % ROW_ELEMENTS == 0, f"rows of {weight.shape[1]}"
    return len(weight)
