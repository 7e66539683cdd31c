"""Which variants of a kernel may be chosen: a value that is made of the settings and handed to whatever chooses.

    FASTEST           for each batch the fastest: a row's sums are added up in an order that depends on how many rows
                      there are, so that its last bits may differ from one batch to another
    batch_invariant   a row's bits are the same whatever else is in the batch, and however a prompt is cut into steps

The second has products of rows in tiles of one size (`KernelPolicy.by_rows`), and attention of a query in an order that
follows from its position alone (invariant_attention.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

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


FASTEST = KernelPolicy()
