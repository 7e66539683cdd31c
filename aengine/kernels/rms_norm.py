"""RMS normalisation.

    rms_norm(x)[i] = x[i] * weight / sqrt(mean(x[i]^2) + eps)            Zhang and Sennrich 2019, arXiv:1910.07467
    add_rms_norm     residual += rms_norm(x)

Computed in float32 whatever the dtype of ``x``; the weight's may be another.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from .dispatch import uses_triton


class Norm(Protocol):
    """Parameters of an RMS norm before or after a product."""

    @property
    def weight(self) -> Tensor:
        """[size], in float32 or the activations' dtype."""

    @property
    def eps(self) -> float: ...


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x [..., size] with normalised rows times weight [size], in x's dtype."""
    assert x.shape[-1] == weight.shape[0], f"rms_norm of rows of {x.shape[-1]} with a weight of {weight.shape[0]}"
    if uses_triton(x):
        from .triton import rms_norm as triton_op

        return triton_op.rms_norm(x.contiguous(), weight, eps)
    return _torch_rms_norm(x, weight, eps)


def add_rms_norm(residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
    """Change ``residual`` [n, size] in place, for x [n, size] and weight [size]."""
    assert residual.shape == x.shape == (len(x), *weight.shape), f"{tuple(residual.shape)} gets {tuple(x.shape)}"
    if uses_triton(x):
        from .triton import rms_norm as triton_op

        triton_op.add_rms_norm(residual, x.contiguous(), weight, eps)
    else:
        residual.add_(_torch_rms_norm(x, weight, eps))


def _torch_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if weight.dtype == x.dtype:
        return torch.rms_norm(x, weight.shape, weight, eps)
    return torch.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)
