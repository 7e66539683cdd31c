"""Granite 3 and 4, dense (arXiv:2408.13359): Llama with factors of embeddings, scores, residuals and logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from ..layers.decoder import Decoder, SelfAttention
from ..layers.mlp import GatedMLP
from ..model_config import ConfigReader, ModelConfig
from ..weights.gguf_names import GgufNames
from ..weights.scope import WeightScope


@dataclass(frozen=True, slots=True, kw_only=True)
class GraniteConfig(ModelConfig):
    attention_scale: float  # factor of q k^T
    residual_scale: float  # factor of what attention and feed-forward add to the residual

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        keys = ConfigReader(hf)
        return cls(
            **keys.decoder(),
            attention_bias=keys.flag("attention_bias"),
            mlp_bias=keys.flag("mlp_bias"),
            attention_scale=keys.number("attention_multiplier", 1.0),
            residual_scale=keys.number("residual_multiplier", 1.0),
            embedding_scale=keys.number("embedding_multiplier", 1.0),
            logit_scale=1 / keys.number("logits_scaling", 1.0, above=0),
            sliding_windows=keys.windows(None),
        )


class Granite(Decoder[GraniteConfig]):
    config_class = GraniteConfig
    gguf = GgufNames(interleaved=("q_proj", "k_proj"))

    def make_attention(self, index: int, scope: WeightScope, **options: Any) -> SelfAttention:
        factors = {"scale": self.config.attention_scale, "out_scale": self.config.residual_scale}
        return super().make_attention(index, scope, **factors, **options)

    def make_mlp(self, scope: WeightScope, **options: Any) -> GatedMLP:
        return super().make_mlp(scope, out_scale=self.config.residual_scale, **options)
