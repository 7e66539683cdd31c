"""SmolLM3: Llama of which every fourth layer does not rotate q and k (Yang et al. 2025, arXiv:2501.18795)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from ..layers.decoder import Decoder, DecoderLayer, SelfAttention
from ..layers.mlp import GatedMLP
from ..model_config import ConfigReader, ModelConfig
from ..weights.gguf_names import GgufNames
from ..weights.scope import WeightScope

__all__ = ["SmolLM3", "SmolLM3Config"]

_DEFAULTS = {"num_key_value_heads": 4, "rope_theta": 2_000_000.0, "tie_word_embeddings": True}
"""What config.json may leave out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SmolLM3Config(ModelConfig):
    attention_bias: bool
    mlp_bias: bool
    rotates: tuple[bool, ...]  # [num_layers]: the layer has rotary positions

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        keys = ConfigReader(hf, _DEFAULTS)
        layers, interval = keys.integer("num_hidden_layers"), keys.integer("no_rope_layer_interval", default=4)
        given = keys.integers("no_rope_layers")
        if given and len(given) < layers:
            raise keys.error("no_rope_layers", f"must have an entry for each of {layers} layers")
        rotates = map(bool, given[:layers]) if given else ((i + 1) % interval != 0 for i in range(layers))
        window = keys.window(is_on=keys.flag("use_sliding_window"))
        return cls(
            **keys.decoder(),
            attention_bias=keys.flag("attention_bias"),
            mlp_bias=keys.flag("mlp_bias"),
            rotates=tuple(rotates),
            sliding_windows=keys.windows(window),
        )


class SmolLM3(Decoder[SmolLM3Config]):
    config_class = SmolLM3Config
    gguf = GgufNames(interleaved=("q_proj", "k_proj"))

    def make_layer(self, index: int, weights: WeightScope) -> DecoderLayer:
        config, bias = self.config, self.config.attention_bias
        rope = 0 if config.rotates[index] else None
        attention = SelfAttention(config, index, weights.at("self_attn"), qkv_bias=bias, o_bias=bias, rope=rope)
        sizes = config.hidden_size, config.intermediate_size
        mlp = GatedMLP(weights.at("mlp"), *sizes, activation=config.activation, bias=config.mlp_bias)
        return DecoderLayer(config, weights, attention, mlp)
