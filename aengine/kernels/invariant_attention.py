"""Attention over the paged KV cache of which a query's bits depend on its position and its sequence alone.

Elsewhere the order of the sums depends on how many queries a step has, and how many keys the longest of its sequences.
Here queries come in tiles of positions 0 to 7, 8 to 15, ..., and keys in blocks of positions 0 to 127, 128 to 255, ...
of the sequence, whatever part of it the step computes. All products are of a tile by a block, and their parts are added
in the order of the blocks, of which those that a query does not see add zeros.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .kv_codes import kv_numbers
from .paged_attention import Scores
from .policy import ROW_TILE

_KEYS = 128  # keys that are read at a time


def invariant_attention(
    q: Tensor,
    kv_cache: Tensor,
    block_ids: Tensor,
    seq_len: int,
    how: Scores,
    kv_scales: Tensor | None = None,
) -> Tensor:
    """Return [query_len, num_heads * head_dim], for q [query_len, num_heads, head_dim] of a sequence's last tokens,
    whose keys and values are in the cache; the other arguments are those of `prefill_attention`."""
    query_len, num_heads, head_dim = q.shape
    scale, window, softcap, sinks = how
    num_kv_heads, groups = kv_cache.shape[3], num_heads // kv_cache.shape[3]
    begin = seq_len - query_len  # position of the first query
    before = begin % ROW_TILE
    kv = kv_numbers(kv_cache.index_select(0, block_ids).flatten(0, 1)[:seq_len], torch.float32, kv_scales)
    kv = F.pad(kv, (0, 0, 0, 0, 0, 0, 0, -seq_len % _KEYS))
    keys, values = kv.transpose(0, 2).unbind(1)  # [num_kv_heads, keys, head_dim]
    queries = F.pad(q.float() * scale, (0, 0, 0, 0, before, -(before + query_len) % ROW_TILE))
    own_sinks = None if sinks is None else sinks.float().view(num_kv_heads, groups, 1, 1)
    outs = []
    for i, tile in enumerate(queries.split(ROW_TILE)):
        first = begin - before + i * ROW_TILE  # position of the tile's first row
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
