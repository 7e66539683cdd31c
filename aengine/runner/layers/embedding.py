"""Token embeddings."""

from __future__ import annotations

import torch
from torch import Tensor

from ..distributed.shares import VocabularyShare, part_of
from ..weights.scope import WeightScope
from ..weights.weight import put_into
from .linear import Linear


class Embedding:
    """Rows of a table [vocab_size, hidden_size], multiplied by ``scale`` in the activations' dtype.

    Among ranks each has some of the rows; a token's is the sum of what they have of it, which is zero on all but one.
    """

    def __init__(
        self, scope: WeightScope, vocabulary: int | VocabularyShare, hidden_size: int, scale: float = 1.0
    ) -> None:
        """``vocabulary``: number of rows, or this rank's share of them."""
        self.table: Tensor  # [rows of this rank, hidden_size]
        self._table_dtype, self._dtype = scope.formats.table_dtype, scope.formats.dtype
        self._scale = torch.tensor(scale, dtype=self._dtype).item()  # rounded as the model was trained with it
        own = VocabularyShare.of(vocabulary, 0, 1) if isinstance(vocabulary, int) else vocabulary
        self._group, self._start, self._num_rows = scope.group, own.start, own.size
        self._is_divided = own.share.is_divided
        part = part_of((own.share,), 0, own.vocab_size)
        scope.want("weight", (own.vocab_size, hidden_size), self._table_dtype, self._put, part=part)

    def _put(self, tensor: Tensor) -> None:
        put_into(self, "table", tensor.to(self._table_dtype))

    def __call__(self, input_ids: Tensor) -> Tensor:
        """Return [num_tokens, hidden_size] in the activations' dtype, a new tensor; input_ids: int64 [num_tokens]."""
        rows = self._sum_of_rows(input_ids) if self._is_divided else rows_of(self.table, input_ids)
        rows = rows.to(self._dtype)
        return rows if self._scale == 1.0 else rows.mul_(self._scale)

    def _sum_of_rows(self, input_ids: Tensor) -> Tensor:
        places = input_ids - self._start
        is_other = (places < 0) | (places >= self._num_rows)
        rows = rows_of(self.table, places.clamp_(0, self._num_rows - 1))
        rows.masked_fill_(is_other[:, None], 0.0)
        return self._group.sum(rows)


def rows_of(table: Tensor, ids: Tensor) -> Tensor:
    """Return rows of a table. Up to 16 of them torch's index_select copies one after the other (16: 7.8 us on an H100);
    indexing does not (1.5 us), but takes a microsecond longer for one."""
    return table[ids] if 1 < len(ids) <= 16 else table.index_select(0, ids)


class WeightRows:
    """Rows of a matrix that is also multiplied, or might be: in the format in which weights are kept."""

    def __init__(
        self, scope: WeightScope, name: str, vocabulary: VocabularyShare, hidden_size: int, scale: float = 1.0
    ) -> None:
        self.matrix = Linear(scope, hidden_size, {name: vocabulary.share})
        self._scale = torch.tensor(scale, dtype=scope.formats.dtype).item()

    def __call__(self, input_ids: Tensor) -> Tensor:
        """See `Embedding`."""
        return self.matrix.weight.rows(input_ids, self._scale)
