"""Repetition, frequency and presence penalties, from the tokens in a request's row.

x' = x / repetition if x > 0 else x * repetition      tokens of prompt or completion (Keskar et al. 2019,
                                                      https://arxiv.org/abs/1909.05858)
x'' = x' - frequency * count - presence * (count > 0)    count: how often it is in the completion
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .dispatch import uses_triton

__all__ = ["PenaltyInputs", "apply_penalties", "count_sampled", "count_tokens", "penalize"]


@dataclass(slots=True)
class PenaltyInputs:
    """Inputs of the penalties of a batch of n rows; the tables hold all R rows that there are."""

    rows: Tensor  # int64 [n]: row of the tables
    token_ids: Tensor  # int32 [R, max_model_len]: prompt and completion; the tail past num_tokens is ignored
    counts: Tensor  # int32 [R, vocab_size]: how often each id is in the completion
    num_tokens: Tensor  # int32 [n], > 0
    repetition: Tensor  # float32 [n]
    frequency: Tensor  # float32 [n]
    presence: Tensor  # float32 [n]
    max_num_tokens: int  # the largest of num_tokens, or more


def count_tokens(counts: Tensor, token_ids: Tensor) -> None:
    """counts int32 [vocab_size] = how often each id is in token_ids int32 [m], 0 <= id < vocab_size."""
    assert counts.dtype == torch.int32 and counts.dim() == token_ids.dim() == 1
    counts.zero_()
    if uses_triton(counts):
        from .triton import penalties as triton_op

        return triton_op.add_counts(counts, token_ids)
    counts.index_add_(0, token_ids, torch.ones_like(token_ids, dtype=torch.int32))
    return None


def count_sampled(counts: Tensor, rows: Tensor, sampled: Tensor, batch_rows: Tensor) -> None:
    """``counts[rows[b], sampled[b]] += 1`` for the rows b of the batch that ``batch_rows`` int64 [r] names.

    counts int32 [R, vocab_size]; rows, sampled int64 [n]; no row of counts twice.
    """
    assert counts.dtype == torch.int32 and rows.shape == sampled.shape
    if uses_triton(counts):
        from .triton import penalties as triton_op

        return triton_op.count_sampled(counts, rows, sampled, batch_rows)
    place = (rows.index_select(0, batch_rows), sampled.index_select(0, batch_rows))
    counts.index_put_(place, torch.ones(len(batch_rows), dtype=torch.int32), accumulate=True)
    return None


def apply_penalties(logits: Tensor, batch_rows: Tensor, inputs: PenaltyInputs) -> None:
    """Apply in place to the rows ``batch_rows`` (int64 [r], distinct) of ``logits`` (float32 [n, vocab_size]).

    Only the tokens that occur are touched: r * max_num_tokens elements instead of r * vocab_size.
    """
    assert inputs.rows.shape == inputs.num_tokens.shape == inputs.repetition.shape == logits.shape[:1]
    if uses_triton(logits):
        from .triton import penalties as triton_op

        return triton_op.apply_penalties(logits, batch_rows, inputs)
    penalize(logits, batch_rows, inputs)
    return None


def penalize(logits: Tensor, batch_rows: Tensor, inputs: PenaltyInputs) -> None:
    """The reference."""
    table_rows = inputs.rows.index_select(0, batch_rows)
    token_ids = inputs.token_ids[:, : inputs.max_num_tokens].index_select(0, table_rows)
    used = torch.arange(token_ids.shape[1]) < inputs.num_tokens[batch_rows, None]
    # A token that occurs twice is read and written twice, with the same value; so is, in place of a tail, the first.
    ids = torch.where(used, token_ids, token_ids[:, :1]).long()
    counts = inputs.counts[table_rows[:, None], ids]
    rows = batch_rows[:, None]
    x = logits[rows, ids]
    factor = inputs.repetition[batch_rows, None]
    x = torch.where(x > 0, x / factor, x * factor)
    x -= inputs.frequency[batch_rows, None] * counts + inputs.presence[batch_rows, None] * (counts > 0)
    logits[rows, ids] = x
