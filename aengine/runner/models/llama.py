"""Llama 2 and 3 (Touvron et al. 2023, arXiv:2307.09288), SmolLM2, and others of this shape. Biases are optional."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from ..layers.decoder import Decoder, DecoderLayer, SelfAttention
from ..layers.mlp import GatedMLP
from ..model_config import ConfigReader, ModelConfig
from ..weights.gguf_names import GgufNames
from ..weights.scope import WeightScope

__all__ = ["Llama", "LlamaConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig(ModelConfig):
    attention_bias: bool
    mlp_bias: bool

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        keys = ConfigReader(hf)
        # llama.cpp converts Mistral's models as Llama's, with the window beside. In a config.json it means nothing.
        window = keys.window(is_on=keys.is_gguf)
        return cls(
            **keys.decoder(),
            attention_bias=keys.flag("attention_bias"),
            mlp_bias=keys.flag("mlp_bias"),
            sliding_windows=keys.windows(window),
        )


class Llama(Decoder[LlamaConfig]):
    config_class = LlamaConfig
    gguf = GgufNames(interleaved=("q_proj", "k_proj"))

    def make_layer(self, index: int, weights: WeightScope) -> DecoderLayer:
        config, scope = self.config, weights.at("self_attn")
        bias = config.attention_bias
        attention = SelfAttention(config, index, scope, qkv_bias=bias, o_bias=bias)
        sizes = config.hidden_size, config.intermediate_size
        mlp = GatedMLP(weights.at("mlp"), *sizes, bias=config.mlp_bias, activation=config.activation)
        return DecoderLayer(config, weights, attention, mlp)
