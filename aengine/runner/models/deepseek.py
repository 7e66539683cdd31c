"""DeepSeek-V2 (DeepSeek-AI 2024, arXiv:2405.04434), V3 (arXiv:2412.19437) and their kin. Keys and values of all heads
are made of one latent vector a token, and of a key that turns, which the heads share:

                ┌─ q_a ─ norm ─ q_b ─────────────┐ q: a part that turns, one that does not, of each head
residual ─ norm ┤
                └─ kv_a ┬─ norm ─ latent ─ kv_b ─┤ k that does not turn, and v, of each head
                        └────────────────────────┘ k that turns

Only the latent and what turns are kept. Small models have one product in place of q_a and q_b. Feed-forward layers but
the first are mixtures of experts (Dai et al. 2024, arXiv:2401.06066): some that all tokens take, and some that are
chosen, of the best groups of experts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self, TypeVar

import torch
from torch import Tensor

from ...kernels.expert_types import ExpertGate, RoutingRule
from ..kv_spec import LatentKV, LayerKV
from ..layers.attention import AttentionCall, AttentionLayer
from ..layers.decoder import Decoder, FeedForward, Mixer
from ..layers.linear import Features, HeadMatrices, Linear
from ..layers.mlp import GatedMLP
from ..layers.moe import Experts, MoE, Router, SharedExpert
from ..layers.norm import RMSNorm
from ..model_config import ConfigReader, ModelConfig, NotNativeError
from ..rope import RopeConfig
from ..weights.gguf_names import GgufNames
from ..weights.scope import WeightScope

_LATENT_EPS = 1e-6
"""Epsilon of the norms of what queries, keys and values are made of, whatever config.json says of the others."""
_V3: Mapping[str, Any] = {
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 3,
    "norm_topk_prob": True,
    "q_lora_rank": 1536,
}
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "deepseek_v2": {
        "moe_intermediate_size": 1407,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "first_k_dense_replace": 0,
        "q_lora_rank": 1536,
    },
    "deepseek_v3": _V3,
    "kimi_k2": _V3,
    "glm4_moe_lite": {
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1536,
        "n_routed_experts": 64,
        "routed_scaling_factor": 1.8,
        "norm_topk_prob": True,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "rms_norm_eps": 1e-5,
    },
}
"""What config.json may leave out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureConfig(ModelConfig):
    """Config of a model with experts that are chosen and such that are not, but for dense layers."""

    moe_intermediate_size: int
    shared_intermediate_size: int
    routing: RoutingRule
    dense_layers: frozenset[int]

    divided = ("num_heads", "intermediate_size", "moe_intermediate_size", "shared_intermediate_size")
    expert_sizes = ("moe_intermediate_size",)

    @staticmethod
    def mixture(
        keys: ConfigReader, scoring: Literal["softmax", "sigmoid"] = "sigmoid", *, has_groups: bool = True
    ) -> dict[str, Any]:
        """Return the fields of the mixtures. With "softmax" a group is as good as its best expert, and weights don't
        add up to one."""
        num_experts, size = keys.integer("n_routed_experts", default=128), keys.integer("moe_intermediate_size")
        num_groups = keys.integer("n_group", default=1) if has_groups else 1
        top_groups = keys.integer("topk_group", default=1) if has_groups else 1
        if num_experts % num_groups:
            raise keys.error("n_group", f"does not divide n_routed_experts={num_experts}")
        top_k, most = keys.experts_per_token(num_experts), num_experts // num_groups * top_groups
        if top_groups > num_groups or top_k > most:
            raise keys.error("topk_group", f"of n_group={num_groups} have not the {top_k} experts that a token takes")
        routing = RoutingRule(
            top_k,
            scoring,
            renormalise=scoring == "sigmoid" and keys.flag("norm_topk_prob"),
            scale=keys.number("routed_scaling_factor", 1.0),
            num_groups=num_groups,
            top_groups=top_groups,
        )
        num_dense, step = keys.integer("first_k_dense_replace", default=1, least=0), keys.integer("moe_layer_freq", 1)
        kinds, layers = keys.texts("mlp_layer_types"), range(keys.integer("num_hidden_layers"))
        if kinds and (len(kinds) != len(layers) or not set(kinds) <= {"dense", "sparse"}):
            raise keys.error("mlp_layer_types", f"must say dense or sparse of each of {len(layers)} layers")
        return {
            "num_experts": num_experts,
            "moe_intermediate_size": size,
            "shared_intermediate_size": size * keys.integer("n_shared_experts", default=1),
            "routing": routing,
            "dense_layers": frozenset(
                i for i in layers if (kinds[i] == "dense" if kinds else i < num_dense or i % step)
            ),
        }


