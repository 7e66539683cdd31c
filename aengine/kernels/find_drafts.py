"""Drafts found in the rows themselves: the tokens that came after a row's last three where these occurred before."""

from __future__ import annotations

import torch
from torch import Tensor

from .dispatch import uses_triton

N = 3
"""Tokens that are looked up."""


def find_drafts(token_ids: Tensor, num_tokens: Tensor, rows: Tensor, counts: Tensor, most: int) -> None:
    """Write ``counts[i]`` drafts behind the tokens of row ``rows[i]``: those that followed its last N tokens where they
    occurred before, the last time; a text that goes on into itself is taken to repeat. Where they did not, the last
    token is drafted again and again: something has to be computed there.

    Args:
        token_ids: int32 [max_num_seqs, max_model_len]
        num_tokens: int32 [max_num_seqs], each at least 1
        rows: int64 [n]
        counts: int64 [n]; there is room for so many
        most: the largest of ``counts``, or more
    """
    assert rows.dtype == counts.dtype == torch.int64 and rows.shape == counts.shape
    if uses_triton(token_ids):
        from .triton import find_drafts as triton_op

        return triton_op.find_drafts(token_ids, num_tokens, rows, counts, most)
    for row, count in zip(rows.tolist(), counts.tolist(), strict=True):
        end = int(num_tokens[row])
        known = token_ids[row, :end]
        source = end - 1  # where the drafts are copied from
        if end > N:
            found = (known[:-1].unfold(0, N, 1) == known[-N:]).all(1).nonzero()
            source = int(found[-1]) + N if len(found) else source
        place = torch.arange(count) % (end - source)
        token_ids[row, end : end + count] = known[source + place]
    return None
