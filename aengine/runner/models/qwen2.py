"""Qwen2 and 2.5 (Yang et al. 2024, arXiv:2407.10671): q, k and v have biases, nothing else has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from ..layers.decoder import Decoder, SelfAttention
from ..model_config import ConfigReader, ModelConfig
from ..weights.gguf_names import GgufNames
from ..weights.scope import WeightScope


class Qwen2Config(ModelConfig):
    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        keys = ConfigReader(hf)
        window = keys.window(is_on=keys.flag("use_sliding_window"))
        return cls(
            **keys.decoder(),
            sliding_windows=keys.windows(window, first_layer=keys.integer("max_window_layers", 28, least=0)),
        )


class Qwen2(Decoder[Qwen2Config]):
    config_class = Qwen2Config
    gguf = GgufNames()

    def make_attention(self, index: int, scope: WeightScope, **options: Any) -> SelfAttention:
        return super().make_attention(index, scope, qkv_bias=True, **options)
