"""Qwen3 with mixtures of experts (Yang et al. 2025, arXiv:2505.09388): Qwen3, but most layers, or all, route."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from ...kernels.expert_types import ExpertGate, RoutingRule
from ..layers.decoder import Decoder, FeedForward, SelfAttention
from ..layers.moe import Experts, MoE, Router
from ..model_config import ConfigReader, ModelConfig
from ..weights.gguf_names import EXPERT_NAMES, GgufNames
from ..weights.scope import WeightScope

_DEFAULTS = {"num_experts_per_tok": 8, "num_key_value_heads": 4, "moe_intermediate_size": 768}
"""What config.json may leave out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3MoeConfig(ModelConfig):
    moe_intermediate_size: int
    routing: RoutingRule
    dense_layers: frozenset[int]

    divided = ("num_heads", "intermediate_size", "moe_intermediate_size")
    expert_sizes = ("moe_intermediate_size",)

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        keys = ConfigReader(hf, _DEFAULTS)
        num_experts = keys.num_experts(128)
        step, dense = keys.integer("decoder_sparse_step", default=1), keys.layer_set("mlp_only_layers")
        layers = range(keys.integer("num_hidden_layers"))
        # llama.cpp has no key for the norm of the weights: its graph of this architecture renormalises.
        renormalise = keys.flag("norm_topk_prob") or keys.is_gguf
        return cls(
            **keys.decoder(has_experts=True),
            attention_bias=keys.flag("attention_bias"),
            sliding_windows=keys.windows(keys.window(is_on=keys.flag("use_sliding_window"))),
            num_experts=num_experts,
            moe_intermediate_size=keys.integer("moe_intermediate_size"),
            routing=RoutingRule(keys.experts_per_token(num_experts), renormalise=renormalise),
            dense_layers=frozenset(i for i in layers if i in dense or not num_experts or (i + 1) % step),
        )


class Qwen3Moe(Decoder[Qwen3MoeConfig]):
    config_class = Qwen3MoeConfig
    gguf = GgufNames(layer=EXPERT_NAMES)

    def make_attention(self, index: int, scope: WeightScope, **options: Any) -> SelfAttention:
        return super().make_attention(index, scope, **self.head_norms(scope), **options)

    def make_feed_forward(self, index: int, weights: WeightScope) -> FeedForward:
        config, size, scope = self.config, self.config.hidden_size, weights.at("mlp")
        if index in config.dense_layers:
            return self.make_mlp(scope)
        router = Router(scope, size, config.num_experts, config.routing)
        sizes, gate = (size, config.moe_intermediate_size, config.num_experts), ExpertGate(config.activation)
        return MoE(size, router, Experts(scope.at("experts"), *sizes, gate=gate))
