"""Repetition, frequency and presence penalties, from the tokens in a request's row.

x' = x / repetition if x > 0 else x * repetition      tokens of prompt or completion (Keskar et al. 2019,
                                                      https://arxiv.org/abs/1909.05858)
x'' = x' - frequency * count - presence * (count > 0)    count: how often it is in the completion
"""

from __future__ import annotations

import torch
from torch import Tensor

from .seat import no_body

__all__ = ["apply_penalties", "count_tokens"]


def count_tokens(counts: Tensor, token_ids: Tensor) -> None:
    """counts int32 [vocab_size] = how often each id is in token_ids int32 [m], 0 <= id < vocab_size."""
    assert counts.dtype == torch.int32 and counts.dim() == token_ids.dim() == 1
    if counts.device.type != "cpu":
        raise no_body("count_tokens", counts)
    counts.zero_()
    counts.index_add_(0, token_ids, torch.ones_like(token_ids, dtype=torch.int32))


def apply_penalties(
    logits: Tensor,
    batch_rows: Tensor,
    token_ids: Tensor,
    num_tokens: Tensor,
    counts: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
) -> None:
    """In place, on the rows of logits [n, vocab_size] that ``batch_rows`` int64 [r] names.

    Only the tokens that occur are touched: r * m elements instead of r * vocab_size.

    Args:
        token_ids: int32 [r, m]: prompt and completion of each row; the tail past num_tokens [r] is ignored
        counts: int32 [r, m]: how often the completion has token_ids[i, j]
        repetition, frequency, presence: float32 [r]
    """
    assert token_ids.shape == counts.shape and batch_rows.shape == num_tokens.shape == repetition.shape
    if logits.device.type != "cpu":
        raise no_body("apply_penalties", logits)
    used = torch.arange(token_ids.shape[1]) < num_tokens[:, None]
    # A token that occurs twice is read and written twice, with the same value; so is, in place of a tail, the first.
    ids = torch.where(used, token_ids, token_ids[:, :1]).long()
    counts = torch.where(used, counts, counts[:, :1])
    rows = batch_rows[:, None]
    x = logits[rows, ids]
    factor = repetition[:, None]
    x = torch.where(x > 0, x / factor, x * factor)
    x -= frequency[:, None] * counts + presence[:, None] * (counts > 0)
    logits[rows, ids] = x
