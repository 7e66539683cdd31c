"""Clearing blocks clears those and no others."""

from __future__ import annotations

import torch

from aengine.kernels.kv_clear import clear_kv


def test_only_the_named_blocks() -> None:
    cache = torch.full((5, 2, 3), torch.nan)
    clear_kv(cache, torch.tensor([3, 0]))
    assert (cache[[0, 3]] == 0).all() and cache[[1, 2, 4]].isnan().all()
