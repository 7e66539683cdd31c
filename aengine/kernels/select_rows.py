"""Copy rows of a table for a batch that may be padded: padding gets zeros."""

from __future__ import annotations

import torch
from torch import Tensor

from .dispatch import uses_triton


def select_rows(table: Tensor, rows: Tensor) -> Tensor:
    """Return int32 [n, words]: the rows int64 [n] of table int32 [R, words]; zeros for padding, rows of -1."""
    assert table.dtype == torch.int32 and rows.dtype == torch.int64 and rows.dim() == 1
    if uses_triton(table):
        from .triton import select_rows as triton_op

        return triton_op.select_rows(table, rows)
    return table.index_select(0, rows.clamp(min=0)) * (rows >= 0)[:, None]
