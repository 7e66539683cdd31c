"""Interface of every family's class."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

from torch import Tensor

from ..layers.attention import AttentionCall
from ..model_config import ModelConfig
from ..weights.gguf_names import GgufNames
from ..weights.scope import WeightScope

__all__ = ["CausalLM"]


class CausalLM(Protocol):
    """A decoder that predicts tokens. It is complete when all ``weights.places`` are filled."""

    config_class: ClassVar[type[ModelConfig]]
    gguf: ClassVar[GgufNames]
    config: ModelConfig
    weights: WeightScope

    def __init__(self, config: Any, weights: WeightScope) -> None: ...

    def forward(self, input_ids: Tensor, positions: Tensor, attn: AttentionCall) -> Tensor:
        """The residual stream after the last layer, [num_tokens, hidden_size]; ids, positions: int64 [num_tokens]."""

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """float32 [n, vocab_size] for n rows of what `forward` returns."""

    def final_hidden(self, hidden: Tensor) -> Tensor:
        """[n, hidden_size], after the last norm, for n rows of what `forward` returns."""
