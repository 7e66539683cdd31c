"""Causal attention of many sequences with any number of new tokens each, over the paged KV cache, in one launch.

The i-th of a sequence's new tokens is at position seq_len - query_len + i and attends to all positions up to its own;
with a window of w to the last w of them. Keys and values of the new tokens are in the cache already.
Dao 2023, https://arxiv.org/abs/2307.08691.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .paged_attention import prefill_attention
from .seat import uses_triton

__all__ = ["varlen_attention"]


def varlen_attention(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    rows: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    scale: float,
    window: int | None,
    *,
    skip_single: bool = False,
) -> Tensor:
    """[num_tokens, num_heads * head_dim], in q's dtype.

    Args:
        q: [num_tokens, num_heads, head_dim], turned by position; strided by token
        kv_cache: [num_blocks, block_size, 2, num_kv_heads, head_dim], any strides but the last
        block_table: int32 [max_num_seqs, width], by row
        rows: int64 [n]; seq_lens: int32 [n]
        query_start_loc: int32 [n + 1]; sequences without tokens are left out
        skip_single: sequences of one new token are left out too; their place in the result is not written
    """
    assert rows.shape == seq_lens.shape and query_start_loc.shape[0] == rows.shape[0] + 1
    assert q.stride(2) == 1 and q.stride(1) == q.shape[2] and kv_cache.stride(4) == 1
    if uses_triton(q):
        from .bodies import varlen_attention as body

        batch = (block_table, rows, query_start_loc, seq_lens)
        return body.varlen_attention(q, kv_cache, *batch, scale, window, skip_single)
    out = torch.zeros((q.shape[0], q.shape[1] * q.shape[2]), dtype=q.dtype)
    block_size = kv_cache.shape[1]
    for i, row in enumerate(rows.tolist()):
        start, stop, seq_len = int(query_start_loc[i]), int(query_start_loc[i + 1]), int(seq_lens[i])
        if stop > start + skip_single:
            blocks = block_table[row, : -(-seq_len // block_size)].long()
            kv = kv_cache.index_select(0, blocks).flatten(0, 1)[seq_len - (stop - start) : seq_len]
            out[start:stop] = prefill_attention(q[start:stop], kv, kv_cache, blocks, seq_len, scale, window)
    return out
