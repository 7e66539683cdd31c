"""StarCoder2 (Lozhkov et al. 2024, arXiv:2402.19173): layer norms, no gates, biases everywhere, windows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from ..layers.mlp import MLP
from ..layers.own_norms import LayerNormDecoder, LayerNormLayer
from ..model_config import ConfigReader, ModelConfig
from ..weights.gguf_names import GgufNames
from ..weights.scope import WeightScope

_DEFAULTS = {
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 4096,
    "norm_epsilon": 1e-5,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
"""What config.json may leave out."""


class Starcoder2Config(ModelConfig):
    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        keys = ConfigReader(hf, _DEFAULTS)
        fields, bias = keys.decoder(norm_eps="norm_epsilon"), keys.flag("use_bias", True)
        return cls(**fields, sliding_windows=keys.windows(keys.window()), attention_bias=bias, mlp_bias=bias)


class Starcoder2(LayerNormDecoder[Starcoder2Config]):
    config_class = Starcoder2Config
    gguf = GgufNames()

    def make_layer(self, index: int, weights: WeightScope) -> LayerNormLayer:
        config, sizes = self.config, (self.config.hidden_size, self.config.intermediate_size)
        attention = self.make_attention(index, weights.at("self_attn"))
        options: dict[str, Any] = {"activation": config.activation, "bias": config.mlp_bias}
        mlp = MLP(weights.at("mlp"), *sizes, names=("c_fc", "c_proj"), **options)
        norms = (self.make_layer_norm(weights.at(name)) for name in ("input_layernorm", "post_attention_layernorm"))
        return LayerNormLayer(next(norms), attention, next(norms), mlp)
