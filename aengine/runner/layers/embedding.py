"""Token embeddings."""

from __future__ import annotations

from torch import Tensor

from ..weights.scope import WeightScope

__all__ = ["Embedding"]


class Embedding:
    """Rows of a table [vocab_size, hidden_size]."""

    def __init__(self, scope: WeightScope, vocab_size: int, hidden_size: int) -> None:
        self.table: Tensor
        self._table_dtype, self._dtype = scope.formats.table_dtype, scope.formats.dtype
        scope.want("weight", (vocab_size, hidden_size), self._table_dtype, self._put)

    def _put(self, tensor: Tensor) -> None:
        self.table = tensor.to(self._table_dtype)

    def __call__(self, input_ids: Tensor) -> Tensor:
        """[num_tokens, hidden_size] in the activations' dtype, a new tensor; input_ids: int64 [num_tokens]."""
        return self.table.index_select(0, input_ids).to(self._dtype)
