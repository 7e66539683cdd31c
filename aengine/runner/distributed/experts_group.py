"""`ExpertsGroup`: the ranks of all data parallel replicas, among which the experts of each layer are divided.

Attention and its KV belong to a replica, experts to one rank of all. The replicas compute their steps in rounds, which
the host agrees; in each layer with experts

    replica 0   own tokens ─┐          ┌─ own experts, tokens of all ─┐       ┌─> own tokens
                            ├─ gather ─┤                              ├─ sum ─┤
    replica 1   own tokens ─┘          └─ own experts, tokens of all ─┘       └─> own tokens

A replica that has no step in a round takes part with no tokens of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .group import TensorGroup

__all__ = ["ExpertRounds", "ExpertsGroup"]


class ExpertsGroup:
    """One rank's view. All ranks `begin` the same rounds in the same order, and exchange in the same layers of each."""

    def __init__(self, group: TensorGroup, replica: int, num_replicas: int) -> None:
        """``group``: all ranks, those of a replica one after the other; ``replica``: this one's."""
        self._group = group
        self._replica = replica
        self._num_replicas = num_replicas
        self._sizes: Sequence[int] = ()

    @property
    def rank(self) -> int:
        """This one's place among all ranks."""
        return self._group.rank

    @property
    def size(self) -> int:
        """Number of ranks of all replicas."""
        return self._group.size

    def begin(self, sizes: Sequence[int]) -> None:
        """The next round has so many tokens of each replica."""
        assert len(sizes) == self._num_replicas, f"{len(sizes)} sizes of {self._num_replicas} replicas"
        self._sizes = sizes

    @property
    def own(self) -> slice:
        """Where this replica's tokens are among those of the round."""
        start = sum(self._sizes[: self._replica])
        return slice(start, start + self._sizes[self._replica])

    def gather(self, x: Tensor) -> Tensor:
        """[tokens of the round, hidden_size], a new tensor: the rows of all replicas, of which ``x`` are this one's."""
        assert len(x) == self._sizes[self._replica], f"{len(x)} tokens, in a round of {self._sizes}"
        padded = x.new_zeros((max(self._sizes), *x.shape[1:]))
        padded[: len(x)] = x
        rows = self._group.gather(padded)[:: self._group.size // self._num_replicas]  # all ranks of one have the same
        return torch.cat([rows[replica, :size] for replica, size in enumerate(self._sizes)])

    def add_sum(self, residual: Tensor, rows: Tensor, partial: Tensor) -> None:
        """Add the sum of all ranks' ``partial`` to ``rows``, both [tokens of the round, hidden_size], and write this
        replica's to ``residual``."""
        self._group.add_sum(rows, partial)
        residual.copy_(rows[self.own])


class ExpertRounds(NamedTuple):
    """A rank's part in the rounds of all replicas."""

    group: ExpertsGroup
    join_layers: Callable[[], None]  # has the model's layers with experts take part, without tokens

    @torch.inference_mode()
    def join(self, sizes: Sequence[int]) -> None:
        """Take part in a round in which this replica has no tokens, and the others so many: ``sizes``, by replica."""
        if any(sizes):
            self.group.begin(sizes)
            self.join_layers()
