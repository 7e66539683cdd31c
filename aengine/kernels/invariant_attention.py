"""Attention over the paged KV cache of which a query's bits depend on its position and its sequence alone.

Elsewhere the order of the sums depends on how many queries a step has, and how many keys the longest of its sequences.

    invariant_attention    a sequence's last tokens, in torch on a CPU
    attend_to_prompts      sequences with several new tokens, on a GPU
    attend_alone           queries that each are the last of their sequence, on a GPU, in the same order

triton/invariant_attention.py says in which order those two add up.

On a CPU queries come in tiles of positions 0 to 7, 8 to 15, ..., and keys in blocks of positions 0 to 127, 128 to 255,
... of the sequence, whatever part of it the step computes. All products are of a tile by a block, and their parts are
added in the order of the blocks, of which those that a query does not see add zeros.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .decode_plan import PartsWorkspace
from .dispatch import uses_triton
from .kv_codes import kv_numbers
from .paged_attention import Scores
from .policy import ROW_TILE
from .varlen_attention import facts_of

_KEYS = 128  # keys that are read at a time


def plan_prompts(
    rows: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    num_tokens: int,
    group: int,
    head_dim: int,
) -> Tensor:
    """Plan `attend_to_prompts` for all layers: the sequences with more than one new token. See
    `varlen_attention.plan_prompts`."""
    if uses_triton(rows):
        from .triton import invariant_attention as triton_op

        return triton_op.plan_prompts(rows, query_start_loc, seq_lens, num_tokens, group, head_dim)
    return facts_of(rows, query_start_loc, seq_lens, skip_single=True)


def attend_to_prompts(q: Tensor, kv_cache: Tensor, block_table: Tensor, plan: Tensor, how: Scores) -> Tensor:
    """Return [num_tokens, num_heads * head_dim]; sequences of one new token have no place in it. See
    `varlen_attention`."""
    assert q.stride(2) == 1 and q.stride(1) == q.shape[2] and kv_cache.stride(4) == 1
    if uses_triton(q):
        from .triton import invariant_attention as triton_op

        return triton_op.attend_to_prompts(q, kv_cache, block_table, plan, how)
    out = q.new_zeros((len(q), q.shape[1] * q.shape[2]))
    for row, start, query_len, seq_len in plan.tolist():
        own, blocks = slice(start, start + query_len), block_table[row, : -(-seq_len // kv_cache.shape[1])].long()
        out[own] = invariant_attention(q[own], kv_cache, blocks, seq_len, how)
    return out


def attend_alone(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    rows: Tensor,
    seq_lens: Tensor,
    how: Scores,
    workspace: PartsWorkspace,
    out: Tensor,
) -> None:
    """Set out [>= n, num_heads * head_dim] to the attention of n queries, each the last of the first seq_len tokens of
    its sequence, whose key and value are in the cache already.

    Args:
        q: [n, num_heads, head_dim], rotated by position; strided by query
        kv_cache, block_table: see `varlen_attention`
        rows: int64 [n]; seq_lens: int32 [n], 0 where there is none: nothing is written then
    """
    assert q.stride(2) == 1 and q.stride(1) == q.shape[2] and kv_cache.stride(4) == 1
    assert rows.shape == seq_lens.shape == q.shape[:1] and seq_lens.dtype == torch.int32
    if uses_triton(q):
        from .triton import invariant_attention as triton_op

        triton_op.attend_alone(q, kv_cache, block_table, rows, seq_lens, how, workspace, out)
        return
    for i, (row, seq_len) in enumerate(zip(rows.tolist(), seq_lens.tolist(), strict=True)):
        if seq_len:
            blocks = block_table[row, : -(-seq_len // kv_cache.shape[1])].long()
            out[i] = invariant_attention(q[i : i + 1], kv_cache, blocks, seq_len, how)[0]


def invariant_attention(
    q: Tensor,
    kv_cache: Tensor,
    block_ids: Tensor,
    seq_len: int,
    how: Scores,
    kv_scales: Tensor | None = None,
    skipped: int = 0,
) -> Tensor:
    """Return [query_len, num_heads * head_dim], for q [query_len, num_heads, head_dim] of a sequence's last tokens,
    whose keys and values are in the cache; the other arguments are those of `prefill_attention`.

    ``skipped``: tokens of the sequence, seen by no query, that ``block_ids`` and ``seq_len`` leave out at its begin.
    Places are counted from where the block of `_KEYS` begins that has the first token after them: a key's block and a
    query's tile follow from their positions.
    """
    query_len, num_heads, head_dim = q.shape
    scale, window, softcap, sinks = how
    num_kv_heads, groups = kv_cache.shape[3], num_heads // kv_cache.shape[3]
    kv = kv_numbers(kv_cache.index_select(0, block_ids).flatten(0, 1)[:seq_len], torch.float32, kv_scales)
    missing = skipped % _KEYS
    seq_len += missing
    begin = seq_len - query_len  # place of the first query
    before = begin % ROW_TILE
    kv = F.pad(kv, (0, 0, 0, 0, 0, 0, missing, -seq_len % _KEYS))
    keys, values = kv.transpose(0, 2).unbind(1)  # [num_kv_heads, keys, head_dim]
    queries = F.pad(q.float() * scale, (0, 0, 0, 0, before, -(before + query_len) % ROW_TILE))
    own_sinks = None if sinks is None else sinks.float().view(num_kv_heads, groups, 1, 1)
    outs = []
    for i, tile in enumerate(queries.split(ROW_TILE)):
        first = begin - before + i * ROW_TILE  # place of the tile's first row
        grouped = tile.view(ROW_TILE, num_kv_heads, groups, head_dim).permute(1, 2, 0, 3)
        end = min(seq_len, first + ROW_TILE)
        start = 0 if window is None else max(0, first - window + 1) // _KEYS * _KEYS
        part = slice(start, -(-end // _KEYS) * _KEYS)
        out = _attend(grouped, keys[:, part], values[:, part], first - start, window, softcap, own_sinks)
        outs.append(out.permute(2, 0, 1, 3).flatten(1))
    return torch.cat(outs)[before : before + query_len].to(q.dtype)


def _attend(
    q: Tensor, keys: Tensor, values: Tensor, first: int, window: int | None, softcap: float, sinks: Tensor | None
) -> Tensor:
    """Return [num_kv_heads, groups, ROW_TILE, head_dim] of a tile of queries of that shape, scaled, over whole blocks
    of keys and values [num_kv_heads, keys, head_dim]. ``first``: position of the first query, counted from the first
    key."""
    rows = q.flatten(1, 2)
    places = torch.arange(first, first + ROW_TILE)[:, None]
    scores = []
    for begin in range(0, keys.shape[1], _KEYS):
        score = torch.bmm(rows, keys[:, begin : begin + _KEYS].transpose(1, 2)).view(*q.shape[:3], _KEYS)
        if softcap:
            score = score.div_(softcap).tanh_().mul_(softcap)
        block = torch.arange(begin, begin + _KEYS)
        unseen = block > places
        if window is not None:
            unseen |= block <= places - window
        scores.append(score.masked_fill_(unseen, -torch.inf))
    top = torch.stack([score.amax(-1, keepdim=True) for score in scores]).amax(0)
    if sinks is not None:
        top = torch.maximum(top, sinks)
    total = torch.zeros_like(top) if sinks is None else (sinks - top).exp_()
    out = torch.zeros_like(rows)
    for i, score in enumerate(scores):
        weights = score.sub_(top).exp_()
        total += weights.sum(-1, keepdim=True)
        out += torch.bmm(weights.flatten(1, 2), values[:, i * _KEYS : (i + 1) * _KEYS])
    return out.view(q.shape).div_(total)
