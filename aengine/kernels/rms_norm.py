"""RMS normalisation.

    rms_norm(x)[i] = x[i] * weight / sqrt(mean(x[i]^2) + eps)            Zhang and Sennrich 2019, arXiv:1910.07467

Computed in float32 whatever the dtype of ``x``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .dispatch import uses_triton

__all__ = ["rms_norm"]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalised rows, in x's dtype, for x [..., size] and weight [size]."""
    assert x.shape[-1] == weight.shape[0], f"rms_norm of rows of {x.shape[-1]} with a weight of {weight.shape[0]}"
    if uses_triton(x):
        from .triton import rms_norm as triton_op

        return triton_op.rms_norm(x.contiguous(), weight, eps)
    return torch.rms_norm(x, weight.shape, weight, eps)
