"""Qwen3, dense (Yang et al. 2025, arXiv:2505.09388): q and k are normalised head by head, before rotary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from ..layers.decoder import Decoder, SelfAttention
from ..model_config import ConfigReader, ModelConfig
from ..weights.gguf_names import GgufNames
from ..weights.scope import WeightScope


class Qwen3Config(ModelConfig):
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

    def make_attention(self, index: int, scope: WeightScope, **options: Any) -> SelfAttention:
        return super().make_attention(index, scope, **self.head_norms(scope), **options)
