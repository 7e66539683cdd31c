"""Attention of sequences with one new token each, from the raw product of its q, k and v on, in one launch.

    qkv ─ (norm of q, k head by head) ─ rotary at position seq_len - 1 ─┬─ k, v into their slot of the cache
                                                                        └─ q over keys 0 .. seq_len - 1, softmax, v

Split KV: a sequence's keys are cut into chunks, each a program's, and the last program to end puts the parts together
(Dao et al. 2023, flash decoding, https://pytorch.org/blog/flash-decoding/), in the order of the chunks, so that the
same batch gives the same bits. How long a chunk is follows from all sequences together (`plan_decode`), on the device
and once for all layers: the chunks that there are then fill the GPU evenly, be the lengths alike or not.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

from .dispatch import uses_triton
from .paged_attention import decode_attention as attend_on_cpu

__all__ = ["PLAN_COLUMNS", "BatchSize", "DecodeWorkspace", "Sharing", "decode_step_attention", "plan_decode"]


class BatchSize(Enum):
    """By the number of (sequence, key-value head) pairs, which decides what the time is spent on."""

    SMALL = (
        64  # at most; each has a multiprocessor for itself: latency, and putting parts together costs more than keys
    )
    MIDDLING = 512
    LARGE = 2**31  # there are more programs than fit on the GPU at once


class Sharing(NamedTuple):
    """The least keys that are worth a program, and how many more items than sequences there may be."""

    least_chunk: int
    max_extra: int


_SHARING = {BatchSize.SMALL: (256, 528), BatchSize.MIDDLING: (128, 1056), BatchSize.LARGE: (128, 2112)}
"""Least chunk, and how many more programs than pairs there are at most: 4, 8 and 16 for each multiprocessor of an H200.
Measured there; in large batches the programs are small, and a long sequence is to be no longer than the others."""


PLAN_COLUMNS = 8
"""Of an item: sequence (-1: none), its row and length, begin and end of the item's keys, the sequence's first item and
how many it has. A sector of memory, so that a program learns all of it in one read."""


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


def plan_decode(rows: Tensor, seq_lens: Tensor, workspace: DecodeWorkspace) -> Tensor:
    """How the keys of n sequences are shared out: int32 [n + max_extra, PLAN_COLUMNS].

    rows: int64 [n]; seq_lens: int32 [n], those of length 0 get one item, which does nothing. Between it and the
    attention there must be a kernel that is not launched ahead of its predecessor's end (in a step: the lookup of the
    embeddings), as the attention reads the plan before it waits (triton/launch.py).
    """
    assert seq_lens.dtype == torch.int32 and seq_lens.dim() == 1 and rows.shape == seq_lens.shape
    least, extra = workspace.sharing(len(seq_lens))
    if uses_triton(seq_lens):
        from .triton import decode_plan as body

        return body.plan_decode(rows, seq_lens, Sharing(least, extra))
    lens = seq_lens.long()
    share = -(-int(lens.sum()) // extra)
    chunk = max(least, -(-share // least) * least)
    counts = (-(-lens // chunk)).clamp(min=1)
    seq = torch.arange(len(lens)).repeat_interleave(counts)
    first = (counts.cumsum(0) - counts)[seq]
    begin = (torch.arange(len(seq)) - first) * chunk
    plan = torch.full((len(lens) + extra, PLAN_COLUMNS), -1, dtype=torch.int32)
    columns = (seq, rows[seq], lens[seq], begin, torch.minimum(begin + chunk, lens[seq]), first, counts[seq])
    plan[: len(seq), :7] = torch.stack(columns, 1).int()
    return plan


def decode_step_attention(
    qkv: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    rope: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    num_heads: int,
    scale: float,
    window: int | None,
    plan: Tensor,
    workspace: DecodeWorkspace,
    *,
    is_raw: bool = True,
    out: Tensor | None = None,
) -> Tensor:
    """[n, num_heads * head_dim], in qkv's dtype.

    Args:
        qkv: [n, (num_heads + 2 * num_kv_heads) * head_dim], contiguous rows; q heads, k heads, v heads.
        kv_cache: [num_blocks, block_size, 2, num_kv_heads, head_dim], any strides but the last.
        block_table: int32 [max_num_seqs, width], by row.
        rope: float32 [num_positions, head_dim]: cosines, then sines.
        q_norm, k_norm: [head_dim], or None.
        window: tokens that a query looks back on, itself included.
        plan: of the sequences, lengths with the new token; of length 0 are those that pad: they get zeros, and write
            nothing.
        is_raw: False if q and k are turned, and k and v in the cache, already.
        out: where to put the rows that are not padding, [>= n, num_heads * head_dim]; None: a new tensor.
    """
    n, width = qkv.shape
    num_kv_heads, head_dim = kv_cache.shape[3:]
    assert width == (num_heads + 2 * num_kv_heads) * head_dim and qkv.stride(1) == 1 and kv_cache.stride(4) == 1
    assert rope.shape[1] == head_dim
    if uses_triton(qkv):
        from .triton import decode_attention as body

        return body.decode_step_attention(
            qkv,
            kv_cache,
            block_table,
            rope,
            (q_norm, k_norm, eps),
            num_heads,
            scale,
            window,
            plan,
            workspace,
            is_raw,
            out,
        )
    from .write_qkv import turn_and_write

    if out is None:
        out = torch.zeros((n, num_heads * head_dim), dtype=qkv.dtype)
    first = plan[(plan[:, 3] == 0) & (plan[:, 2] > 0)]  # of each sequence that is no padding
    real, lens = first[:, 0].long(), first[:, 2]
    own, table = qkv[real], block_table[first[:, 1].long()]
    if is_raw:
        positions = lens.long() - 1
        block_size = kv_cache.shape[1]
        blocks = table.gather(1, (positions // block_size)[:, None]).squeeze(1).long()
        slots = blocks * block_size + positions % block_size
        turn_and_write(own, positions, slots, rope, q_norm, k_norm, eps, num_heads, kv_cache)
    q = own[:, : num_heads * head_dim].view(-1, num_heads, head_dim)
    out[real] = attend_on_cpu(q, kv_cache, table.long(), lens.tolist(), scale, window)
    return out
