"""Mistral (Jiang et al. 2023, arXiv:2310.06825): in the first release every layer has a sliding window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from ..layers.decoder import Decoder, DecoderLayer, SelfAttention
from ..layers.mlp import GatedMLP
from ..model_config import ConfigReader, ModelConfig
from ..weights.gguf_names import GgufNames
from ..weights.scope import WeightScope

__all__ = ["Mistral", "MistralConfig"]


class MistralConfig(ModelConfig):
    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        keys = ConfigReader(hf)
        return cls(**keys.decoder(), sliding_windows=keys.windows(keys.get("sliding_window")))


class Mistral(Decoder[MistralConfig]):
    config_class = MistralConfig
    gguf = GgufNames(interleaved=("q_proj", "k_proj"))

    def make_layer(self, index: int, weights: WeightScope) -> DecoderLayer:
        config, scope = self.config, weights.at("self_attn")
        attention = SelfAttention(config, index, scope)
        sizes = config.hidden_size, config.intermediate_size
        mlp = GatedMLP(weights.at("mlp"), *sizes, activation=config.activation)
        return DecoderLayer(config, weights, attention, mlp)
