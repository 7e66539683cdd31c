"""Qwen2 and 2.5 (Yang et al. 2024, arXiv:2407.10671): q, k and v have biases, nothing else has.

            ┌─ norm ─ qkv ─ rotary ─ attention ─ o ─┐     ┌─ norm ─ gate, up ─ silu·mul ─ down ─┐
residual ───┴───────────────────────────────────────+─────┴─────────────────────────────────────+───

Each norm is a part of the product after it, each sum of the product before it, so that both can be one kernel; rotary
is a part of the attention, for the same reason.
"""

from __future__ import annotations

from collections.abc import Mapping
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

__all__ = ["Qwen2", "Qwen2Config"]


class Qwen2Config(ModelConfig):
    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        keys = ConfigReader(hf)
        window = keys.get("sliding_window") if keys.flag("use_sliding_window") else None
        return cls(
            **keys.decoder(),
            sliding_windows=keys.windows(window, first_layer=int(hf.get("max_window_layers", 28))),
        )


class Attention:
    def __init__(self, config: Qwen2Config, index: int, weights: WeightScope) -> None:
        qkv = {"q_proj": config.q_size, "k_proj": config.kv_size, "v_proj": config.kv_size}
        self.qkv = Linear(weights, config.hidden_size, qkv, bias=True)
        self.o = Linear(weights, config.q_size, {"o_proj": config.hidden_size})
        self.layer = AttentionLayer.make(config, index)

    def __call__(self, residual: Tensor, norm: RMSNorm, attn: AttentionCall) -> None:
        qkv = self.qkv.after_norm(residual, norm)
        self.o.add_to(residual, attn.forward(self.layer, qkv))


class DecoderLayer:
    def __init__(self, config: Qwen2Config, index: int, weights: WeightScope) -> None:
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_norm = RMSNorm(weights.at("input_layernorm"), size, eps)
        self.attention = Attention(config, index, weights.at("self_attn"))
        self.post_attention_norm = RMSNorm(weights.at("post_attention_layernorm"), size, eps)
        self.mlp = GatedMLP(weights.at("mlp"), size, config.intermediate_size)

    def __call__(self, residual: Tensor, attn: AttentionCall) -> None:
        """Change the residual stream [num_tokens, hidden_size] in place."""
        self.attention(residual, self.input_norm, attn)
        self.mlp(residual, self.post_attention_norm)


class Qwen2:
    config_class = Qwen2Config
    gguf = GgufNames()

    def __init__(self, config: Qwen2Config, weights: WeightScope) -> None:
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
