"""Interface that the class of every family of decoders has."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

from torch import Tensor

from ..distributed.shares import VocabularyShare
from ..layers.attention import AttentionCall
from ..model_config import ModelConfig
from ..weights.gguf_names import GgufNames
from ..weights.scope import WeightScope


class CausalLM(Protocol):
    """A decoder that predicts tokens. It is complete when all ``weights.places`` are filled."""

    config_class: ClassVar[type[ModelConfig]]
    gguf: ClassVar[GgufNames]
    config: ModelConfig
    weights: WeightScope
    vocabulary: VocabularyShare

    def __init__(self, config: Any, weights: WeightScope) -> None: ...

    def forward(
        self, input_ids: Tensor, positions: Tensor, attn: AttentionCall, received: Tensor | None = None
    ) -> Tensor:
        """Return the residual stream after the last layer of this pipeline stage, [num_tokens, hidden_size].

        Args:
            input_ids, positions: int64 [num_tokens]
            received: the residual stream of the stage before, which is changed; None: this is the first stage
        """

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return float32 [n, vocabulary.size] for n rows of what `forward` returns: the logits of this rank's tokens,
        behind which -inf fills up what it lacks."""

    def final_hidden(self, hidden: Tensor) -> Tensor:
        """Return [n, hidden_size], after the last norm, for n rows of what `forward` returns."""
