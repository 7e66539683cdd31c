"""GLM-4.5 to 4.7 (Zhipu AI 2025, arXiv:2508.06471): mixtures of experts chosen by scores of their own, beside an expert
that all tokens take, but for the first layers, which are dense; half of each head turns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from ..layers.decoder import SelfAttention
from ..model_config import ConfigReader
from ..weights.gguf_names import GgufNames
from ..weights.scope import WeightScope
from .deepseek import MixtureConfig, MixtureDecoder

_DEFAULTS = {
    "partial_rotary_factor": 0.5,
    "num_key_value_heads": 8,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1408,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-5,
}
"""What config.json may leave out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Glm4MoeConfig(MixtureConfig):
    has_head_norms: bool

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        keys = ConfigReader(hf, _DEFAULTS)
        return cls(
            **keys.decoder(has_experts=True),
            **cls.mixture(keys),
            attention_bias=keys.flag("attention_bias"),
            sliding_windows=keys.windows(None),
            has_head_norms=keys.flag("use_qk_norm"),
        )


class Glm4Moe(MixtureDecoder[Glm4MoeConfig]):
    config_class = Glm4MoeConfig
    gguf = GgufNames()

    def make_attention(self, index: int, scope: WeightScope, **options: Any) -> SelfAttention:
        norms = self.head_norms(scope) if self.config.has_head_norms else {}
        return super().make_attention(index, scope, o_bias=False, **norms, **options)