Config = TypeVar("Config", bound=MixtureConfig)


class MixtureDecoder(Decoder[Config]):
    def make_feed_forward(self, index: int, weights: WeightScope) -> FeedForward:
        config, size, scope = self.config, self.config.hidden_size, weights.at("mlp")
        if index in config.dense_layers:
            return self.make_mlp(scope)
        how: dict[str, Any] = {"activation": config.activation, "bias": config.mlp_bias}
        shared = GatedMLP(scope.at("shared_experts"), size, config.shared_intermediate_size, **how)
        correction = "gate.e_score_correction_bias" if config.routing.scoring == "sigmoid" else None
        router = Router(scope, size, config.num_experts, config.routing, correction=correction)
        sizes, gate = (size, config.moe_intermediate_size, config.num_experts), ExpertGate(config.activation)
        return MoE(size, router, Experts(scope.at("experts"), *sizes, gate=gate), SharedExpert(shared))


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekConfig(MixtureConfig):
    q_rank: int  # size of what queries are made of; 0: of the residual stream
    kv_rank: int  # size of what keys and values are made of
    rope_dim: int  # elements of a query, and of a key, that turn
    plain_dim: int  # that don't
    value_dim: int
    score_scale: float

    has_tape = False

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        model_type = str(hf.get("model_type"))
        is_v2 = model_type == "deepseek_v2"
        keys = ConfigReader(hf, _DEFAULTS[model_type])
        rope_dim = keys.integer("qk_rope_head_dim", default=64)
        plain_dim, value_dim = keys.integer("qk_nope_head_dim", default=128), keys.integer("v_head_dim", default=128)
        q_rank = keys.integer_or_none("q_lora_rank") or 0
        if keys.flag("attention_bias") and not q_rank:
            raise NotNativeError("config.json: attention_bias without q_lora_rank is for transformers' code")
        method = keys.text("topk_method", "greedy" if is_v2 else "noaux_tc")
        if method not in (("greedy", "group_limited_greedy") if is_v2 else ("noaux_tc",)):
            raise keys.error("topk_method", "is no way of choosing experts that this model's family has")
        kv_rank = keys.integer("kv_lora_rank", default=512)
        # All heads see the latents. Where checkpoints have a head_dim, it is rope_dim.
        sizes = {"head_dim": rope_dim + kv_rank, "num_key_value_heads": 1}
        fields = ConfigReader({**_DEFAULTS[model_type], **hf, **sizes}).decoder(has_experts=True)
        fields["ropes"] = keys.ropes(
            rope_dim, fields["max_position_embeddings"], is_v2 or keys.flag("rope_interleave", True)
        )
        scoring: Literal["softmax", "sigmoid"] = "softmax" if is_v2 else "sigmoid"
        if fields["ropes"][0].scaling.get("llama_4_scaling_beta"):
            raise NotNativeError("config.json: llama_4_scaling_beta of latents is for transformers' code")
        return cls(
            **fields,
            **cls.mixture(keys, scoring, has_groups=method != "greedy"),
            attention_bias=keys.flag("attention_bias"),
            mlp_bias=keys.flag("mlp_bias"),
            sliding_windows=keys.windows(None),
            q_rank=q_rank,
            kv_rank=kv_rank,
            rope_dim=rope_dim,
            plain_dim=plain_dim,
            value_dim=value_dim,
            score_scale=(rope_dim + plain_dim) ** -0.5 * _temperature(fields["ropes"][0]) ** 2,
        )

    @property
    def kv_layers(self) -> tuple[LayerKV, ...]:
        return (LatentKV(1, self.head_dim, self.kv_rank),) * self.num_layers


