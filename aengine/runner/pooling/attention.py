"""Attention of encoders: every token of a text sees all others of it, or those within reach."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .batch import EncoderBatch, PaddedTexts


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    batch: EncoderBatch,
    *,
    reach: int | None = None,
    biases: Sequence[Tensor] | None = None,
) -> Tensor:
    """Return [num_tokens, num_heads * head_dim] for q, k, v [num_tokens, num_heads, head_dim], scaled by head_dim **
    -0.5.

    ``reach``: how many tokens to either side a query sees; None: all. ``biases``: of each group, float
    [num_heads, length, length], added to the scores.
    """
    if batch.is_compiled and biases is None and q.shape[2] % 16 == 0:
        from ...kernels.cpu.ops import attend_both_sides

        return attend_both_sides(q, k, v, batch.positions, batch.texts, batch.begins, batch.token_counts, reach)
    parts = []
    for i, group in enumerate(batch.groups):
        mask = _mask(group, q.device, reach, None if biases is None else biases[i].to(q.dtype))
        own = [_padded(x[group.begin : group.end], group).transpose(1, 2) for x in (q, k, v)]
        out = F.scaled_dot_product_attention(own[0], own[1], own[2], attn_mask=mask)
        out = out.transpose(1, 2).flatten(2).flatten(0, 1)
        parts.append(out if group.places is None else out.index_select(0, group.places))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _padded(x: Tensor, group: PaddedTexts) -> Tensor:
    """Return [num_texts, length, num_heads, head_dim] for the group's tokens."""
    if group.places is not None:
        x = x.new_zeros((group.num_texts * group.length, *x.shape[1:])).index_copy_(0, group.places, x)
    return x.unflatten(0, (group.num_texts, group.length))


def _mask(group: PaddedTexts, device: torch.device, reach: int | None, bias: Tensor | None) -> Tensor | None:
    """Return what is added to the scores, or bool: which token sees which; None: all see all."""
    mask = group.mask
    if reach is not None and group.length > reach + 1:
        places = torch.arange(group.length, device=device)
        near = (places[None, :] - places[:, None]).abs() <= reach
        mask = near if mask is None else mask & near
    if bias is None:
        return mask
    return bias if mask is None else torch.where(mask, bias, -torch.inf)
