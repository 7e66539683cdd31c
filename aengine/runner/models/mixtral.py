"""Mixtral (Jiang et al. 2024, arXiv:2401.04088): Mistral, with two of eight experts in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from ...kernels.expert_types import ExpertGate, RoutingRule
from ..layers.decoder import Decoder, FeedForward
from ..layers.moe import Experts, MoE, Router
from ..model_config import ConfigReader, ModelConfig
from ..weights.gguf_names import GgufNames
from ..weights.scope import WeightScope

_DEFAULTS = {"num_experts_per_tok": 2, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0}
"""What config.json may leave out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtralConfig(ModelConfig):
    experts_per_token: int

    expert_sizes = ("intermediate_size",)

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        keys = ConfigReader(hf, _DEFAULTS)
        num_experts = keys.num_experts(8)
        return cls(
            **keys.decoder(has_experts=True),
            sliding_windows=keys.windows(keys.window()),
            num_experts=num_experts,
            experts_per_token=keys.experts_per_token(num_experts),
        )


class Mixtral(Decoder[MixtralConfig]):
    config_class = MixtralConfig
    gguf = GgufNames()  # llama.cpp converts it as a model of Llama, which has no experts here

    def make_feed_forward(self, index: int, weights: WeightScope) -> FeedForward:
        config, size, scope = self.config, self.config.hidden_size, weights.at("block_sparse_moe")
        router = Router(scope, size, config.num_experts, RoutingRule(config.experts_per_token))
        experts = Experts(
            scope.at("experts"),
            size,
            config.intermediate_size,
            config.num_experts,
            gate=ExpertGate(config.activation),
            gate_up=("w1", "w3"),
            down="w2",
        )
        return MoE(size, router, experts)
