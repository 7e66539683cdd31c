"""gpt-oss (OpenAI 2025, arXiv:2508.10925): every layer routes, every other one has a window, each head's softmax has a
sink, everything has biases. The release keeps its experts in MXFP4."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from ...kernels.expert_types import ExpertGate, RoutingRule
from ..layers.attention import HeadSinks
from ..layers.decoder import Decoder, FeedForward, SelfAttention
from ..layers.moe import Experts, MoE, Router
from ..model_config import ConfigReader, ModelConfig
from ..weights.gguf_names import EXPERT_NAMES, GgufNames
from ..weights.packed_experts import Mxfp4Experts, TransposedExperts
from ..weights.scope import WeightScope

_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_DEFAULTS = {
    "attention_bias": True,
    "rope_parameters": _ROPE,
    "num_experts_per_tok": 4,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150_000.0,
    "sliding_window": 128,
    "head_dim": 64,
}
"""What config.json may leave out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GptOssConfig(ModelConfig):
    experts_per_token: int
    gate: ExpertGate
    is_gguf: bool
    is_mxfp4: bool

    expert_sizes = ("intermediate_size",)

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        keys = ConfigReader(hf, _DEFAULTS)
        num_experts, layers, is_gguf = keys.num_experts(128), keys.integer("num_hidden_layers"), keys.is_gguf
        own: dict[str, Any] = {}
        if is_gguf:  # GGUF has no key for YaRN's "truncate"
            scaling = keys.mapping("rope_scaling")
            own["rope_parameters"] = {**scaling, "truncate": False} if scaling else None
        if not keys.texts("layer_types"):
            alternate = ("sliding_attention", "full_attention")
            own["layer_types"] = [alternate[layer % 2] for layer in range(layers)]
        keys = ConfigReader({**hf, **own}, _DEFAULTS)
        alpha, limit = keys.number("swiglu_alpha", 1.702), keys.number("swiglu_limit", 7.0)
        return cls(
            **keys.decoder(has_experts=True),
            attention_bias=keys.flag("attention_bias"),
            sliding_windows=keys.windows(keys.integer("sliding_window")),
            num_experts=num_experts,
            experts_per_token=keys.experts_per_token(num_experts),
            gate=ExpertGate("clamped_swiglu", is_interleaved=not is_gguf, alpha=alpha, limit=limit),
            is_gguf=is_gguf,
            is_mxfp4=keys.mapping("quantization_config").get("quant_method") == "mxfp4",
        )


class GptOss(Decoder[GptOssConfig]):
    config_class = GptOssConfig
    gguf = GgufNames(
        layer={
            **EXPERT_NAMES,
            "post_attention_norm": "post_attention_layernorm",
            "attn_sinks": "self_attn.sinks",
            "ffn_gate_inp": "mlp.router",
        }
    )

    def make_attention(self, index: int, scope: WeightScope, **options: Any) -> SelfAttention:
        sinks = HeadSinks(scope, self.config.num_heads, "sinks.weight" if self.config.is_gguf else "sinks")
        return super().make_attention(index, scope, sinks=sinks, **options)

    def make_feed_forward(self, index: int, weights: WeightScope) -> FeedForward:
        config, size, mlp = self.config, self.config.hidden_size, weights.at("mlp")
        rule = RoutingRule(config.experts_per_token)
        router = Router(mlp, size, config.num_experts, rule, name="router", bias=True)
        layout = Mxfp4Experts() if config.is_mxfp4 else TransposedExperts()
        experts = Experts(
            mlp.at("experts"),
            size,
            config.intermediate_size,
            config.num_experts,
            gate=config.gate,
            gate_up=("gate_proj", "up_proj") if config.is_gguf else ("gate_up_proj",),
            bias=True,
            layout=None if config.is_gguf else layout,
        )
        return MoE(size, router, experts)
