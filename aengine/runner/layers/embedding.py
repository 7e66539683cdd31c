"""Token embeddings."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..weights.slot import Slot
from .linear import LinearFormat

__all__ = ["Embedding"]


class Embedding:
    """Rows of a table [vocab_size, hidden_size]. ``also``: gets the table too (a tied output projection)."""

    def __init__(
        self,
        name: str,
        vocab_size: int,
        hidden_size: int,
        linear_format: LinearFormat,
        also: Callable[[Tensor], None] | None = None,
    ) -> None:
        self._name, self._shape, self._format, self._also = name, (vocab_size, hidden_size), linear_format, also
        self._table: Tensor

    def slots(self) -> Iterator[Slot]:
        yield Slot(f"{self._name}.weight", self._shape, self._load)

    def _load(self, tensor: Tensor) -> None:
        self._table = tensor.to(torch.float16 if self._format.name == "float16" else self._format.dtype)
        if self._also is not None:
            self._also(tensor)

    def __call__(self, input_ids: Tensor) -> Tensor:
        """[num_tokens, hidden_size] in the activations' dtype, a new tensor."""
        return self._table.index_select(0, input_ids).to(self._format.dtype)
