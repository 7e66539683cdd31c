"""Interface of heads that draft.

    a text    x_0  x_1  ...  x_n          the target has computed all but x_n, its last token
    a pair at position i < n              the target's states at i, beside the embedding of x_{i+1}
    of the last pair (n - 1)              logits of the first draft, for position n + 1
    then a pair at n, n + 1, ...          the state that the head made for the pair before, beside the draft of it

So ids are one ahead of states; a pair's position is that of its state, for rotary embeddings and for the KV cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from ..causal_lm import CausalLM


class DraftHead(CausalLM, Protocol):
    """A `CausalLM` of few layers, with KV of its own. `forward` gets a pair's ids and states (``received``, which it
    leaves as they are); the rows of what it returns are for `compute_logits` and `recycled`."""

    captured: Sequence[int]
    """The residual streams of the target that it reads: i is the one before layer i, the number of layers that behind
    the last."""

    def combine(self, captured: Tensor) -> Tensor:
        """Return the states of pairs, [n, hidden_size], for the target's streams, [n, len(captured) * their size]."""

    def recycled(self, hidden: Tensor) -> Tensor:
        """Return the states of the pairs that come next, for [n, hidden_size] of what `forward` returned."""

    def token_ids(self, draft_ids: Tensor) -> Tensor:
        """Return the target's ids, int64 [n], for those of the head's vocabulary: the columns of its logits."""
