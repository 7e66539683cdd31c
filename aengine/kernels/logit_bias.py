"""Add to, or ban, single tokens of single rows; ragged: one entry an (index, token) pair."""

from __future__ import annotations

import torch
from torch import Tensor

from .dispatch import uses_triton

__all__ = ["add_bias", "add_pairs", "ban_pairs", "ban_tokens"]


def add_bias(logits: Tensor, rows: Tensor, token_ids: Tensor, values: Tensor) -> None:
    """``logits[rows[i], token_ids[i]] += values[i]`` in place; rows, token_ids int64 [m], values float32 [m]."""
    assert rows.shape == token_ids.shape == values.shape
    if uses_triton(logits):
        from .triton import logit_bias as triton_op

        return triton_op.add_bias(logits, rows, token_ids, values)
    add_pairs(logits, rows, token_ids, values)
    return None


def add_pairs(logits: Tensor, rows: Tensor, token_ids: Tensor, values: Tensor) -> None:
    """The reference; of a pair that comes twice, both values are added."""
    logits.index_put_((rows, token_ids), values, accumulate=True)


def ban_tokens(logits: Tensor, rows: Tensor, token_ids: Tensor) -> None:
    """``logits[rows[i], token_ids[i]] = -inf`` in place; rows, token_ids int64 [m]."""
    assert rows.shape == token_ids.shape
    if uses_triton(logits):
        from .triton import logit_bias as triton_op

        return triton_op.ban_tokens(logits, rows, token_ids)
    ban_pairs(logits, rows, token_ids)
    return None


def ban_pairs(logits: Tensor, rows: Tensor, token_ids: Tensor) -> None:
    """The reference."""
    logits.index_put_((rows, token_ids), torch.tensor(-torch.inf))
