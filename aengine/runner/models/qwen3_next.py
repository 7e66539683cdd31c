"""Qwen3-Next and Qwen3.5: three of four layers are gated delta nets, the fourth attends with q and k normalised head by
head, rotary on a part of each head, and a gate on its output. Feed-forward layers are mixtures of experts, with one
that all tokens take, or dense. Norms have their weight less one in the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from ...kernels.expert_types import ExpertGate, RoutingRule
from ..kv_spec import FullKV, LayerKV
from ..layers.attention import AttentionCall, AttentionLayer
from ..layers.decoder import Decoder, FeedForward, Mixer
from ..layers.gated_delta_net import DeltaProducts, DeltaSizes, GatedDeltaNet
from ..layers.linear import Features, Linear
from ..layers.mlp import GatedMLP
from ..layers.moe import Experts, MoE, Router, SharedExpert
from ..layers.norm import RMSNorm
from ..model_config import ConfigReader, ModelConfig
from ..weights.gguf_names import GgufNames
from ..weights.scope import WeightScope

_DEFAULTS = {"head_dim": 256, "num_key_value_heads": 2, "partial_rotary_factor": 0.25}
_DEFAULTS_OF: Mapping[str, Mapping[str, Any]] = {
    "qwen3_next": {
        "intermediate_size": 5632,
        "moe_intermediate_size": 512,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "shared_expert_intermediate_size": 512,
    },
    "qwen3_5_text": {"num_key_value_heads": 4},
    "qwen3_5_moe_text": {
        "moe_intermediate_size": 512,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "shared_expert_intermediate_size": 512,
    },
}
"""What config.json may leave out. Qwen3.5 always renormalises the weights of the experts that a token takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3NextConfig(ModelConfig):
    is_linear: tuple[bool, ...]  # [num_layers]: the layer is a gated delta net; the others attend
    delta: DeltaSizes
    moe_intermediate_size: int
    shared_intermediate_size: int
    routing: RoutingRule
    dense_layers: frozenset[int]  # all, if there are no experts

    divided = ("num_heads", "intermediate_size", "delta", "moe_intermediate_size", "shared_intermediate_size")
    expert_sizes = ("moe_intermediate_size",)
    has_tape = False

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        # A model of experts alone has no size of dense layers.
        defaults = {**_DEFAULTS, **_DEFAULTS_OF.get(str(hf.get("model_type")), {})}
        own = {"intermediate_size": hf.get("moe_intermediate_size", defaults.get("moe_intermediate_size"))}
        keys = ConfigReader(hf, {**own, **defaults})
        num_layers = keys.integer("num_hidden_layers")
        interval = keys.integer("full_attention_interval", default=4)
        kinds = keys.layer_types(("linear_attention", "full_attention")) or [
            "linear_attention" if (i + 1) % interval else "full_attention" for i in range(num_layers)
        ]
        num_experts = keys.num_experts()
        step, dense = keys.integer("decoder_sparse_step", default=1), keys.layer_set("mlp_only_layers")
        inner = keys.integer("moe_intermediate_size", default=0)
        return cls(
            **keys.decoder(has_experts=True),
            sliding_windows=(None,) * num_layers,
            is_linear=tuple(kind == "linear_attention" for kind in kinds),
            delta=DeltaSizes(
                num_key_heads=keys.integer("linear_num_key_heads", default=16),
                num_value_heads=keys.integer("linear_num_value_heads", default=32),
                key_dim=keys.integer("linear_key_head_dim", default=128),
                value_dim=keys.integer("linear_value_head_dim", default=128),
                conv_width=keys.integer("linear_conv_kernel_dim", default=4),
            ),
            attention_bias=keys.flag("attention_bias"),
            num_experts=num_experts,
            moe_intermediate_size=inner,
            shared_intermediate_size=keys.integer("shared_expert_intermediate_size", default=inner),
            routing=RoutingRule(
                keys.experts_per_token(num_experts) if num_experts else 1,
                renormalise=keys.text("model_type") != "qwen3_next" or keys.flag("norm_topk_prob", True),
            ),
            dense_layers=frozenset(i for i in range(num_layers) if i in dense or not num_experts or (i + 1) % step),
        )

    @property
    def kv_layers(self) -> tuple[LayerKV, ...]:
        kept = FullKV(self.num_kv_heads, self.head_dim)
        return tuple(self.delta.state if is_linear else kept for is_linear in self.is_linear)


