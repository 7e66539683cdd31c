"""The end of a step in which rows have drafts: how many of them are accepted, on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from .dispatch import uses_triton
from .step_inputs import ScalarColumns


def following_drafts(token_ids: Tensor, num_tokens: Tensor, rows: Tensor, places: Tensor) -> Tensor:
    """Return the draft that comes after each of n positions, int64 [n]; -1: none. Drafts lie in the row, behind its
    tokens.

    Args:
        token_ids: int32 [max_num_seqs, max_model_len]
        num_tokens: int32 [max_num_seqs], drafts not included
        rows: int64 [n]; the positions of a row follow each other; -1: padding
        places: int64 [n], drafts of the row before each position
    """
    has_next = torch.zeros_like(rows, dtype=torch.bool)
    has_next[:-1] = (rows[1:] == rows[:-1]) & (rows[1:] >= 0)
    own = rows.clamp(min=0)
    at = (num_tokens.index_select(0, own).long() + places).clamp_(max=token_ids.shape[1] - 1)
    return torch.where(has_next, token_ids[own, at].long(), -1)


def commit_drafts(
    token_ids: Tensor,
    scalars: Tensor,
    columns: ScalarColumns,
    rows: Tensor,
    places: Tensor,
    sampled: Tensor,
    checks: Tensor,
    published: Tensor,
    cursor: Tensor,
) -> None:
    """Commit a step as `commit_decode` does, for rows with drafts: each gets the sampled tokens up to the first that is
    not the draft there.

    Args:
        rows, places: as in `following_drafts`
        sampled: int64 [n], after each position
        checks: float32 [n]
        published, cursor: see `commit_decode`; in place of an id that its row does not get there is -1
    """
    assert rows.shape == places.shape == sampled.shape == checks.shape and published.shape[2] >= rows.shape[0]
    assert rows.dtype == places.dtype == sampled.dtype == torch.int64
    if uses_triton(token_ids):
        from .triton import commit_drafts as triton_op

        triton_op.commit_drafts(token_ids, scalars, columns, rows, places, sampled, checks, published, cursor)
    else:
        num_tokens = scalars[:, columns.num_tokens]
        drafts = following_drafts(token_ids, num_tokens, rows, places)
        is_miss = ((drafts >= 0) & (drafts != sampled)).long()
        misses = is_miss.cumsum(0) - is_miss  # before each position, those of other rows included
        start = (torch.arange(len(rows)) - places).clamp(min=0)
        is_accepted = (rows >= 0) & (misses == misses[start])
        own, kept = rows[is_accepted], sampled[is_accepted]
        token_ids[own, num_tokens[own].long() + places[is_accepted]] = kept.int()
        num_tokens.index_add_(0, own, torch.ones_like(own, dtype=torch.int32))
        scalars[own, columns.num_computed_tokens] = num_tokens[own] - 1
        slot, n = int(cursor), rows.shape[0]
        published[slot, 0, :n] = torch.where(is_accepted, sampled, -1).int()
        published[slot, 1, :n] = checks.view(torch.int32)
    cursor.copy_((cursor + 1) % published.shape[0])
