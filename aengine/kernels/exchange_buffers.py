"""`ExchangeBuffers`: memory in which ranks, each with a GPU of one machine, leave tensors for each other."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

MAX_PROGRAMS = 256
"""Most programs of a launch; there are as many counters of calls."""


@dataclass(frozen=True, slots=True)
class ExchangeBuffers:
    """Where a rank receives what the others send, and how it reaches theirs.

    A rank's memory is [words | bulk | signals]: ``words`` (int64 [2, size, words_per_rank]) are entries, half of which
    say which call they are of, so that an entry is complete when it is there; ``bulk`` (bytes
    [2, size, bulk_per_rank]) is complete when the call's number is among the ``signals`` (int32
    [2, MAX_PROGRAMS, size], of a call's first and second part). Words and bulk are of two calls in turn, and by sender.

    The number of the call lies on the device, so that a captured graph may be replayed.
    """

    rank: int
    size: int
    words_per_rank: int  # entries of a call from one sender; even
    bulk_per_rank: int  # bytes of a call from one sender; a multiple of 16
    addresses: Tensor  # int64 [size]: where each rank's memory begins, as this rank's kernels reach it; multiples of 16
    calls: Tensor  # int32 [MAX_PROGRAMS]: how many calls there were; all the same, each program reads its own

    @property
    def words_bytes(self) -> int:
        return 2 * self.size * self.words_per_rank * 8

    @property
    def bulk_bytes(self) -> int:
        return 2 * self.size * self.bulk_per_rank

    @staticmethod
    def bytes_needed(size: int, words_per_rank: int, bulk_per_rank: int) -> int:
        """Return the bytes of a rank's memory, which is to be zeroed before the first call of any rank."""
        return 2 * size * (8 * words_per_rank + bulk_per_rank) + 2 * 4 * MAX_PROGRAMS * size
