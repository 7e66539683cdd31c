"""MPNet (Song et al. 2020, arXiv:2004.09297): BERT's layers, with a bias to each attention score by distance."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from ...layers.embedding import Embedding
from ...layers.encoder import PostNormLayer
from ...model_config import ConfigReader
from ...pooling.batch import EncoderBatch
from ...weights.scope import WeightScope
from .bert import BertConfig, make_bert_layer
from .roberta import Roberta

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


class MPNet(Roberta[MPNetConfig]):
    config_class = MPNetConfig
    base = "mpnet"

    def __init__(self, config: MPNetConfig, weights: WeightScope) -> None:
        super().__init__(config, weights)
        table = weights.at(f"{self.base}.encoder.relative_attention_bias")
        self.distances = Embedding(table, config.num_buckets, config.num_heads)

    def make_layer(self, weights: WeightScope) -> PostNormLayer:
        return make_bert_layer(self.config, weights, qkv=("attn.q", "attn.k", "attn.v"), out="attn.o", norm="LayerNorm")

    def biases(self, batch: EncoderBatch) -> list[Tensor]:
        return batch.biases(self._bias)

    def _bias(self, distance: Tensor) -> Tensor:
        """Return [num_heads, length, length] for int64 distances [length, length], of the key behind the query."""
        half = self.config.num_buckets // 2
        near, far = half // 2, distance.abs()
        log = torch.log(far.clamp(min=1).float() / near) / math.log(FARTHEST / near)
        bucket = torch.where(far < near, far, (near + (log * (half - near)).long()).clamp(max=half - 1))
        bucket = bucket + (distance > 0).long() * half
        return self.distances(bucket.flatten()).view(*bucket.shape, -1).permute(2, 0, 1)
