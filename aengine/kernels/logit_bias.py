"""Biases of single tokens, and tokens that are banned for a while: lists of uneven length, one table row a request.

      word 0      1           2          HEADER              HEADER + MOST_BIASES       HEADER + 2 * MOST_BIASES
    ┌──────────┬────────────┬──────────┬───┬───────────────┬──────────────────────────┬────────────────┐
    │ number   │ number of  │ banned   │ 0 │ token ids     │ their biases, bits of    │ banned token   │   int32
    │ of biases│ banned ids │ until    │   │ that have one │ float32                  │ ids            │
    └──────────┴────────────┴──────────┴───┴───────────────┴──────────────────────────┴────────────────┘

A token is banned as long as the row has fewer than "banned until" tokens, prompt and completion together.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .dispatch import uses_triton

HEADER = 4
MOST_BIASES = 1024
MOST_BANNED = 2048  # stop_token_ids, and those that end any completion
WIDTH = HEADER + 2 * MOST_BIASES + MOST_BANNED


def pack_lists(
    bias_ids: Sequence[int], bias_values: Sequence[float], banned_ids: Sequence[int], banned_until: int
) -> list[tuple[int, npt.NDArray[np.int32]]]:
    """Pack what a row of the table holds, as (column, values) of its parts. Token ids are distinct in each list."""
    assert len(bias_ids) == len(bias_values) <= MOST_BIASES and len(banned_ids) <= MOST_BANNED
    header = np.array([len(bias_ids), len(banned_ids), min(banned_until, 2**31 - 1), 0], dtype=np.int32)
    return [
        (0, header),
        (HEADER, np.array(bias_ids, dtype=np.int32)),
        (HEADER + MOST_BIASES, np.array(bias_values, dtype=np.float32).view(np.int32)),
        (HEADER + 2 * MOST_BIASES, np.array(banned_ids, dtype=np.int32)),
    ]


def apply_lists(logits: Tensor, rows: Tensor, lists: Tensor, num_tokens: Tensor) -> None:
    """Add the biases to logits float32 [n, vocab_size], in place, and set banned ones to -inf.

    Args:
        rows: int64 [n], row of the table; -1: padding
        lists: int32 [R, WIDTH]
        num_tokens: int32 [n], how many the row has
    """
    assert lists.dtype == torch.int32 and lists.shape[1] == WIDTH
    assert rows.shape == num_tokens.shape == logits.shape[:1]
    if uses_triton(logits):
        from .triton import logit_bias as triton_op

        return triton_op.apply_lists(logits, rows, lists, num_tokens, HEADER, MOST_BIASES)
    for i, row in enumerate(rows.tolist()):
        if row < 0:
            continue
        own = lists[row]
        num_biases, num_banned, until = own[:3].tolist()
        if num_biases:
            values = own[HEADER + MOST_BIASES :][:num_biases].view(torch.float32)
            logits[i, own[HEADER:][:num_biases].long()] += values
        if num_banned and num_tokens[i] < until:
            logits[i, own[HEADER + 2 * MOST_BIASES :][:num_banned].long()] = -torch.inf
    return None
