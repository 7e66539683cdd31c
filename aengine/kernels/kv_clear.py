"""Zero whole blocks of the paged KV cache."""

from __future__ import annotations

import torch
from torch import Tensor

from .seat import no_body

__all__ = ["clear_kv"]


def clear_kv(kv_cache: Tensor, block_ids: Tensor) -> None:
    """``kv_cache[block_ids] = 0`` for kv_cache [num_blocks, ...], block_ids int64 [m]."""
    assert block_ids.dtype == torch.int64 and block_ids.dim() == 1
    if kv_cache.device.type != "cpu":
        raise no_body("clear_kv", kv_cache)
    kv_cache.index_fill_(0, block_ids, 0)
