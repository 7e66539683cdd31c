"""Zeroed tensors whose pages come from the kernel only when they are first written."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

__all__ = ["lazy_zeros"]

_LINE = 64  # bytes of a cache line, and of an AVX-512 register


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of zeros, which calloc allocates on the CPU: memory that is never written is never resident.

    torch.zeros fills it: the rows and the KV cache of an idle engine would take gigabytes and a second of its start.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    data = torch.from_numpy(np.zeros(size + _LINE, dtype=np.uint8))
    begin = -data.data_ptr() % _LINE
    return data[begin : begin + size].view(dtype).view(shape)
