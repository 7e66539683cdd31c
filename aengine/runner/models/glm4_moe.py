"""GLM-4.5 to 4.7 (Zhipu AI 2025, arXiv:2508.06471): mixtures of experts chosen by scores of their own, beside an expert
that all tokens take, but for the first layers, which are dense; half of each head turns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from ...kernels.expert_types import ExpertGate, RoutingRule
from ..layers.decoder import Decoder, FeedForward, SelfAttention
from ..layers.mlp import GatedMLP
from ..layers.moe import Experts, MoE, Router, SharedExpert
from ..model_config import ConfigReader, ModelConfig
from ..weights.gguf_names import GgufNames
from ..weights.scope import WeightScope

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
class Glm4MoeConfig(ModelConfig):
    moe_intermediate_size: int
    shared_intermediate_size: int
    routing: RoutingRule
    dense_layers: frozenset[int]
    has_head_norms: bool

    divided = ("num_heads", "intermediate_size", "moe_intermediate_size", "shared_intermediate_size")
    expert_sizes = ("moe_intermediate_size",)

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        keys = ConfigReader(hf, _DEFAULTS)
        num_experts, size = keys.integer("n_routed_experts", default=128), keys.integer("moe_intermediate_size")
        num_groups, top_groups = keys.integer("n_group", default=1), keys.integer("topk_group", default=1)
        if num_experts % num_groups:
            raise keys.error("n_group", f"does not divide n_routed_experts={num_experts}")
        top_k, most = keys.experts_per_token(num_experts), num_experts // num_groups * top_groups
        if top_groups > num_groups or top_k > most:
            raise keys.error("topk_group", f"of n_group={num_groups} have not the {top_k} experts that a token takes")
        routing = RoutingRule(
            top_k,
            "sigmoid",
            renormalise=keys.flag("norm_topk_prob"),
            scale=keys.number("routed_scaling_factor", 1.0),
            num_groups=num_groups,
            top_groups=top_groups,
        )
        num_dense = keys.integer("first_k_dense_replace", default=1, least=0)
        return cls(
            **keys.decoder(has_experts=True),
            attention_bias=keys.flag("attention_bias"),
            sliding_windows=keys.windows(None),
            num_experts=num_experts,
            moe_intermediate_size=size,
            shared_intermediate_size=size * keys.integer("n_shared_experts", default=1),
            routing=routing,
            dense_layers=frozenset(range(min(num_dense, keys.integer("num_hidden_layers")))),
            has_head_norms=keys.flag("use_qk_norm"),
        )


class Glm4Moe(Decoder[Glm4MoeConfig]):
    config_class = Glm4MoeConfig
    gguf = GgufNames()

    def make_attention(self, index: int, scope: WeightScope, **options: Any) -> SelfAttention:
        norms = self.head_norms(scope) if self.config.has_head_norms else {}
        return super().make_attention(index, scope, o_bias=False, **norms, **options)

    def make_feed_forward(self, index: int, weights: WeightScope) -> FeedForward:
        config, size, scope = self.config, self.config.hidden_size, weights.at("mlp")
        if index in config.dense_layers:
            return self.make_mlp(scope)
        shared = GatedMLP(
            scope.at("shared_experts"), size, config.shared_intermediate_size, activation=config.activation
        )
        correction = "gate.e_score_correction_bias"
        router = Router(scope, size, config.num_experts, config.routing, correction=correction)
        sizes, gate = (size, config.moe_intermediate_size, config.num_experts), ExpertGate(config.activation)
        return MoE(size, router, Experts(scope.at("experts"), *sizes, gate=gate), SharedExpert(shared))
