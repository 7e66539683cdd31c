"""Zeroed tensors whose pages come from the kernel only when they are first written."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable

import torch
from torch import Tensor

NewZeros = Callable[[tuple[int, ...], torch.dtype, torch.device], Tensor]
"""Makes a tensor of zeros, as `lazy_zeros` does."""


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of zeros, which begins at a page on the CPU: memory that is never written is never resident.

    torch.zeros fills it: the rows and the KV cache of an idle engine would take gigabytes and a second of its start.
    numpy's zeros ask for pages of 2 MiB, of which each layer would take one for a few tokens.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    memory = mmap.mmap(-1, max(1, size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.uint8)[:size].view(dtype).view(shape)
