"""RoBERTa (Liu et al. 2019, arXiv:1907.11692) and XLM-RoBERTa (Conneau et al. 2019, arXiv:1911.02116): BERT's layers;
positions begin behind that of the padding token, and the head is another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor

from ...layers.linear import Linear
from ...model_config import ConfigReader
from ...pooling.batch import EncoderBatch
from ...weights.scope import WeightScope
from .bert import BertConfig, BertEmbeddings, make_bert_layer
from .encoder import Encoder

__all__ = ["Roberta", "RobertaConfig", "RobertaHead", "XlmRoberta"]


class RobertaConfig(BertConfig):
    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        first = 1 + ConfigReader(hf).integer("pad_token_id", 1, least=0)
        return cls(**cls.common(hf, first_position=first), **cls._tables(hf, first))


class RobertaHead:
    """A layer with tanh, and a matrix, over a text's first token."""

    def __init__(self, weights: WeightScope, size: int, num_labels: int) -> None:
        self._dense = Linear(weights, size, {"dense": size}, bias=True)
        self._out = Linear(weights, size, {"out_proj": num_labels}, bias=True)

    def __call__(self, first: Tensor) -> Tensor:
        return self._out.multiply(torch.tanh(self._dense.multiply(first)))


class Roberta(Encoder[RobertaConfig]):
    config_class = RobertaConfig
    base = "roberta"

    def __init__(self, config: RobertaConfig, weights: WeightScope) -> None:
        self.config = config
        self.weights = weights
        base = weights.at(self.base)
        self.embeddings = BertEmbeddings(config, base.at("embeddings"))
        self.layers = [make_bert_layer(config, base.at(f"encoder.layer.{i}")) for i in range(config.num_layers)]
        if config.labels:
            self.head = RobertaHead(weights.at("classifier"), config.hidden_size, len(config.labels))

    def forward(self, batch: EncoderBatch) -> Tensor:
        x = self.embeddings(batch)
        for layer in self.layers:
            x = layer(x, batch)
        return x

    def classify(self, hidden: Tensor, batch: EncoderBatch) -> Tensor:
        return self.head(batch.first(hidden))


class XlmRoberta(Roberta):
    """RoBERTa over many languages: another vocabulary."""
