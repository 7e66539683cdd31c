"""MPNet (Song et al. 2020, arXiv:2004.09297): BERT's layers, with a bias to each attention score by distance."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from ...layers.embedding import Embedding
from ...model_config import ConfigReader
from ...pooling.batch import EncoderBatch
from ...weights.scope import WeightScope
from .bert import BertConfig, BertEmbeddings, make_bert_layer
from .encoder import Encoder
from .roberta import RobertaHead

__all__ = ["MPNet", "MPNetConfig"]

FIRST_POSITION = 2  # behind the padding token's, whose id is 1
FARTHEST = 128  # distances from here on share a bucket


@dataclass(frozen=True, slots=True, kw_only=True)
class MPNetConfig(BertConfig):
    num_buckets: int

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        buckets = ConfigReader(hf).integer("relative_attention_num_buckets", default=32, least=4, most=1 << 16)
        common = cls.common(hf, first_position=FIRST_POSITION)
        return cls(**common, **cls._tables(hf, FIRST_POSITION, has_types=False), num_buckets=buckets)


class MPNet(Encoder[MPNetConfig]):
    config_class = MPNetConfig
    base = "mpnet"

    def __init__(self, config: MPNetConfig, weights: WeightScope) -> None:
        self.config = config
        self.weights = weights
        base, size = weights.at(self.base), config.hidden_size
        self.embeddings = BertEmbeddings(config, base.at("embeddings"))
        self.distances = Embedding(base.at("encoder.relative_attention_bias"), config.num_buckets, config.num_heads)
        names: dict[str, Any] = {"qkv": ("attn.q", "attn.k", "attn.v"), "out": "attn.o", "norm": "LayerNorm"}
        layers = base.at("encoder.layer")
        self.layers = [make_bert_layer(config, layers.at(str(i)), **names) for i in range(config.num_layers)]
        if config.labels:
            self.head = RobertaHead(weights.at("classifier"), size, len(config.labels))

    def forward(self, batch: EncoderBatch) -> Tensor:
        x = self.embeddings(batch)
        biases = batch.biases(self._bias)
        for layer in self.layers:
            x = layer(x, batch, biases)
        return x

    def classify(self, hidden: Tensor, batch: EncoderBatch) -> Tensor:
        return self.head(batch.first(hidden))

    def _bias(self, distance: Tensor) -> Tensor:
        """[num_heads, length, length] for int64 distances [length, length], of the key behind the query."""
        half = self.config.num_buckets // 2
        near, far = half // 2, distance.abs()
        log = torch.log(far.clamp(min=1).float() / near) / math.log(FARTHEST / near)
        bucket = torch.where(far < near, far, (near + (log * (half - near)).long()).clamp(max=half - 1))
        bucket = bucket + (distance > 0).long() * half
        return self.distances(bucket.flatten()).view(*bucket.shape, -1).permute(2, 0, 1)
