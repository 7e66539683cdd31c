"""Qwen3, dense (Yang et al. 2025, arXiv:2505.09388): q and k are normalised head by head, before rotary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from ..layers.decoder import Decoder, DecoderLayer, SelfAttention
from ..layers.mlp import GatedMLP
from ..layers.norm import RMSNorm
from ..model_config import ConfigReader, ModelConfig
from ..weights.gguf_names import GgufNames
from ..weights.scope import WeightScope

__all__ = ["Qwen3", "Qwen3Config"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3Config(ModelConfig):
    attention_bias: bool

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        keys = ConfigReader(hf)
        window = keys.window(is_on=keys.flag("use_sliding_window"))
        return cls(
            **keys.decoder(),
            attention_bias=keys.flag("attention_bias"),
            sliding_windows=keys.windows(window, first_layer=keys.integer("max_window_layers", 28, least=0)),
        )


class Qwen3(Decoder[Qwen3Config]):
    config_class = Qwen3Config
    reranks_by_yes = True
    gguf = GgufNames()

    def make_layer(self, index: int, weights: WeightScope) -> DecoderLayer:
        config, scope = self.config, weights.at("self_attn")
        bias = config.attention_bias
        q_norm = RMSNorm(scope.at("q_norm"), config.head_dim, config.rms_norm_eps)
        k_norm = RMSNorm(scope.at("k_norm"), config.head_dim, config.rms_norm_eps)
        attention = SelfAttention(config, index, scope, qkv_bias=bias, o_bias=bias, q_norm=q_norm, k_norm=k_norm)
        sizes = config.hidden_size, config.intermediate_size
        mlp = GatedMLP(weights.at("mlp"), *sizes, activation=config.activation)
        return DecoderLayer(config, weights, attention, mlp)
