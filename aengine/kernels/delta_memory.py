"""What the gated delta rule computes of tokens behind which some may be rejected; see drafted_states.py."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class DeltaMemory(NamedTuple):
    """The states of a layer's pages, any stride from page to page."""

    states: Tensor  # float32 [num_pages, num_value_heads, key_dim, value_dim]
    pending: Tensor  # float32 [num_pages, length, keys + values + 2 * num_value_heads]: k, v, decay, beta of a token
    tags: Tensor  # int32 [num_pages, length]


class DeltaInputs(NamedTuple):
    """See `gated_delta_of_tokens` in gated_delta.py."""

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    beta: Tensor

    def of(self, places: Tensor) -> DeltaInputs:
        return DeltaInputs(*(x.index_select(0, places) for x in self))
