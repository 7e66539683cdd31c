"""Prepares new tokens for attention: normalises q and k, rotates them by position, writes k and v to the cache."""

from __future__ import annotations

import torch
from torch import Tensor

from .dispatch import uses_triton
from .kv_codes import kept_kv
from .rotary import HeadNorms, Rope


def apply_rope_and_write_kv(
    qkv: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    rope: Rope | None,
    norms: HeadNorms | None,
    num_heads: int,
    kv_cache: Tensor,
    kv_scales: Tensor | None = None,
) -> None:
    """Change q and k of ``qkv`` in place, head by head: the norms, if there are any, then rotary; write k and v.

    Args:
        qkv: [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]
        positions, slot_mapping: int64 [num_tokens]; slot -1: nothing is written
        rope: by ``positions``, which have the rows' shifts in them already; None: q and k are not rotated
        kv_cache: [num_blocks, block_size, 2, num_kv_heads, head_dim], any strides but the last
        kv_scales: of a cache in FP8, see kv_codes.py
    """
    num_kv_heads, head_dim = kv_cache.shape[3:]
    assert qkv.shape[1] == (num_heads + 2 * num_kv_heads) * head_dim and qkv.is_contiguous()
    assert positions.shape == slot_mapping.shape == qkv.shape[:1] and kv_cache.stride(4) == 1
    if uses_triton(qkv):
        from .triton import write_qkv as triton_op

        triton_op.apply_rope_and_write_kv(qkv, positions, slot_mapping, rope, norms, num_heads, kv_cache, kv_scales)
        return
    heads = qkv.view(qkv.shape[0], -1, head_dim)
    q_norm, k_norm, eps = norms or (None, None, 0.0)
    for begin, count, norm in ((0, num_heads, q_norm), (num_heads, num_kv_heads, k_norm)):
        x = heads[:, begin : begin + count].float()
        if norm is not None:
            x = torch.rms_norm(x, norm.shape, norm.float(), eps)
        if rope is not None:
            x = turned(x, positions, rope)
            if begin == 0 and rope.query_scale is not None:
                x = x * rope.query_scale[positions][:, None, None]
        heads[:, begin : begin + count] = x.to(heads.dtype)
    kept = slot_mapping >= 0
    slots, block_size = slot_mapping[kept], kv_cache.shape[1]
    kv = heads[kept][:, num_heads:].unflatten(1, (2, num_kv_heads))
    kv_cache[slots // block_size, slots % block_size] = kept_kv(kv, kv_cache.dtype, kv_scales)


def turned(x: Tensor, positions: Tensor, rope: Rope) -> Tensor:
    """Return x in float32 [num_tokens, heads, head_dim], rotated by its tokens' positions."""
    cos, sin = rope.table.index_select(0, positions)[:, None].chunk(2, -1)
    rotary_dim = rope.table.shape[1]
    x, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    first, second = (x[..., ::2], x[..., 1::2]) if rope.interleaved else x.chunk(2, -1)
    both = first * cos - second * sin, second * cos + first * sin
    return torch.cat((torch.stack(both, -1).flatten(-2) if rope.interleaved else torch.cat(both, -1), rest), -1)
