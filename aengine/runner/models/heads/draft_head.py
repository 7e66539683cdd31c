"""Interface of what drafts on the device: heads on a model's states, and whole models, which read tokens alone.

    a text    x_0  x_1  ...  x_n          the target has computed all but x_n, its last token
    a pair at position i < n              the target's states at i, beside the embedding of x_{i+1}
    of the last pair (n - 1)              logits of the first draft, for position n + 1
    then a pair at n, n + 1, ...          the state that the head made for the pair before, beside the draft of it

So ids are one ahead of states; a pair's position is that of its state, for rotary embeddings and for the KV cache.
Heads of one pass have masks in place of the drafts that they do not know yet.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ....errors import ModelLoadError
from ...distributed.shares import VocabularyShare
from ...layers.attention import AttentionCall
from ...model_config import ConfigReader, ModelConfig


class DraftHead(ABC):
    """A `CausalLM` of few layers, with KV of its own."""

    config: Any  # a `ModelConfig`
    vocabulary: VocabularyShare
    captured: Sequence[int] = ()
    """The residual streams of the target that it reads: i is the one before layer i, the number of layers that behind
    the last. None: it reads tokens alone, each at its own position."""

    @abstractmethod
    def combine(self, captured: Tensor) -> Tensor:
        """Return the states of pairs, [n, hidden_size], for the target's streams, [n, len(captured) * their size]."""

    @abstractmethod
    def forward(
        self, input_ids: Tensor, positions: Tensor, attn: AttentionCall, received: Tensor | None = None
    ) -> Tensor:
        """See `CausalLM`: of pairs' ids and states (``received``, which stays as it is). The rows of what it returns
        are for `compute_logits` and `recycled`."""

    def remember(
        self, input_ids: Tensor, positions: Tensor, attn: AttentionCall, received: Tensor | None = None
    ) -> None:
        """Write the keys and values of pairs."""
        self.forward(input_ids, positions, attn, received)

    def recycled(self, hidden: Tensor) -> Tensor | None:
        """Return the states of the pairs that come next, for [n, hidden_size] of what `forward` returned."""
        return hidden

    @abstractmethod
    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return float32 [n, vocabulary.size] for what `forward` returned."""

    def token_ids(self, draft_ids: Tensor) -> Tensor:
        """Return the target's ids, int64 [n], for those of the head's vocabulary: the columns of its logits."""
        return draft_ids


class OnePassHead(DraftHead):
    """Drafts all tokens of a row in one pass: behind the pairs there are places that hold a mask."""

    mask_token_id: int
    predicts_itself: bool
    """Whether a mask's logits are of the token at its place, rather than of the one behind it as a pair's are. Then the
    text's last token is before the masks."""
    sees_masks: bool
    """Whether each of these places sees those behind it too."""
    most_drafts: int
    """Number of masks it was trained with."""

    @abstractmethod
    def draft(
        self, input_ids: Tensor, positions: Tensor, attn: AttentionCall, received: Tensor, are_drafted: Tensor
    ) -> Tensor:
        """`forward` of pairs and of the places behind them, of which ``are_drafted`` (bool [n]) is true, and whose
        ``received`` says nothing."""


class WholeModel(DraftHead):
    """A model that drafts by tokens alone."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.config, self.vocabulary = model.config, model.vocabulary

    def combine(self, captured: Tensor) -> Tensor:
        raise AssertionError("it reads no states")

    def forward(self, input_ids: Tensor, positions: Tensor, attn: Any, received: Tensor | None = None) -> Tensor:
        hidden: Tensor = self._model.forward(input_ids, positions, attn)
        return hidden

    def recycled(self, hidden: Tensor) -> Tensor | None:
        return None

    def compute_logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self._model.compute_logits(hidden)
        return logits


def check_fits(keys: ConfigReader, fields: dict[str, Any], target: ModelConfig) -> None:
    """Raise ModelLoadError if a head of these fields of `ModelConfig` reads another model's tokens or states."""
    if fields["vocab_size"] != target.vocab_size:
        raise keys.error("vocab_size", f"is not the target's, {target.vocab_size}: the head is another model's")
    size = keys.integer_or_none("target_hidden_size") or fields["hidden_size"]
    if size != target.hidden_size:
        raise ModelLoadError(
            f"config.json: the head reads states of {size} elements (target_hidden_size, or hidden_size), and the "
            f"target's have {target.hidden_size}: the head is another model's"
        )


def mask_of(keys: ConfigReader, names: Sequence[str], vocab_size: int) -> int:
    """Return the token that masks hold, under the first of ``names`` that there is. Raises ModelLoadError."""
    name = next((name for name in names if keys.raw(name) is not None), None)
    if name is None:
        raise ModelLoadError(
            f"config.json names no token that masks hold: it has none of {', '.join(map(repr, names))}"
        )
    token_id = keys.integer(name, least=0)
    if token_id >= vocab_size:
        raise keys.error(name, f"is no token of the model that it drafts for, which has 0 to {vocab_size - 1}")
    return token_id
