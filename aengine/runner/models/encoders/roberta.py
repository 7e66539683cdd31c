"""RoBERTa (Liu et al. 2019, arXiv:1907.11692) and XLM-RoBERTa (Conneau et al. 2019, arXiv:1911.02116): BERT's layers;
positions begin behind that of the padding token, and the head is another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from ...layers.linear import Linear
from ...model_config import ConfigReader
from .bert import Bert, BertConfig, Config
from .encoder import ClassificationHead, EncoderConfig


class RobertaConfig(BertConfig):
    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        first = 1 + ConfigReader(hf).integer("pad_token_id", 1, least=0)
        return cls(**cls.common(hf, first_position=first), **cls._tables(hf, first))


class Roberta(Bert[Config]):
    config_class: ClassVar[type[EncoderConfig]] = RobertaConfig
    base = "roberta"
    gguf = None

    def make_head(self, size: int, num_labels: int) -> ClassificationHead:
        scope = self.weights.at("classifier")
        inner = Linear(scope, size, {"dense": size}, bias=True)
        return ClassificationHead(inner, Linear(scope, size, {"out_proj": num_labels}, bias=True))


class XlmRoberta(Roberta[RobertaConfig]):
    """RoBERTa over many languages: another vocabulary."""
