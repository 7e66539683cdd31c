"""Keys and values in FP8: bytes, the codes of float8_e4m3fn, of numbers divided by a scale of their head.

A number beyond 448 scales is kept as 448 of them, and a NaN as a NaN. ``scales`` are float32 [2, num_kv_heads], of keys
and of values. None stands for a cache of plain numbers, for which both functions only convert.
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = 448.0  # the largest number of float8_e4m3fn


def kept_kv(kv: Tensor, dtype: torch.dtype, scales: Tensor | None) -> Tensor:
    """``kv`` [..., 2, num_kv_heads, head_dim] as a cache of ``dtype`` keeps it: uint8 where there are scales."""
    if scales is None:
        return kv if kv.dtype == dtype else kv.to(dtype)
    numbers = (kv.float() / scales[:, :, None]).clamp_(-LARGEST, LARGEST)
    return numbers.to(torch.float8_e4m3fn).view(torch.uint8)


def kv_numbers(kept: Tensor, dtype: torch.dtype, scales: Tensor | None) -> Tensor:
    """The numbers in ``dtype`` of what `kept_kv` returned."""
    if scales is None:
        return kept.to(dtype)
    return (kept.view(torch.float8_e4m3fn).float() * scales[:, :, None]).to(dtype)
