"""Qwen3, dense (Yang et al. 2025, arXiv:2505.09388): q and k are normalised head by head, before rotary.

            ┌─ norm ─ qkv ─ norm of q, k ─ rotary ─ attention ─ o ─┐     ┌─ norm ─ gate, up ─ silu·mul ─ down ─┐
residual ───┴──────────────────────────────────────────────────────+─────┴─────────────────────────────────────+───

Each norm is a part of the product after it, each sum of the product before it, so that both can be one kernel; norms of
q and k and rotary are a part of the attention, for the same reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from ..layers.attention import AttentionCall, AttentionLayer
from ..layers.embedding import Embedding
from ..layers.linear import Linear
from ..layers.mlp import GatedMLP
from ..layers.norm import RMSNorm
from ..model_config import ConfigReader, ModelConfig
from ..weights.gguf_names import GgufNames
from ..weights.scope import WeightScope

__all__ = ["Qwen3", "Qwen3Config"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3Config(ModelConfig):
    attention_bias: bool

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        keys = ConfigReader(hf)
        window = keys.get("sliding_window") if keys.flag("use_sliding_window") else None
        return cls(
            **keys.decoder(),
            attention_bias=keys.flag("attention_bias"),
            sliding_windows=keys.windows(window, first_layer=int(hf.get("max_window_layers", 28))),
        )


class Attention:
    def __init__(self, config: Qwen3Config, index: int, weights: WeightScope) -> None:
        qkv = {"q_proj": config.q_size, "k_proj": config.kv_size, "v_proj": config.kv_size}
        self.qkv = Linear(weights, config.hidden_size, qkv, config.attention_bias)
        self.q_norm = RMSNorm(weights.at("q_norm"), config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(weights.at("k_norm"), config.head_dim, config.rms_norm_eps)
        self.o = Linear(weights, config.q_size, {"o_proj": config.hidden_size}, config.attention_bias)
        self.layer = AttentionLayer.make(config, index, self.q_norm, self.k_norm)

    def __call__(self, residual: Tensor, norm: RMSNorm, attn: AttentionCall) -> None:
        qkv = self.qkv.after_norm(residual, norm)
        self.o.add_to(residual, attn.forward(self.layer, qkv))


class DecoderLayer:
    def __init__(self, config: Qwen3Config, index: int, weights: WeightScope) -> None:
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_norm = RMSNorm(weights.at("input_layernorm"), size, eps)
        self.attention = Attention(config, index, weights.at("self_attn"))
        self.post_attention_norm = RMSNorm(weights.at("post_attention_layernorm"), size, eps)
        self.mlp = GatedMLP(weights.at("mlp"), size, config.intermediate_size)

    def __call__(self, residual: Tensor, attn: AttentionCall) -> None:
        """Change the residual stream [num_tokens, hidden_size] in place."""
        self.attention(residual, self.input_norm, attn)
        self.mlp(residual, self.post_attention_norm)


class Qwen3:
    config_class = Qwen3Config
    gguf = GgufNames()

    def __init__(self, config: Qwen3Config, weights: WeightScope) -> None:
        self.config = config
        self.weights = weights
        size, vocab_size = config.hidden_size, config.vocab_size
        self.embed = Embedding(weights.at("model.embed_tokens"), vocab_size, size)
        self.layers = [DecoderLayer(config, i, weights.at(f"model.layers.{i}")) for i in range(config.num_layers)]
        self.norm = RMSNorm(weights.at("model.norm"), size, config.rms_norm_eps)
        head = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
        self.lm_head = Linear(weights, size, {head: vocab_size})

    def forward(self, input_ids: Tensor, positions: Tensor, attn: AttentionCall) -> Tensor:
        """The residual stream after the last layer, [num_tokens, hidden_size]; ids, positions: int64 [num_tokens]."""
        residual = self.embed(input_ids)
        attn.begin(positions)
        for layer in self.layers:
            layer(residual, attn)
        return residual

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """float32 [n, vocab_size] for n rows of what `forward` returns."""
        return self.lm_head.after_norm(hidden, self.norm, torch.float32)
