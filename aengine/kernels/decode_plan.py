"""The layout of a decode plan: its columns, how finely keys are cut, memory for the parts."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

import torch


class BatchSize(Enum):
    """The most (sequence, key-value head) pairs of each size; their number decides what the time is spent on."""

    FEW = 16
    """As in small batches, and no program has many keys: it asks for more of them at once."""
    SMALL = 64
    """Each pair has a multiprocessor for itself: latency, and putting parts together costs more than keys."""
    MIDDLING = 512
    LARGE = 2**31
    """There are more programs than fit on the GPU at once."""


class Sharing(NamedTuple):
    """How the keys of a step are cut: in equal parts of about the least chunk, or, if those were too many, of a share
    of all keys."""

    least_chunk: int  # fewest keys for which a program is launched
    max_extra: int  # most items of a plan beyond one for each sequence
    is_lenient: bool  # a part may have a quarter more keys than its share, before it is cut


_SHARING = {
    BatchSize.FEW: (128, 264),
    BatchSize.SMALL: (64, 264),
    BatchSize.MIDDLING: (128, 528),
    BatchSize.LARGE: (128, 2112),
}
"""Least chunk, and about how many programs there are if the keys are many: 2 and 4 for each multiprocessor of an H200,
which are all that it runs at once; in large batches twice as many as that, so that a long sequence is no longer than
the others."""

_SHARING_OF_NARROW = 256, 132
"""The same in small batches of narrow layers, see `DecodeWorkspace.is_narrow`."""

_LARGE_PART, _KEYS_OF_LARGE_PART = 8192, 512
"""Numbers of a part (heads times their size) from which it has at least so many keys: one program puts all together,
and took some 0.7 us for each of DeepSeek's, 16 x 512 numbers, on an H100."""

GRAIN = 64
"""Chunks are a multiple of this many keys."""

PLAN_COLUMNS = 8
"""An item's sequence (-1: none), its row and length, begin and end of the item's keys, the sequence's first item and
how many it has, and its parts of keys that it reads with others (shared_prefix.py): the place of the first among all
parts, times `MOST_SHARED_PARTS`, plus how many there are. A sector of memory, so that a program gets it in one read."""

MOST_SHARED_PARTS = 256


def lanes_of(num_heads: int) -> int:
    """Return into how many parts decodes divide the heads that see one key (latent_attention.py)."""
    return num_heads // max(size for size in range(1, 17) if num_heads % size == 0)


class DecodeWorkspace:
    """Memory for parts of the softmax and for counting them; one for all layers, as they run one after the other."""

    def __init__(self, max_num_seqs: int, num_heads: int, num_kv_heads: int, head_dim: int, device: torch.device):
        padded = max(16, 1 << (head_dim - 1).bit_length())
        self.is_narrow = num_heads * head_dim < 4096
        """Whether the products around are so quick that putting parts together takes longer than a few more keys."""
        self._least_chunk = 0 if num_heads // num_kv_heads * padded < _LARGE_PART else _KEYS_OF_LARGE_PART
        self._num_kv_heads = num_kv_heads
        self._part_size = num_heads * (padded + 2)
        self.num_items = max_num_seqs + max(-(-programs // num_kv_heads) for _, programs in _SHARING.values())
        self.parts = torch.empty(self.num_items * self._part_size, dtype=torch.float32, device=device)
        self.counters = torch.zeros(max_num_seqs * num_kv_heads, dtype=torch.int32, device=device)  # left at zero

    def reserve(self, num_shared: int) -> None:
        """Have room for parts of keys that sequences read together, too, behind the others."""
        self.parts = self.parts.new_empty((self.num_items + num_shared) * self._part_size)

    def batch_size(self, num_seqs: int) -> BatchSize:
        return next(size for size in BatchSize if num_seqs * self._num_kv_heads <= size.value)

    def sharing(self, num_seqs: int) -> Sharing:
        size = self.batch_size(num_seqs)
        is_small = size in (BatchSize.FEW, BatchSize.SMALL)
        least_chunk, programs = _SHARING_OF_NARROW if is_small and self.is_narrow else _SHARING[size]
        least_chunk = max(least_chunk, self._least_chunk)
        return Sharing(least_chunk, -(-programs // self._num_kv_heads), not is_small)


class PartsWorkspace:
    """Memory like that of `DecodeWorkspace`, for parts of keys that follow from a query's position
    (invariant_attention.py)."""

    MOST_PARTS = 16
    """Most parts of the keys that a query sees. A window may begin and end within one, and has one more."""

    def __init__(self, max_queries: int, num_heads: int, num_kv_heads: int, head_dim: int, device: torch.device):
        padded = max(16, 1 << (head_dim - 1).bit_length())
        num_numbers = max_queries * (self.MOST_PARTS + 1) * num_heads * (padded + 2)
        self.parts = torch.empty(num_numbers, dtype=torch.float32, device=device)
        self.counters = torch.zeros(max_queries * num_kv_heads, dtype=torch.int32, device=device)  # left at zero