class GatedAttention:
    """Attention whose output is multiplied by a sigmoid."""

    def __init__(
        self, config: Qwen3NextConfig, index: int, scope: WeightScope, q_norm: RMSNorm, k_norm: RMSNorm
    ) -> None:
        size, bias = config.hidden_size, config.attention_bias
        q_and_gate, kv = scope.share(2 * config.q_size), scope.share(config.kv_size, config.kv_copies)
        self.qkv = Linear(scope, size, {"q_proj": q_and_gate, "k_proj": kv, "v_proj": kv}, bias)
        self.out = Linear(scope, scope.share(config.q_size), {"o_proj": size}, bias)
        self.layer = AttentionLayer.make(config, index, q_norm, k_norm)

    def __call__(self, residual: Tensor, norm: RMSNorm, attn: AttentionCall) -> None:
        """Add the output for norm(residual) to ``residual`` [num_tokens, hidden_size], in place."""
        layer = self.layer
        product = self.qkv.after_norm(residual, norm)
        q_and_gate, kv = product.split(
            [2 * layer.num_heads * layer.head_dim, 2 * layer.num_kv_heads * layer.head_dim], 1
        )
        q, gate = q_and_gate.unflatten(1, (layer.num_heads, 2, layer.head_dim)).unbind(2)
        out = attn.forward(layer, torch.cat((q.flatten(1), kv), 1))
        self.out.add_to(residual, out * gate.flatten(1).sigmoid())


class _JoinedInputs:
    """Two matrices, in which the rows of a key head and of its value heads lie together."""

    def __init__(self, sizes: DeltaSizes, hidden_size: int, scope: WeightScope) -> None:
        self._sizes = sizes
        parts = {"in_proj_qkvz": sizes.channels + sizes.values, "in_proj_ba": 2 * sizes.num_value_heads}
        self._splits = list(parts.values())
        self.product = Linear(scope, hidden_size, {name: scope.share(size) for name, size in parts.items()})

    def __call__(self, residual: Tensor, norm: RMSNorm) -> DeltaProducts:
        sizes = self._sizes
        times = sizes.num_value_heads // sizes.num_key_heads
        qkvz, ba = self.product.after_norm(residual, norm).split(self._splits, 1)
        widths = [sizes.key_dim, sizes.key_dim, times * sizes.value_dim, times * sizes.value_dim]
        q, k, v, z = qkvz.unflatten(1, (sizes.num_key_heads, -1)).split(widths, 2)
        b, a = ba.unflatten(1, (sizes.num_key_heads, -1)).split([times, times], 2)
        qkv = torch.cat((q.flatten(1), k.flatten(1), v.flatten(1)), 1)
        return DeltaProducts(qkv, z.flatten(1), b.flatten(1), a.flatten(1))


class _SeparateInputs:
    """A matrix each."""

    def __init__(self, sizes: DeltaSizes, hidden_size: int, scope: WeightScope) -> None:
        keys, values, heads = (scope.share(size) for size in (sizes.keys, sizes.values, sizes.num_value_heads))
        qkv = (keys, keys, values)
        parts: dict[str, Features] = {"in_proj_qkv": qkv, "in_proj_z": values, "in_proj_b": heads, "in_proj_a": heads}
        self._splits = [sizes.channels, sizes.values, sizes.num_value_heads, sizes.num_value_heads]
        self.product = Linear(scope, hidden_size, parts)

    def __call__(self, residual: Tensor, norm: RMSNorm) -> DeltaProducts:
        return DeltaProducts(*self.product.after_norm(residual, norm).split(self._splits, 1))


class Qwen3Next(Decoder[Qwen3NextConfig]):
    config_class = Qwen3NextConfig
    gguf = GgufNames()
    inputs: type[_JoinedInputs | _SeparateInputs] = _JoinedInputs

    def make_norm(self, weights: WeightScope, size: int | None = None) -> RMSNorm:
        return RMSNorm(weights, size or self.config.hidden_size, self.config.rms_norm_eps, plus_one=True)

    def make_mixer(self, index: int, weights: WeightScope) -> Mixer:
        config = self.config
        if not config.is_linear[index]:
            scope = weights.at("self_attn")
            return GatedAttention(config, index, scope, **self.head_norms(scope))
        scope, size, sizes = weights.at("linear_attn"), config.hidden_size, config.delta
        inputs = self.inputs(sizes, size, scope)
        return GatedDeltaNet(sizes, index, size, config.rms_norm_eps, scope, inputs)

    def make_feed_forward(self, index: int, weights: WeightScope) -> FeedForward:
        config, size, scope = self.config, self.config.hidden_size, weights.at("mlp")
        if index in config.dense_layers:
            return self.make_mlp(scope)
        shared_gate = Linear(scope, size, {"shared_expert_gate": 1})
        shared = GatedMLP(
            scope.at("shared_expert"), size, config.shared_intermediate_size, activation=config.activation
        )
        router = Router(scope, size, config.num_experts, config.routing)
        sizes, gate = (size, config.moe_intermediate_size, config.num_experts), ExpertGate(config.activation)
        experts = Experts(scope.at("experts"), *sizes, gate=gate)
        return MoE(size, router, experts, SharedExpert(shared, shared_gate))


class Qwen35(Qwen3Next):
    """The text model of Qwen3.5."""

    inputs = _SeparateInputs
