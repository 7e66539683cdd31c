"""Phi-1 (Gunasekar et al. 2023, arXiv:2306.11644), 1.5 and 2: attention and feed-forward of one layer norm, side by
side; no gates, biases everywhere, also of the logits; a part of each head turns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from ..layers.mlp import MLP
from ..layers.own_norms import LayerNormDecoder, ParallelLayer
from ..model_config import ConfigReader, ModelConfig, NotNativeError
from ..weights.gguf_names import GgufNames
from ..weights.scope import WeightScope

_DEFAULTS = {
    "hidden_act": "gelu_new",
    "layer_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
    "partial_rotary_factor": 0.5,
}
"""What config.json may leave out."""


class PhiConfig(ModelConfig):
    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        keys = ConfigReader(hf, _DEFAULTS)
        if keys.flag("qk_layernorm"):
            raise NotNativeError("config.json: qk_layernorm: norms of q and k are computed by transformers' code only")
        if keys.flag("tie_word_embeddings"):
            raise NotNativeError(
                "config.json: tie_word_embeddings: the head's bias is then computed by transformers' code only"
            )
        return cls(**keys.decoder(norm_eps="layer_norm_eps"), sliding_windows=keys.windows(None))


class Phi(LayerNormDecoder[PhiConfig]):
    config_class = PhiConfig
    gguf = GgufNames()
    last_norm = "model.final_layernorm"
    has_head_bias = True

    def make_layer(self, index: int, weights: WeightScope) -> ParallelLayer:
        config, biases = self.config, {"qkv_bias": True, "o_bias": True}
        attention = self.make_attention(index, weights.at("self_attn"), out_name="dense", **biases)
        sizes = config.hidden_size, config.intermediate_size
        mlp = MLP(weights.at("mlp"), *sizes, activation=config.activation, names=("fc1", "fc2"))
        return ParallelLayer(self.make_layer_norm(weights.at("input_layernorm")), attention, mlp)
