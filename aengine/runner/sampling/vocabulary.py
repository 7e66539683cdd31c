"""`Vocabulary`: the logits of all tokens, of which each rank of a group has a share.

    by temperature and seed alone      every rank draws the best of its own; these are compared
    everything else                    the logits are gathered, and every rank samples from all of them

All ranks get the same ids: nothing that they sample by differs among them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels.gumbel import best_of_shares, draw_share, gumbel_sample
from ..distributed.group import TensorGroup
from ..distributed.shares import VocabularyShare


class Vocabulary:
    """The ranks' shares of a vocabulary, seen from one of them."""

    def __init__(self, own: VocabularyShare, group: TensorGroup) -> None:
        self._own = own
        self._group = group

    @property
    def share_size(self) -> int:
        """Logits of a row on this rank."""
        return self._own.size

    @property
    def is_divided(self) -> bool:
        return self._group.size > 1

    def draw(self, logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return `gumbel_sample` for this rank's logits float32 [n, share]."""
        if not self.is_divided:
            return gumbel_sample(logits, temperature, seeds, positions)
        own = self._own
        best = draw_share(logits, temperature, seeds, positions, own.start, own.vocab_size)
        return best_of_shares(self._group.gather(best))

    def whole(self, logits: Tensor) -> Tensor:
        """Return the logits of all tokens, float32 [n, vocab_size], for this rank's [n, share]."""
        if not self.is_divided:
            return logits
        size, left = self._own.size, self._own.vocab_size
        parts = []
        for part in self._group.gather(logits):
            parts.append(part[:, : max(0, min(size, left))])
            left -= size
        return torch.cat(parts, 1)
