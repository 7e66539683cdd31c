"""Token embeddings."""

from __future__ import annotations

import torch
from torch import Tensor

from ..weights.scope import WeightScope

__all__ = ["Embedding"]


class Embedding:
    """Rows of a table [vocab_size, hidden_size], multiplied by ``scale`` in the activations' dtype."""

    def __init__(self, scope: WeightScope, vocab_size: int, hidden_size: int, scale: float = 1.0) -> None:
        self.table: Tensor
        self._table_dtype, self._dtype = scope.formats.table_dtype, scope.formats.dtype
        self._scale = torch.tensor(scale, dtype=self._dtype).item()  # rounded as the model was trained with it
        scope.want("weight", (vocab_size, hidden_size), self._table_dtype, self._put)

    def _put(self, tensor: Tensor) -> None:
        self.table = tensor.to(self._table_dtype)

    def __call__(self, input_ids: Tensor) -> Tensor:
        """[num_tokens, hidden_size] in the activations' dtype, a new tensor; input_ids: int64 [num_tokens]."""
        rows = self.table.index_select(0, input_ids).to(self._dtype)
        return rows if self._scale == 1.0 else rows.mul_(self._scale)
