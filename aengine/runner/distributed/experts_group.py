"""`ExpertsGroup`: the ranks of all data parallel replicas, among which the experts of each layer are divided.

Attention and its KV belong to a replica, experts to one rank of all. The replicas compute their steps in rounds, which
the host pairs (engine/replicas/rounds.py), in shapes that all ranks find alike (runner/exchange/expert_rounds.py); in
each layer with experts

    replica 0   own tokens ─┐          ┌─ own experts, tokens of all ─┐       ┌─> own tokens
                            ├─ gather ─┤                              ├─ sum ─┤
    replica 1   own tokens ─┘          └─ own experts, tokens of all ─┘       └─> own tokens

A replica that has no step in a round takes part with no tokens of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from .group import ALONE, TensorGroup


class ExpertsGroup:
    """One rank's view. All ranks `begin` the same rounds in the same order, and exchange in the same layers of each."""

    def __init__(self, group: TensorGroup, replica: int, num_replicas: int, tensor_group: TensorGroup = ALONE) -> None:
        """``group``: all ranks, those of a replica one after the other; ``replica``: this one's; ``tensor_group``: the
        ranks of this replica."""
        self._group = group
        self._tensor_group = tensor_group
        self._replica = replica
        self._num_replicas = num_replicas
        self._sizes: Sequence[int] = ()
        self.rows: Tensor | None = None
        """Int64 [rows of the round], below 0 for padding, which needs no expert; None: it is not known."""

    @property
    def rank(self) -> int:
        """Index of this rank among those of all replicas."""
        return self._group.rank

    @property
    def size(self) -> int:
        """Number of ranks of all replicas."""
        return self._group.size

    def begin(self, sizes: Sequence[int]) -> None:
        """Begin a round with ``sizes`` rows of each replica: its tokens, and padding after them."""
        assert len(sizes) == self._num_replicas, f"{len(sizes)} sizes of {self._num_replicas} replicas"
        self._sizes, self.rows = sizes, None

    def begin_even(self, size: int, rows: Tensor | None = None) -> None:
        """Begin a round with ``size`` rows of each replica. ``rows``: int64 [size], this replica's part of `rows`."""
        self.begin([size] * self._num_replicas)
        self.rows = None if rows is None else self.gather(rows)

    def own(self, num_tokens: int) -> slice:
        """Return the slice of the round's rows that are this replica's tokens."""
        start = sum(self._sizes[: self._replica])
        return slice(start, start + num_tokens)

    def gather(self, x: Tensor) -> Tensor:
        """Return [rows of the round, hidden_size], a new tensor: the tokens of all replicas, each with what pads them
        behind. ``x`` are this one's, and what may pad them; zeros do where it has fewer rows than agreed."""
        assert len(x) <= self._sizes[self._replica], f"{len(x)} tokens, in a round of {self._sizes}"
        most = max(self._sizes)
        if len(x) < most:
            x = torch.cat([x, x.new_zeros((most - len(x), *x.shape[1:]))])
        rows = self._group.gather(x)[:: self._group.size // self._num_replicas]  # all ranks of one have the same
        if min(self._sizes) == most:
            return rows.flatten(0, 1)
        return torch.cat([rows[replica, :size] for replica, size in enumerate(self._sizes)])

    def add_sum(self, residual: Tensor, rows: Tensor, partial: Tensor) -> None:
        """Add the sum of all ranks' ``partial`` to ``rows``, both [rows of the round, hidden_size], and write this
        replica's to ``residual``."""
        self._group.add_sum(rows, partial)
        residual.copy_(rows[self.own(len(residual))])

    def warm_up(self, hidden_size: int, dtype: torch.dtype) -> None:
        """See `TensorGroup`."""
        self._group.warm_up(hidden_size, dtype)

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """See `TensorGroup`: neither other replicas nor other ranks of this one take part."""
        with self._group.rehearsal(), self._tensor_group.rehearsal():
            yield
