"""EXAONE 4 (LG AI Research 2025, arXiv:2507.11407): norms after attention and feed-forward instead of before them, and
of each head of q and k. In the large model three layers of four have windows, and the others no rotary positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from ..layers.decoder import Decoder, SelfAttention
from ..layers.own_norms import NormAfterLayer
from ..model_config import ConfigReader, ModelConfig
from ..weights.gguf_names import GgufNames
from ..weights.scope import WeightScope

_DEFAULTS = {"rms_norm_eps": 1e-5, "num_key_value_heads": 32, "sliding_window": 4096}
"""What config.json may leave out."""


class Exaone4Config(ModelConfig):
    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        keys = ConfigReader(hf, _DEFAULTS)
        window, types = keys.window(), keys.layer_types(("full_attention", "sliding_attention"))
        if not types:
            pattern = keys.integer("sliding_window_pattern", 4) if window else 1
            layers = range(1, keys.integer("num_hidden_layers") + 1)
            types = ["sliding_attention" if i % pattern else "full_attention" for i in layers]
        keys = ConfigReader({**hf, "layer_types": types}, _DEFAULTS)
        return cls(
            **keys.decoder(),
            sliding_windows=keys.windows(window),
            rope_of_layers=tuple(0 if window is None or kind == "sliding_attention" else None for kind in types),
        )


class Exaone4(Decoder[Exaone4Config]):
    config_class = Exaone4Config
    gguf = GgufNames()

    def make_layer(self, index: int, weights: WeightScope) -> NormAfterLayer:
        post_norm = self.make_norm(weights.at("post_attention_layernorm"))
        attention = self.make_attention(index, weights.at("self_attn"), post_norm=post_norm)
        post_norm = self.make_norm(weights.at("post_feedforward_layernorm"))
        return NormAfterLayer(attention, self.make_mlp(weights.at("mlp"), post_norm=post_norm))

    def make_attention(self, index: int, scope: WeightScope, **options: Any) -> SelfAttention:
        return super().make_attention(index, scope, **self.head_norms(scope), **options)
