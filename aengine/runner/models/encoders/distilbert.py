"""DistilBERT (Sanh et al. 2019, arXiv:1910.01108): BERT with half of its layers, without types of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import torch

from ...layers.encoder import PostNormLayer
from ...layers.linear import Linear
from ...layers.norm import LayerNorm
from ...weights.scope import WeightScope
from .bert import Bert, BertConfig
from .encoder import ClassificationHead

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


class DistilBert(Bert[DistilBertConfig]):
    config_class = DistilBertConfig
    base = "distilbert"
    layers_at = "transformer.layer"
    gguf = None

    def make_layer(self, weights: WeightScope) -> PostNormLayer:
        config, size, inner = self.config, self.config.hidden_size, self.config.intermediate_size
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

    def make_head(self, size: int, num_labels: int) -> ClassificationHead:
        inner = Linear(self.weights, size, {"pre_classifier": size}, bias=True)
        out = Linear(self.weights, size, {"classifier": num_labels}, bias=True)
        return ClassificationHead(inner, out, torch.relu_)
