"""Add to, or ban, single tokens of single rows; ragged: one entry an (index, token) pair."""

from __future__ import annotations

import torch
from torch import Tensor

from .seat import no_body

__all__ = ["add_bias", "ban_tokens"]


def add_bias(logits: Tensor, rows: Tensor, token_ids: Tensor, values: Tensor) -> None:
    """``logits[rows[i], token_ids[i]] += values[i]`` in place; rows, token_ids int64 [m], values float32 [m]."""
    assert rows.shape == token_ids.shape == values.shape
    if logits.device.type != "cpu":
        raise no_body("add_bias", logits)
    logits.index_put_((rows, token_ids), values, accumulate=True)


def ban_tokens(logits: Tensor, rows: Tensor, token_ids: Tensor) -> None:
    """``logits[rows[i], token_ids[i]] = -inf`` in place; rows, token_ids int64 [m]."""
    assert rows.shape == token_ids.shape
    if logits.device.type != "cpu":
        raise no_body("ban_tokens", logits)
    logits.index_put_((rows, token_ids), torch.tensor(-torch.inf))
