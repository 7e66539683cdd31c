"""The sequences of a step, for ops that carry a state from token to token.

The states of a sequence may be kept within its tokens of the step: a cut is a place where a page gets a copy of them.
The gated delta rule computes chunks of up to 64 tokens, which end at cuts too:

    |--64--|--64--|-17-^ page 9   |--64--|-5-|  page of the sequence
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

CHUNK = 64
"""Tokens that the gated delta rule computes at once."""


class Cut(NamedTuple):
    """A place within the tokens of a sequence, behind which its states are kept."""

    sequence: int
    num_tokens: int  # tokens of the step before it
    page: int  # page that gets the copy


class Sequences(NamedTuple):
    """m sequences, whose new tokens lie one after the other, and whose states are pages of a memory. In a graph there
    may be fewer: others have no tokens, and no chunk; what the host would know is empty there."""

    lens: tuple[int, ...]  # host [m]: new tokens of each
    cuts: tuple[Cut, ...]  # host: those of a sequence ascend
    # on the device, all int64:
    starts: Tensor  # [m + 1]: the first token of each, and past the last
    owners: Tensor  # [num_tokens]: the sequence of each token
    pages: Tensor  # [m]: where each keeps its state
    begins: Tensor  # [m]: 1: the sequence has no state yet, whatever its page holds
    singles: Tensor  # [s]: pages of the sequences of one token, which lead; -1: it has more, or none
    chunks: Tensor  # [k, 3]: first token, one past the last, cut behind it (-1: none), of all others' chunks
    chunk_starts: Tensor  # [m + 1]: the first chunk of each sequence, and past the last
    cut_places: Tensor  # [2, c]: sequence of each cut, one past the last token before it
    cut_pages: Tensor  # [c]; -1: there is no cut


class ChunkTables(NamedTuple):
    """What `Sequences` has of chunks and cuts, on the host."""

    chunks: npt.NDArray[np.int64]
    chunk_starts: npt.NDArray[np.int64]
    cut_places: npt.NDArray[np.int64]

    @classmethod
    def of(cls, lens: Sequence[int], num_single: int, cuts: Iterable[Cut]) -> ChunkTables:
        """``num_single``: leading sequences of one token."""
        of_sequence: dict[int, list[tuple[int, int]]] = {}
        places = []
        first = [0, *np.cumsum(lens).tolist()]
        for i, cut in enumerate(cuts):
            of_sequence.setdefault(cut.sequence, []).append((first[cut.sequence] + cut.num_tokens, i))
            places.append((cut.sequence, first[cut.sequence] + cut.num_tokens))
        chunks: list[tuple[int, int, int]] = []
        starts = [0] * (num_single + 1)
        for sequence in range(num_single, len(lens)):
            begin = first[sequence]
            for end, cut_behind in (*of_sequence.get(sequence, ()), (first[sequence + 1], -1)):
                for start in range(begin, end, CHUNK):
                    stop = min(start + CHUNK, end)
                    chunks.append((start, stop, cut_behind if stop == end else -1))
                begin = end
            starts.append(len(chunks))
        return cls(
            np.array(chunks, dtype=np.int64).reshape(-1, 3),
            np.array(starts, dtype=np.int64),
            np.array(places, dtype=np.int64).reshape(-1, 2).T,
        )
