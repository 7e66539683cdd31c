"""The sequences of a step that have several new tokens each, for ops that carry a state from token to token."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Sequences(NamedTuple):
    """m sequences, whose new tokens lie one after the other, and whose states are pages of a memory."""

    lens: tuple[int, ...]  # host [m]: new tokens of each, 1 or more
    starts_host: Tensor  # int64 [m + 1], on the CPU: the first token of each, and past the last
    starts: Tensor  # `starts_host` on the device
    owners: Tensor  # int32 [num_tokens]: the sequence of each token
    pages: Tensor  # int64 [m]: where each keeps its state
    begins: Tensor  # bool [m]: the sequence has no state yet, whatever its page holds
