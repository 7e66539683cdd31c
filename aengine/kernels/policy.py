"""Which variants of a kernel may be chosen: a value that is made of the settings and handed to whatever chooses.

    FASTEST           for each batch the fastest: a row's sums are added up in an order that depends on how many rows
                      there are, so that its last bits may differ from one batch to another
    batch_invariant   a row's bits are the same whatever else is in the batch, and however a prompt is cut into steps

The second has attention of a query in an order that follows from its position alone (invariant_attention.py), whatever
others begin with the same keys (of the first, see shared_prefix.py), and
products of rows in tiles of one size on a CPU (`KernelPolicy.by_rows`), in one order of sums on a GPU
(ordered_linear.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .expert_tilings import MAX_PAIR_TOKENS, ExpertShape, ExpertTiling, default_tiling

ROW_TILE = 8
"""Rows that are computed together by the batch-invariant variants: a step of one row computes as many, and one of more
reads the weights once for each."""


@dataclass(frozen=True, slots=True)
class KernelPolicy:
    batch_invariant: bool = False

    def by_rows(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Return ``function(x)``, for x [n, size], where each row of the result [n, ...] follows from the same row of
        x.

        Batch-invariant, the function is called for `ROW_TILE` rows at a time, the last ones filled up with zeros. So
        all that libraries choose by the shapes is the same in each call.
        """
        n = len(x)
        if not self.batch_invariant or n == 0:
            return function(x)
        tiles = F.pad(x, (0, 0, 0, -n % ROW_TILE)).split(ROW_TILE)
        return torch.cat([function(tile) for tile in tiles])[:n]

    def expert_tiling(self, shape: ExpertShape, num_tokens: int) -> ExpertTiling | None:
        """Return how the products of experts are cut on a GPU; None: as is fastest.

        Batch-invariant, in blocks of one expert's slots, of any number of tokens: their sizes change no sum, but other
        ways add up in other orders.
        """
        if not self.batch_invariant:
            return None
        return default_tiling(shape, max(MAX_PAIR_TOKENS + 1, num_tokens), can_group=False)


FASTEST = KernelPolicy()
