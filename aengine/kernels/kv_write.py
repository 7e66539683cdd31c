"""Write keys and values of new tokens into their slots of the paged KV cache."""

from __future__ import annotations

from torch import Tensor


def write_kv(kv: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """Set ``kv_cache[slot // block_size, slot % block_size] = kv[t]`` for each token t and its slot.

    Args:
        kv: [num_tokens, 2, num_kv_heads, head_dim]: key heads, then value heads, of each token.
        kv_cache: [num_blocks, block_size, 2, num_kv_heads, head_dim]; blocks may be further apart than they are long.
        slot_mapping: int64 [num_tokens], 0 <= slot < num_blocks * block_size, no slot twice.
    """
    assert kv.shape[1:] == kv_cache.shape[2:], f"{kv.shape} into {kv_cache.shape}"
    if kv_cache.is_contiguous():  # one index is faster than two
        kv_cache.flatten(0, 1).index_copy_(0, slot_mapping, kv)
    else:
        block_size = kv_cache.shape[1]
        kv_cache[slot_mapping // block_size, slot_mapping % block_size] = kv
