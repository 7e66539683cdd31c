"""How the tensors of a model are divided among the ranks of a group.

A dimension is cut into equal pieces, of which a rank has one (`Share`). Several ranks may have the same piece: where
there are fewer key-value heads than ranks, each head is kept more than once. A matrix that the checkpoint has joined
from several (q, k, v; gate, up) has a share of each, so that a rank wants several ranges of one tensor (`Part`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor

from ...kernels.gumbel import BLOCK


@dataclass(frozen=True, slots=True)
class Share:
    """A rank's piece of a dimension of ``pieces * size`` elements, or of ``whole``, where the last pieces lack some."""

    size: int  # elements of the piece
    index: int = 0
    pieces: int = 1
    whole: int | None = None

    @property
    def total(self) -> int:
        """Number of elements of the whole dimension, over all ranks."""
        return self.size * self.pieces if self.whole is None else self.whole

    @property
    def is_divided(self) -> bool:
        return self.pieces > 1

    @property
    def range(self) -> tuple[int, int]:
        """First and last (exclusive) of the elements that are this rank's."""
        start = min(self.index * self.size, self.total)
        return start, min(start + self.size, self.total)


class Part(NamedTuple):
    """What a rank wants of a tensor: ranges along one dimension, one behind the other; zeros fill them up to
    ``size``."""

    dim: int
    ranges: tuple[tuple[int, int], ...]
    size: int

    def shape_in(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the part's shape, of a tensor of ``shape``."""
        return (*shape[: self.dim], self.size, *shape[self.dim + 1 :])

    def of(self, tensor: Tensor) -> Tensor:
        """Return the part, contiguous; of a single range along the first dimension it is a view."""
        if not self.ranges:
            return tensor.narrow(self.dim, 0, 0)
        pieces = [tensor.narrow(self.dim, start, stop - start) for start, stop in self.ranges]
        length = sum(piece.shape[self.dim] for piece in pieces)
        if length < self.size:
            filled = tensor.new_zeros(self.shape_in(tensor.shape))
            torch.cat(pieces, self.dim, out=filled.narrow(self.dim, 0, length))
            return filled
        return pieces[0].contiguous() if len(pieces) == 1 else torch.cat(pieces, self.dim)


NOTHING = Part(0, (), 0)
"""Of a tensor that only other ranks use: it is in the checkpoint, and is not read."""


def part_of(shares: Sequence[Share], dim: int, length: int, block: int | None = None) -> Part | None:
    """Return the part of these shares, which lie one behind the other; None: all.

    Args:
        length: elements of dimension ``dim``; several elements of the shares may be in one of them (codes, scales)
        block: how many are in one of them, if the last may have fewer; None: as many in each

    Raises ValueError: a share begins or ends within an element.
    """
    if not any(share.is_divided for share in shares):
        return None
    total, start, ranges, size = sum(share.total for share in shares), 0, [], 0
    for share in shares:
        first, last = (_scaled(start + place, length, total, block) for place in share.range)
        ranges.append((first, last))
        size += _scaled(share.size, length, total, None) if block is None else -(-share.size // block)
        start += share.total
    return Part(dim, tuple(ranges), size)


def _scaled(place: int, length: int, total: int, block: int | None) -> int:
    if place == total:
        return length
    scaled, rest = divmod(place * length, total) if block is None else divmod(place, block)
    if rest:
        blocks = "1 block" if length == 1 else f"{length} blocks"
        raise ValueError(f"{total} numbers are {blocks}, and number {place} is within one")
    return scaled


def sizes(shares: Sequence[Share]) -> tuple[int, int]:
    """Return (elements of this rank, of all) of shares that lie one behind the other."""
    return sum(share.size for share in shares), sum(share.total for share in shares)


class VocabularyShare(NamedTuple):
    """The token ids [start, start + size) that a rank has the embeddings and the logits of; those from
    ``vocab_size`` on are none. Pieces begin at multiples of 256, as sampling draws in blocks of that size."""

    start: int
    size: int
    vocab_size: int
    pieces: int

    @classmethod
    def of(cls, vocab_size: int, rank: int, num_ranks: int) -> Self:
        if num_ranks == 1:
            return cls(0, vocab_size, vocab_size, 1)
        size = -(-vocab_size // (num_ranks * BLOCK)) * BLOCK
        return cls(rank * size, size, vocab_size, num_ranks)

    @property
    def share(self) -> Share:
        return Share(self.size, self.start // self.size, self.pieces, self.vocab_size)

    @property
    def num_tokens(self) -> int:
        """Number of this rank's ids that are tokens; the others pad the last part of the vocabulary."""
        return max(0, min(self.size, self.vocab_size - self.start))
