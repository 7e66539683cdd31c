"""Attention over the paged KV cache, causal, with grouped heads and an optional sliding window.

The query at position p attends to keys at positions <= p; with a window of w, only to those > p - w. Heads are grouped:
query head h reads key-value head h // (num_heads / num_kv_heads). Softmax in float32.

With a soft cap of c, a score s counts as c * tanh(s / c) (Gemma 2, arXiv:2408.00118). A sink is a score of a head's
own, which takes its share of the softmax and adds no value (gpt-oss, arXiv:2508.10925).

The cache of a layer is [num_blocks, block_size, 2, num_kv_heads, head_dim]: key and value heads of a token side by
side, so that a block is one run of memory and a token is written, or gathered, in one piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .kv_codes import kv_numbers


class Scores(NamedTuple):
    """How the scores of a layer are made of its queries and keys."""

    scale: float  # factor of q k^T
    window: int | None = None  # tokens that a query looks back on, itself included; None: all
    softcap: float = 0.0  # 0: none
    sinks: Tensor | None = None  # [num_heads]


class PromptLayers(NamedTuple):
    """What layers have in common that share a plan. ``dtype``: of the queries; ``is_fp8``: the cache is in FP8."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    window: int | None = None
    is_fp8: bool = False


def prefill_attention(
    q: Tensor,
    kv: Tensor,
    kv_cache: Tensor,
    block_ids: Tensor,
    seq_len: int,
    how: Scores,
    kv_scales: Tensor | None = None,
) -> Tensor:
    """Attention of one sequence of which the last tokens are new.

    Args:
        q: [query_len, num_heads, head_dim] of the new tokens.
        kv: [query_len, 2, num_kv_heads, head_dim], what the cache holds of them already.
        kv_cache: see above.
        block_ids: int32 or int64 [ceil(seq_len / block_size)]: the sequence's blocks.
        seq_len: tokens in all, the new ones included.
        kv_scales: of a cache in FP8, see kv_codes.py.

    Returns:
        [query_len, num_heads * head_dim].
    """
    query_len, num_heads, head_dim = q.shape
    num_kv_heads = kv_cache.shape[3]
    scale, window, softcap, sinks = how
    if seq_len > query_len:
        kv = kv_cache.index_select(0, block_ids).flatten(0, 1)[:seq_len]
    kv = kv_numbers(kv, q.dtype, kv_scales)
    groups = num_heads // num_kv_heads
    # Key-value heads as batch, the query heads of each as heads; keys are shared by a stride of 0, not copied.
    grouped = q.view(query_len, num_kv_heads, groups, head_dim).permute(1, 2, 0, 3)
    keys, values = (t.transpose(0, 1).unsqueeze(1).expand(-1, groups, -1, -1) for t in kv.unbind(1))
    whole = seq_len == query_len and (window is None or window >= seq_len)
    if softcap or sinks is not None:
        out = torch.empty_like(grouped)
        own_sinks = None if sinks is None else sinks.view(num_kv_heads, groups, 1, 1)
        step = max(1, _MOST_SCORES // (num_heads * seq_len))
        for begin in range(0, query_len, step):
            end = min(query_len, begin + step)
            mask = _causal_mask(end - begin, seq_len - query_len + end, window, q.device)
            seen = mask.shape[1]
            part = grouped[:, :, begin:end], keys[:, :, :seen], values[:, :, :seen]
            out[:, :, begin:end] = _attend(*part, mask, scale, softcap, own_sinks)
    else:
        attn_mask = None if whole else _causal_mask(query_len, seq_len, window, q.device)
        out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=attn_mask, is_causal=whole, scale=scale)
    return out.permute(2, 0, 1, 3).reshape(query_len, num_heads * head_dim)


_MOST_SCORES = 1 << 22
"""Scores that are in memory at once, 16 MiB of them."""


def _attend(
    q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, softcap: float, sinks: Tensor | None
) -> Tensor:
    """Attention with a soft cap or sinks, which torch's own does not have. q: [a, b, queries, dim]; keys and values:
    [a, b, seen, dim]; mask: bool, broadcast to [a, b, queries, seen]; sinks: broadcast to [a, b, queries, 1]."""
    scores = (q.float() * scale) @ keys.float().transpose(-1, -2)  # scaled first: products could pass float16's range
    if softcap:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    if mask is not None:
        scores.masked_fill_(~mask, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.float().expand(*scores.shape[:3], 1)), -1)
    weights = torch.softmax(scores, -1)
    return weights[..., : keys.shape[-2]].to(q.dtype) @ values


def _causal_mask(query_len: int, seq_len: int, window: int | None, device: torch.device) -> Tensor:
    """bool [query_len, seq_len]: True where the query may look."""
    mask = torch.ones(query_len, seq_len, dtype=torch.bool, device=device).tril_(seq_len - query_len)
    return mask if window is None else mask.triu_(seq_len - query_len - window + 1)


def decode_attention(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Sequence[int],
    how: Scores,
    kv_scales: Tensor | None = None,
) -> Tensor:
    """Attention of one new token a sequence.

    Args:
        q: [num_seqs, num_heads, head_dim].
        kv_cache: see above; the new tokens' keys and values are in it.
        block_table: int32 or int64 [num_seqs, num_blocks]; entries past a sequence's own are ignored.
        seq_lens: tokens of each sequence, the new one included.
        kv_scales: of a cache in FP8, see kv_codes.py.

    Returns:
        [num_seqs, num_heads * head_dim].
    """
    num_seqs, num_heads, head_dim = q.shape
    block_size, num_kv_heads = kv_cache.shape[1], kv_cache.shape[3]
    scale, window, softcap, sinks = how
    longest = max(seq_lens)
    num_blocks = -(-longest // block_size)
    kept = kv_cache.index_select(0, block_table[:, :num_blocks].reshape(-1))
    gathered = kv_numbers(kept, q.dtype, kv_scales)
    keys, values = gathered.view(num_seqs, num_blocks * block_size, 2, num_kv_heads, head_dim).unbind(2)
    mask = None
    if min(seq_lens) == longest and window is None:
        keys, values = keys[:, :longest], values[:, :longest]
    else:
        lens = torch.tensor(seq_lens)[:, None]
        places = torch.arange(num_blocks * block_size)
        mask = places < lens
        if window is not None:
            mask &= places >= lens - window
        mask = mask[:, None, None, :]
    grouped = q.view(num_seqs, num_kv_heads, num_heads // num_kv_heads, head_dim)
    keys, values = keys.transpose(1, 2), values.transpose(1, 2)
    if softcap or sinks is not None:
        own_sinks = None if sinks is None else sinks.view(num_kv_heads, -1, 1)
        out = _attend(grouped, keys, values, mask, scale, softcap, own_sinks)
    else:
        out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scale)
    return out.reshape(num_seqs, num_heads * head_dim)
