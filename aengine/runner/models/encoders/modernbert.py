"""ModernBERT (Warner et al. 2024, arXiv:2412.13663): rotary positions, gated feed-forward, windows in most layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor

from ....kernels.rotary import apply_rotary
from ...layers.embedding import Embedding
from ...layers.encoder import ACTIVATIONS
from ...layers.linear import Linear
from ...layers.norm import LayerNorm
from ...model_config import ConfigReader
from ...pooling.attention import attend
from ...pooling.batch import EncoderBatch
from ...weights.scope import WeightScope
from .encoder import Encoder, EncoderConfig, EncoderRopes

_KINDS = ("full_attention", "sliding_attention")
_THETAS = {"full_attention": ("global_rope_theta", 160_000.0), "sliding_attention": ("local_rope_theta", 10_000.0)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModernBertConfig(EncoderConfig):
    layer_types: tuple[str, ...]
    thetas: Mapping[str, float]  # base of rotary positions, by layer type
    reach: int  # tokens to either side that a query of a windowed layer sees
    norm_bias: bool
    attention_bias: bool
    mlp_bias: bool
    classifier_bias: bool
    classifier_pooling: str
    classifier_activation: str

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        keys = ConfigReader(hf)
        layers, every = keys.integer("num_hidden_layers"), keys.integer("global_attn_every_n_layers", default=3)
        types = keys.layer_types(_KINDS) or [_KINDS[i % every > 0] for i in range(layers)]
        ropes = {kind: keys.at("rope_parameters").at(kind) for kind in _KINDS}
        if any(rope.text("rope_type", "default") != "default" for rope in ropes.values()):
            raise keys.error("rope_parameters", "is not supported; rope_type 'default' is")
        activation = keys.text("classifier_activation", "gelu")
        if activation not in ACTIVATIONS:
            raise keys.error("classifier_activation", f"is not supported; these are: {', '.join(ACTIVATIONS)}")
        return cls(
            **cls.common({"norm_eps": 1e-5, **hf}),
            layer_types=tuple(types),
            thetas={
                kind: ropes[kind].number("rope_theta", keys.number(name, default, above=0), above=0)
                for kind, (name, default) in _THETAS.items()
            },
            reach=keys.integer("local_attention", default=128) // 2,
            norm_bias=keys.flag("norm_bias"),
            attention_bias=keys.flag("attention_bias"),
            mlp_bias=keys.flag("mlp_bias"),
            classifier_bias=keys.flag("classifier_bias"),
            classifier_pooling=keys.text("classifier_pooling", "cls"),
            classifier_activation=activation,
        )


class ModernBertLayer:
    """Attention and a gated feed-forward layer, each with a norm before it; the first layer's attention has none."""

    def __init__(self, config: ModernBertConfig, index: int, weights: WeightScope) -> None:
        size, inner = config.hidden_size, config.intermediate_size
        norm = (size, config.norm_eps, config.norm_bias)
        self.kind = config.layer_types[index]
        self.attention_norm = LayerNorm(weights.at("attn_norm"), *norm) if index else None
        self.qkv = Linear(weights.at("attn"), size, {"Wqkv": 3 * size}, config.attention_bias)
        self.attention_out = Linear(weights.at("attn"), size, {"Wo": size}, config.attention_bias)
        self.mlp_norm = LayerNorm(weights.at("mlp_norm"), *norm)
        self.up = Linear(weights.at("mlp"), size, {"Wi": 2 * inner}, config.mlp_bias)
        self.down = Linear(weights.at("mlp"), inner, {"Wo": size}, config.mlp_bias)
        self._num_heads = config.num_heads
        self._reach = config.reach if self.kind == "sliding_attention" else None
        self._activation = ACTIVATIONS[config.activation]

    def __call__(self, x: Tensor, batch: EncoderBatch, cos: Tensor, sin: Tensor) -> Tensor:
        normed = x if self.attention_norm is None else self.attention_norm(x)
        heads = self.qkv.multiply(normed).view(len(x), 3 * self._num_heads, -1)
        apply_rotary(heads[:, : 2 * self._num_heads], cos, sin)
        q, k, v = heads.chunk(3, dim=1)
        x = x + self.attention_out.multiply(attend(q, k, v, batch, reach=self._reach))
        inner, gate = self.up.multiply(self.mlp_norm(x)).chunk(2, dim=1)
        return x + self.down.multiply(self._activation(inner) * gate)


class ModernBert(Encoder[ModernBertConfig]):
    config_class = ModernBertConfig
    base = "model"

    def __init__(self, config: ModernBertConfig, weights: WeightScope) -> None:
        super().__init__(config, weights)
        base, size = weights.at(self.base), config.hidden_size
        norm = (size, config.norm_eps, config.norm_bias)
        self.words = Embedding(base.at("embeddings.tok_embeddings"), config.vocab_size, size)
        self.norm = LayerNorm(base.at("embeddings.norm"), *norm)
        self.layers = [ModernBertLayer(config, i, base.at(f"layers.{i}")) for i in range(config.num_layers)]
        self.final_norm = LayerNorm(base.at("final_norm"), *norm)
        self._ropes = EncoderRopes({kind: config.rope_of(theta) for kind, theta in config.thetas.items()})
        if config.labels:
            self.head = Linear(weights.at("head"), size, {"dense": size}, config.classifier_bias)
            self.head_norm = LayerNorm(weights.at("head.norm"), *norm)
            self.classifier = Linear(weights, size, {"classifier": len(config.labels)}, bias=True)

    def embed(self, batch: EncoderBatch) -> Tensor:
        return self.norm(self.words(batch.input_ids))

    def run_layers(self, x: Tensor, batch: EncoderBatch) -> Tensor:
        rows = self._ropes.at(batch.positions, x.dtype)
        for layer in self.layers:
            x = layer(x, batch, *rows[layer.kind])
        return self.final_norm(x)

    def classify(self, hidden: Tensor, batch: EncoderBatch) -> Tensor:
        pooled = (
            batch.mean(hidden).to(hidden.dtype) if self.config.classifier_pooling == "mean" else batch.first(hidden)
        )
        inner = ACTIVATIONS[self.config.classifier_activation](self.head.multiply(pooled))
        return self.classifier.multiply(self.head_norm(inner))
