"""Rotary position embedding: pairs of a head's first elements are rotated by position times the pair's frequency.

Element i goes with i + rotary_dim / 2, or, where pairs are interleaved, 2i with 2i + 1. What is past ``rotary_dim``
stays.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class HeadNorms(NamedTuple):
    """RMS norms of each head of q and k, ahead of the rotary embedding."""

    q: Tensor  # [head_dim], the weight
    k: Tensor
    eps: float


class Rope(NamedTuple):
    """A layer's rotary embedding, for the kernels."""

    table: Tensor  # float32 [num_positions, rotary_dim]: cosines, then sines
    interleaved: bool = False
    query_scale: Tensor | None = None  # float32 [num_positions], factors of q; None: 1
    shifts: Tensor | None = None  # int32 [max_num_seqs]: each row begins so many positions further down; None: 0


def rotary_rows(
    positions: Tensor, inv_freq: Tensor, factor: float, *, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Return cos and sin, float32 [num_tokens, 1, rotary_dim], for int64 [num_tokens] positions; called once a step for
    all layers.

    The sine of a pair's first element is negated, so that turning is ``x * cos + partner * sin``. inv_freq: float32
    [rotary_dim / 2], or [num_tokens, rotary_dim / 2].
    """
    angles = positions[:, None].to(inv_freq.dtype) * inv_freq
    cos, sin = angles.cos().mul_(factor), angles.sin().mul_(factor)
    return _pairs(cos, cos, interleaved), _pairs(-sin, sin, interleaved)


def _pairs(first: Tensor, second: Tensor, interleaved: bool) -> Tensor:
    rows, half = first.shape
    both = first.new_empty(rows, 1, 2 * half)
    if interleaved:
        both[:, 0, ::2] = first
        both[:, 0, 1::2] = second
    else:
        both[:, 0, :half] = first
        both[:, 0, half:] = second
    return both


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> None:
    """Turn x [num_tokens, num_heads, head_dim] in place; cos and sin as `rotary_rows` gives them. Of torch's ops on any
    device: on a GPU for encoders, as `write_qkv` turns the decoders' heads there."""
    rotary_dim = cos.shape[2]
    assert x.dim() == 3 and cos.shape[:2] == (x.shape[0], 1), f"{tuple(x.shape)} by {tuple(cos.shape)}"
    assert rotary_dim <= x.shape[2], f"{tuple(x.shape)} by {tuple(cos.shape)}"
    if rotary_dim < x.shape[2]:
        x = x[..., :rotary_dim]
    if interleaved:
        partner = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    else:
        partner = x.roll(rotary_dim // 2, -1)
    x.mul_(cos).addcmul_(partner, sin)
