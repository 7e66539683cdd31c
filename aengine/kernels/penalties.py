"""Repetition, frequency and presence penalties, from a table of how often each token is in a request's row.

x' = x / repetition if x > 0 else x * repetition      tokens of prompt or completion (Keskar et al. 2019,
                                                      https://arxiv.org/abs/1909.05858)
x'' = x' - frequency * count - presence * (count > 0)    count: how often it is in the completion
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .dispatch import uses_triton

IN_PROMPT = 1 << 30
"""Added to the count of a token that the prompt has."""


@dataclass(slots=True)
class PenaltyInputs:
    """Inputs of the penalties of a batch of n rows; the table holds all R rows that there are."""

    rows: Tensor  # int64 [n]: row of the table; -1: padding
    counts: Tensor  # int32 [R, vocab_size]: how often each id is in the completion, and IN_PROMPT
    repetition: Tensor  # float32 [n]
    frequency: Tensor  # float32 [n]
    presence: Tensor  # float32 [n]

    def are_penalized(self) -> Tensor:
        """Return bool [n]: the rows to which a penalty applies; only those of the table are up to date."""
        has_any = (self.repetition != 1) | (self.frequency != 0) | (self.presence != 0)
        return has_any & (self.rows >= 0)


def count_tokens(counts: Tensor, token_ids: Tensor, num_prompt_tokens: int) -> None:
    """Set counts int32 [vocab_size] to those of token_ids int32 [m], 0 <= id < vocab_size: prompt, then completion."""
    assert counts.dtype == torch.int32 and counts.dim() == token_ids.dim() == 1
    counts.zero_()
    if uses_triton(counts):
        from .triton import penalties as triton_op

        return triton_op.add_counts(counts, token_ids, num_prompt_tokens)
    completion = token_ids[num_prompt_tokens:]
    counts.index_add_(0, completion, torch.ones_like(completion))
    counts[token_ids[:num_prompt_tokens].unique()] += IN_PROMPT
    return None


def count_sampled(sampled: Tensor, inputs: PenaltyInputs) -> None:
    """Count the tokens int64 [n] that the rows have got, for those that are penalized; no row of the table twice."""
    assert inputs.counts.dtype == torch.int32 and inputs.rows.shape == sampled.shape
    if uses_triton(inputs.counts):
        from .triton import penalties as triton_op

        return triton_op.count_sampled(sampled, inputs)
    chosen = inputs.are_penalized()
    inputs.counts[inputs.rows[chosen], sampled[chosen]] += 1
    return None


def apply_penalties(logits: Tensor, inputs: PenaltyInputs) -> None:
    """Apply in place to logits float32 [n, vocab_size]. Only those of tokens that occur are read and written."""
    assert inputs.rows.shape == inputs.repetition.shape == logits.shape[:1]
    assert inputs.counts.shape[1] == logits.shape[1]
    if uses_triton(logits):
        from .triton import penalties as triton_op

        return triton_op.apply_penalties(logits, inputs)
    for i in inputs.are_penalized().nonzero()[:, 0].tolist():
        counts = inputs.counts[inputs.rows[i]]
        ids = counts.nonzero()[:, 0]
        count = counts[ids] & (IN_PROMPT - 1)
        x, factor = logits[i, ids], inputs.repetition[i]
        x = torch.where(x > 0, x / factor, x * factor)
        x -= inputs.frequency[i] * count + inputs.presence[i] * (count > 0)
        logits[i, ids] = x
    return None
