"""`TensorGroup`: the ranks that share each layer of a model (tensor parallel), as one of them sees the others.

It is a value that is passed in: a `WeightScope` carries it to the layers, a `RunnerSetup` to the sampler. `ALONE` is
the group of one rank, in which nothing is exchanged.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor


class Peers(Protocol):
    """Ranks that exchange tensors in each layer, as graphs of these layers see them."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    def rehearsal(self) -> AbstractContextManager[None]:
        """Exchange nothing inside the context: the others' parts are taken for zeros, and gathered parts for this
        rank's own.

        For a run whose results nobody needs, which only loads what later ones launch; the others have no part in it.
        """


class TensorGroup(Peers, Protocol):
    """The ranks that share each layer, seen from one of them.

    All ranks call the same methods in the same order, with tensors of the same shapes and dtypes. What a method returns
    or writes has the same bits on every rank, and a row of it does not depend on how many others there are.
    """

    @property
    def rank(self) -> int:
        """Index of this rank in the group, from 0 on."""

    def add_sum(self, residual: Tensor, partial: Tensor) -> None:
        """Add the sum of all ranks' ``partial`` [n, hidden_size] to ``residual`` of that shape, in place."""

    def sum(self, partial: Tensor) -> Tensor:
        """Return the sum of all ranks' ``partial``, in its shape and dtype."""

    def gather(self, x: Tensor) -> Tensor:
        """Return [size, *x.shape]: every rank's ``x``, by rank."""

    def warm_up(self, hidden_size: int, dtype: torch.dtype) -> None:
        """Exchange rows of this kind in every way that their number may make the fastest, so that all is loaded."""


class Alone:
    """The `TensorGroup` of a rank that shares its layers with no other."""

    rank = 0
    size = 1

    def add_sum(self, residual: Tensor, partial: Tensor) -> None:
        residual.add_(partial)

    def sum(self, partial: Tensor) -> Tensor:
        return partial

    def gather(self, x: Tensor) -> Tensor:
        return x.unsqueeze(0)

    def warm_up(self, hidden_size: int, dtype: torch.dtype) -> None:
        pass

    def rehearsal(self) -> AbstractContextManager[None]:
        return nullcontext()


ALONE = Alone()
