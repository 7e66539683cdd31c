"""Write keys and values of new tokens into their slots of the paged KV cache."""

from __future__ import annotations

from torch import Tensor

from .dispatch import cpu_only

__all__ = ["write_kv"]


def write_kv(kv: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """kv_cache[slot_mapping[t]] = kv[t].

    Args:
        kv: [num_tokens, row]: key heads, then value heads, of each token.
        kv_cache: [num_slots, row], contiguous.
        slot_mapping: int64 [num_tokens], 0 <= slot < num_slots, no slot twice.
    """
    assert kv.dim() == kv_cache.dim() == 2 and kv.shape[1] == kv_cache.shape[1], f"{kv.shape} into {kv_cache.shape}"
    if kv.device.type != "cpu":
        raise cpu_only("write_kv", kv)
    kv_cache.index_copy_(0, slot_mapping, kv)
