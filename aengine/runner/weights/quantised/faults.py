"""What is wrong with one tensor of a quantised matrix, in words that follow its name; "" if nothing is.

Each is the ``fault`` of a `StoredTensor`: asked as the tensor comes, before it lies among those of other matrices, so
that an error names the tensor itself.
"""

from __future__ import annotations

import torch
from torch import Tensor


def of_scale(scale: Tensor) -> str:
    size = scale.float()
    good = bool(((size >= 0) & (size < torch.inf)).all())
    return "" if good else "has a scale that is negative, infinite or no number"


def of_divisor(scale: Tensor) -> str:
    """Return what is wrong with a scale to divide by."""
    return of_scale(scale) or ("" if bool((scale != 0).all()) else "has a scale of 0, by which others are divided")


def of_exponents(scale: Tensor) -> str:
    """Return what is wrong with scales in E8M0, as uint8."""
    return "has a scale that is no number (255)" if bool((scale == 255).any()) else ""


def of_fp8(codes: Tensor) -> str:
    """Return what is wrong with codes in float8_e4m3fn."""
    return "has a code in FP8 that is no number" if bool((codes.view(torch.uint8) & 0x7F == 0x7F).any()) else ""


def of_groups(g_idx: Tensor, num_groups: int) -> str:
    """Return what is wrong with the group of each column, where act-order has mixed them."""
    good = bool(((g_idx >= 0) & (g_idx < num_groups)).all())
    return "" if good else f"names a group that is none of the {num_groups}"


def of_middle(zeros: Tensor, word: int, said: str) -> str:
    """Return what is wrong with zeros in words: each is ``word``, one of `middle_word`, as the config has ``said``."""
    good = bool((zeros == word).all())
    return "" if good else f"has zeros that are not symmetric, and the quantization_config says {said}"


def middle_word(bits: int, less: int = 0) -> int:
    """An int32 word of codes, each the middle of all, ``less`` so many."""
    codes = ((1 << bits - 1) - less) * (17 if bits == 4 else 1)
    return int.from_bytes(bytes([codes]) * 4, "little", signed=True)


def of_order(g_idx: Tensor) -> str:
    """Return what is wrong with the group of each column, or a rank's part of them, where these are in order."""
    return "" if is_in_order(g_idx) else "has an order of columns, and by the quantization_config there is none"


def is_in_order(g_idx: Tensor) -> bool:
    """Return whether the columns' groups are neighbours of one size. All -1 is compressed-tensors' for no order."""
    steps = g_idx.long() - (g_idx.min() if len(g_idx) else 0)
    size = max(1, int((steps == 0).sum()))
    return torch.equal(steps, torch.arange(len(steps), device=steps.device) // size)
