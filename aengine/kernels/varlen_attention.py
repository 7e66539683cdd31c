"""Causal attention of many sequences with any number of new tokens each, over the paged KV cache, in one launch.

The i-th of a sequence's new tokens is at position seq_len - query_len + i and attends to all positions up to its own;
with a window of w to the last w of them. Keys and values of the new tokens are in the cache already.
Dao 2023, https://arxiv.org/abs/2307.08691.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .dispatch import uses_triton
from .paged_attention import PromptLayers, Scores, prefill_attention


def plan_prompts(
    rows: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    num_tokens: int,
    layers: PromptLayers,
    *,
    skip_single: bool,
) -> Tensor:
    """Plan how the queries of a batch, and the keys that they see, are cut: the ``plan`` of `varlen_attention`.

    Between it and the attention there must be a kernel that is not launched ahead of its predecessor's end, as for
    `plan_decode`.

    Args:
        rows: int64 [n]; seq_lens: int32 [n]
        query_start_loc: int32 [n + 1], up to num_tokens; sequences without tokens are left out
        skip_single: sequences of one new token are left out too; their place in the result is not written
    """
    assert rows.shape == seq_lens.shape and query_start_loc.shape[0] == rows.shape[0] + 1
    if uses_triton(rows):
        from .triton import varlen_attention as triton_op

        return triton_op.plan_prompts(rows, query_start_loc, seq_lens, num_tokens, layers, skip_single)
    return facts_of(rows, query_start_loc, seq_lens, skip_single=skip_single)


def facts_of(rows: Tensor, query_start_loc: Tensor, seq_lens: Tensor, *, skip_single: bool) -> Tensor:
    """Row, first token, query and sequence length of the sequences that have new tokens: the plan without Triton."""
    query_lens = query_start_loc.diff()
    facts = torch.stack((rows.int(), query_start_loc[:-1], query_lens, seq_lens), 1)
    return facts[query_lens > int(skip_single)]


def varlen_attention(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    plan: Tensor,
    num_seqs: int,
    how: Scores,
    kv_scales: Tensor | None = None,
    new_kv: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """[num_tokens, num_heads * head_dim], in q's dtype.

    Args:
        q: [num_tokens, num_heads, head_dim], rotated by position; strided by token
        kv_cache: [num_blocks, block_size, 2, num_kv_heads, head_dim], any strides but the last
        block_table: int32 [max_num_seqs, width], by row
        plan: of these sequences and for such layers, `plan_prompts`; num_seqs: how many they are
        kv_scales: of a cache in FP8, see kv_codes.py
        new_kv: keys and values of the new tokens as the cache has them, [num_tokens, num_kv_heads, head_dim], strided
            by token; they may be read instead
    """
    assert q.stride(2) == 1 and q.stride(1) == q.shape[2] and kv_cache.stride(4) == 1
    if uses_triton(q):
        from .triton import varlen_attention as triton_op

        return triton_op.varlen_attention(q, kv_cache, block_table, plan, num_seqs, how, kv_scales, new_kv)
    out = torch.zeros((q.shape[0], q.shape[1] * q.shape[2]), dtype=q.dtype)
    block_size = kv_cache.shape[1]
    for row, start, query_len, seq_len in plan.tolist():
        blocks = block_table[row, : -(-seq_len // block_size)].long()
        kv = kv_cache.index_select(0, blocks).flatten(0, 1)[seq_len - query_len : seq_len]
        own = q[start : start + query_len]
        out[start : start + query_len] = prefill_attention(own, kv, kv_cache, blocks, seq_len, how, kv_scales)
    return out
