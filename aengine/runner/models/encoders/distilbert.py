"""DistilBERT (Sanh et al. 2019, arXiv:1910.01108): BERT with half of its layers, without types of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from torch import Tensor

from ...layers.encoder import PostNormLayer
from ...layers.linear import Linear
from ...layers.norm import LayerNorm
from ...pooling.batch import EncoderBatch
from ...weights.scope import WeightScope
from .bert import BertConfig, BertEmbeddings
from .encoder import Encoder

__all__ = ["DistilBert", "DistilBertConfig"]

_SETTINGS = {
    "hidden_size": "dim",
    "intermediate_size": "hidden_dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "hidden_act": "activation",
}
"""BERT's names of its settings, and its own."""


class DistilBertConfig(BertConfig):
    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        own = {name: hf[key] for name, key in _SETTINGS.items() if key in hf}
        common = cls.common({**hf, **own, "layer_norm_eps": 1e-12})
        return cls(**common, **cls._tables(hf, has_types=False))


class DistilBert(Encoder[DistilBertConfig]):
    config_class = DistilBertConfig
    base = "distilbert"

    def __init__(self, config: DistilBertConfig, weights: WeightScope) -> None:
        self.config = config
        self.weights = weights
        base, size = weights.at(self.base), config.hidden_size
        self.embeddings = BertEmbeddings(config, base.at("embeddings"))
        self.layers = [_make_layer(config, base.at(f"transformer.layer.{i}")) for i in range(config.num_layers)]
        if config.labels:
            self.pre_classifier = Linear(weights, size, {"pre_classifier": size}, bias=True)
            self.classifier = Linear(weights, size, {"classifier": len(config.labels)}, bias=True)

    def forward(self, batch: EncoderBatch) -> Tensor:
        x = self.embeddings(batch)
        for layer in self.layers:
            x = layer(x, batch)
        return x

    def classify(self, hidden: Tensor, batch: EncoderBatch) -> Tensor:
        return self.classifier.multiply(self.pre_classifier.multiply(batch.first(hidden)).relu_())


def _make_layer(config: DistilBertConfig, weights: WeightScope) -> PostNormLayer:
    size, inner = config.hidden_size, config.intermediate_size
    return PostNormLayer(
        num_heads=config.num_heads,
        activation=config.activation,
        qkv=Linear(weights.at("attention"), size, {"q_lin": size, "k_lin": size, "v_lin": size}, bias=True),
        attention_out=Linear(weights.at("attention"), size, {"out_lin": size}, bias=True),
        attention_norm=LayerNorm(weights.at("sa_layer_norm"), size, config.norm_eps),
        up=Linear(weights.at("ffn"), size, {"lin1": inner}, bias=True),
        down=Linear(weights.at("ffn"), inner, {"lin2": size}, bias=True),
        norm=LayerNorm(weights.at("output_layer_norm"), size, config.norm_eps),
    )
