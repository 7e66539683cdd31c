"""Rotary position embedding: elements i and i + head_dim / 2 of a head are rotated by position * inv_freq[i]."""

from __future__ import annotations

from torch import Tensor

from .dispatch import cpu_only

__all__ = ["apply_rotary", "rotary_rows"]


def rotary_rows(positions: Tensor, inv_freq: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """cos and sin, float32 [num_tokens, 1, head_dim], for int64 [num_tokens] positions. Once a step for all layers.

    sin has its first half negated, so that turning is ``x * cos + roll(x, head_dim / 2) * sin``.
    """
    angles = positions[:, None].to(inv_freq.dtype) * inv_freq
    cos, sin = angles.cos().mul_(factor), angles.sin().mul_(factor)
    return _two_halves(cos, cos), _two_halves(-sin, sin)


def _two_halves(first: Tensor, second: Tensor) -> Tensor:
    rows, half = first.shape
    both = first.new_empty(rows, 1, 2 * half)
    both[:, 0, :half] = first
    both[:, 0, half:] = second
    return both


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Turn x [num_tokens, num_heads, head_dim] in place; cos and sin as `rotary_rows` gives them."""
    assert x.dim() == 3 and cos.shape == (x.shape[0], 1, x.shape[2]), f"{tuple(x.shape)} by {tuple(cos.shape)}"
    if x.device.type != "cpu":
        raise cpu_only("apply_rotary", x)
    rotated = x.roll(x.shape[2] // 2, -1)
    x.mul_(cos).addcmul_(rotated, sin)
