"""StableLM (Bellagente et al. 2024, arXiv:2402.17834): Llama with layer norms, of which a part of each head turns; in
some releases attention and feed-forward are side by side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from ..layers.own_norms import LayerNormDecoder, LayerNormLayer, ParallelLayer
from ..model_config import ConfigReader, ModelConfig, NotNativeError
from ..weights.gguf_names import GgufNames
from ..weights.scope import WeightScope

_DEFAULTS = {
    "layer_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "num_key_value_heads": 32,
    "partial_rotary_factor": 0.25,
}
"""What config.json may leave out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StableLMConfig(ModelConfig):
    has_qkv_bias: bool
    is_parallel: bool

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        keys = ConfigReader(hf, _DEFAULTS)
        if keys.flag("qk_layernorm"):
            raise NotNativeError("config.json: qk_layernorm: norms of q and k are computed by transformers' code only")
        return cls(
            **keys.decoder(norm_eps="layer_norm_eps"),
            sliding_windows=keys.windows(None),
            has_qkv_bias=keys.flag("use_qkv_bias"),
            is_parallel=keys.flag("use_parallel_residual"),
        )


class StableLM(LayerNormDecoder[StableLMConfig]):
    config_class = StableLMConfig
    gguf = GgufNames()

    def make_layer(self, index: int, weights: WeightScope) -> LayerNormLayer | ParallelLayer:
        config = self.config
        norm = self.make_layer_norm(weights.at("input_layernorm"))
        attention = self.make_attention(index, weights.at("self_attn"), qkv_bias=config.has_qkv_bias)
        mlp = self.make_mlp(weights.at("mlp"))
        if config.is_parallel:
            return ParallelLayer(norm, attention, mlp)
        return LayerNormLayer(norm, attention, self.make_layer_norm(weights.at("post_attention_layernorm")), mlp)
