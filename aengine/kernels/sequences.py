"""The sequences of a step that have several new tokens each, for ops that carry a state from token to token."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

CHUNK = 64
"""Tokens that the gated delta rule computes at once."""


def chunks_of(lens: Iterable[int]) -> npt.NDArray[np.int64]:
    """Return `Sequences.chunks` of sequences of so many tokens."""
    counts = [-(-length // CHUNK) for length in lens]
    return np.array([(i, j) for i, count in enumerate(counts) for j in range(count)], dtype=np.int64)


class Sequences(NamedTuple):
    """m sequences, whose new tokens lie one after the other, and whose states are pages of a memory."""

    lens: tuple[int, ...]  # host [m]: new tokens of each, 1 or more
    starts: Tensor  # int64 [m + 1]: the first token of each, and past the last
    owners: Tensor  # int32 [num_tokens]: the sequence of each token
    pages: Tensor  # int64 [m]: where each keeps its state
    begins: Tensor  # bool [m]: the sequence has no state yet, whatever its page holds
    chunks: Tensor  # int64 [k, 2]: of each chunk of `CHUNK` tokens its sequence, and its number there
