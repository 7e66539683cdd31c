"""The layout of a decode plan: its columns, how finely keys are cut, memory for the parts."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

import torch

__all__ = ["PLAN_COLUMNS", "BatchSize", "DecodeWorkspace", "Sharing"]


class BatchSize(Enum):
    """The most (sequence, key-value head) pairs of each size; their number decides what the time is spent on."""

    SMALL = 64
    """Each pair has a multiprocessor for itself: latency, and putting parts together costs more than keys."""
    MIDDLING = 512
    LARGE = 2**31
    """There are more programs than fit on the GPU at once."""


class Sharing(NamedTuple):
    """The least keys that are worth a program, and how many more items than sequences there may be."""

    least_chunk: int
    max_extra: int


_SHARING = {BatchSize.SMALL: (256, 528), BatchSize.MIDDLING: (128, 1056), BatchSize.LARGE: (128, 2112)}
"""Least chunk, and how many more programs than pairs there are at most: 4, 8 and 16 for each multiprocessor of an H200.
Measured there; in large batches the programs are small, and a long sequence is to be no longer than the others."""


PLAN_COLUMNS = 8
"""An item's sequence (-1: none), its row and length, begin and end of the item's keys, the sequence's first item and
how many it has. A sector of memory, so that a program gets all of it in one read."""


class DecodeWorkspace:
    """Memory for parts of the softmax and for counting them; one for all layers, as they run one after the other."""

    def __init__(self, max_num_seqs: int, num_heads: int, num_kv_heads: int, head_dim: int, device: torch.device):
        padded = max(16, 1 << (head_dim - 1).bit_length())
        self._num_kv_heads = num_kv_heads
        num_items = max_num_seqs + max(-(-programs // num_kv_heads) for _, programs in _SHARING.values())
        self.parts = torch.empty(num_items * num_heads * (padded + 2), dtype=torch.float32, device=device)
        self.counters = torch.zeros(max_num_seqs * num_kv_heads, dtype=torch.int32, device=device)  # left at zero

    def batch_size(self, num_seqs: int) -> BatchSize:
        return next(size for size in BatchSize if num_seqs * self._num_kv_heads <= size.value)

    def sharing(self, num_seqs: int) -> Sharing:
        least_chunk, programs = _SHARING[self.batch_size(num_seqs)]
        return Sharing(least_chunk, -(-programs // self._num_kv_heads))
