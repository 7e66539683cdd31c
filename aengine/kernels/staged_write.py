"""Apply many ragged writes to one flat tensor in one go."""

from __future__ import annotations

import torch
from torch import Tensor

from .dispatch import uses_triton


def apply_staged_writes(target: Tensor, starts: Tensor, lengths: Tensor, values: Tensor) -> None:
    """Set ``target[starts[i] : starts[i] + lengths[i]]`` to the i-th run of ``values``, for all i; runs must not
    overlap.

    Args:
        target: int32 [size]
        starts, lengths: int64 [k]
        values: int32 [sum(lengths)], run after run
    """
    assert target.dtype == values.dtype == torch.int32 and target.dim() == values.dim() == 1
    assert starts.dtype == lengths.dtype == torch.int64 and starts.shape == lengths.shape
    if uses_triton(target):
        from .triton import staged_write as triton_op

        return triton_op.apply_staged_writes(target, starts, lengths, values)
    run_begin = lengths.cumsum(0) - lengths  # place in ``values`` at which run i begins
    shift = (starts - run_begin).repeat_interleave(lengths, output_size=values.shape[0])
    target.index_copy_(0, torch.arange(values.shape[0]) + shift, values)  # one copy writes all runs
    return None