def _temperature(rope: RopeConfig) -> float:
    """Return YaRN's factor of queries and keys as wholes; that of what turns alone is the rope's own."""
    factor, share = float(rope.scaling.get("factor", 1.0)), float(rope.scaling.get("mscale_all_dim", 0.0))
    return 1.0 if rope.rope_type == "default" or factor <= 1 else 0.1 * share * math.log(factor) + 1.0


class LatentAttention:
    """Attention to latents. What makes keys of them is a product of the queries instead, what makes values one of the
    output: q (W c) = (W^T q) c, so that no head has keys of its own."""

    def __init__(self, config: DeepseekConfig, index: int, scope: WeightScope) -> None:
        heads, size, dim = config.num_heads, config.hidden_size, config.rope_dim + config.plain_dim
        q = scope.share(heads * dim)
        latents: dict[str, Features] = {
            "q_a_proj" if config.q_rank else "q_proj": config.q_rank or q,
            "kv_a_proj_with_mqa": config.kv_rank + config.rope_dim,
        }
        self.latents = Linear(scope, size, latents, config.attention_bias)
        self.q: Linear | None = None
        if config.q_rank:
            self.q_norm = RMSNorm(scope.at("q_a_layernorm"), config.q_rank, _LATENT_EPS)
            self.q = Linear(scope, config.q_rank, {"q_b_proj": q})
        self.kv_norm = RMSNorm(scope.at("kv_a_layernorm"), config.kv_rank, _LATENT_EPS)
        of_heads = scope.share(heads * (config.plain_dim + config.value_dim))
        self.kv = HeadMatrices(scope, "kv_b_proj", of_heads, config.kv_rank, heads)
        self.out = Linear(scope, scope.share(heads * config.value_dim), {"o_proj": size}, config.attention_bias)
        self.layer = AttentionLayer.make(config, index, scale=config.score_scale)
        self._parts = [config.q_rank or heads * dim, config.kv_rank, config.rope_dim]
        self._plain_dim = config.plain_dim

    def __call__(self, residual: Tensor, norm: RMSNorm, attn: AttentionCall) -> None:
        """Add the output for norm(residual) to ``residual`` [num_tokens, hidden_size], in place."""
        q, latent, k_turned = self.latents.after_norm(residual, norm).split(self._parts, 1)
        if self.q is not None:
            q = self.q.after_norm(q.contiguous(), self.q_norm)
        heads = self.layer.num_heads
        matrices = self.kv.matrices  # rows of each head: those of its keys, those of its values
        q = q.unflatten(1, (heads, -1))
        q_plain, q_turned = q[..., : self._plain_dim], q[..., self._plain_dim :]
        q_latent = torch.bmm(q_plain.transpose(0, 1), matrices[:, : self._plain_dim]).transpose(0, 1)
        latents = torch.cat((k_turned, self.kv_norm(latent)), 1)
        seen = attn.attend_to_latents(self.layer, torch.cat((q_turned, q_latent), 2), latents)
        seen = seen.unflatten(1, (heads, -1)).transpose(0, 1)
        values = torch.bmm(seen, matrices[:, self._plain_dim :].transpose(1, 2))
        self.out.add_to(residual, values.transpose(0, 1).flatten(1))


class Deepseek(MixtureDecoder[DeepseekConfig]):
    config_class = DeepseekConfig
    gguf = GgufNames()

    def make_mixer(self, index: int, weights: WeightScope) -> Mixer:
        return LatentAttention(self.config, index, weights.at("self_attn"))
