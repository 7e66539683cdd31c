"""GLM-4, dense (Zhipu AI 2025: GLM-4-0414, GLM-Z1): norms before and after both parts of a layer; gate and up are one
tensor of the checkpoint; half of each head turns, neighbours in pairs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from ..layers.decoder import Decoder, DecoderLayer
from ..model_config import ConfigReader, ModelConfig
from ..weights.gguf_names import PACKED_LAYER, GgufNames
from ..weights.scope import WeightScope

_DEFAULTS = {
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1.5625e-7,
    "head_dim": 128,
    "num_key_value_heads": 2,
}
"""What config.json may leave out."""


class Glm4Config(ModelConfig):
    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        keys = ConfigReader(hf, _DEFAULTS)
        return cls(
            **keys.decoder(interleaved_rope=True),
            sliding_windows=keys.windows(None),
            attention_bias=keys.flag("attention_bias"),
        )


class Glm4(Decoder[Glm4Config]):
    config_class = Glm4Config
    gguf = GgufNames(layer=PACKED_LAYER).renamed(
        {
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
        }
    )

    def make_layer(self, index: int, weights: WeightScope) -> DecoderLayer:
        post_norm = self.make_norm(weights.at("post_self_attn_layernorm"))
        attention = self.make_attention(index, weights.at("self_attn"), o_bias=False, post_norm=post_norm)
        post_norm = self.make_norm(weights.at("post_mlp_layernorm"))
        mlp = self.make_mlp(weights.at("mlp"), packed=True, post_norm=post_norm)
        norms = (self.make_norm(weights.at(name)) for name in ("input_layernorm", "post_attention_layernorm"))
        return DecoderLayer(next(norms), attention, next(norms), mlp)
