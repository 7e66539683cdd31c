"""BERT (Devlin et al. 2018, arXiv:1810.04805): learned positions, two types of tokens, norms behind the sums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeVar

from torch import Tensor

from ...layers.embedding import Embedding
from ...layers.encoder import PostNormLayer
from ...layers.linear import Linear
from ...layers.norm import LayerNorm
from ...model_config import ConfigReader
from ...pooling.batch import EncoderBatch
from ...weights.gguf_names import GgufNames
from ...weights.scope import WeightScope
from .encoder import ClassificationHead, Encoder, EncoderConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class BertConfig(EncoderConfig):
    num_positions: int  # rows of the table of positions
    type_vocab_size: int  # rows of the table of types; 0: there is none
    first_position: int  # row of that table for the first token of a text

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        return cls(**cls.common(hf), **cls._tables(hf))

    @staticmethod
    def _tables(hf: Mapping[str, Any], first_position: int = 0, *, has_types: bool = True) -> dict[str, Any]:
        keys = ConfigReader(hf)
        return {
            "num_positions": keys.integer("max_position_embeddings"),
            "type_vocab_size": keys.integer("type_vocab_size", default=2, least=0) if has_types else 0,
            "first_position": first_position,
        }


Config = TypeVar("Config", bound=BertConfig)


class BertEmbeddings:
    """Tokens, positions and types, if the model has any, summed and normalised."""

    def __init__(self, config: BertConfig, weights: WeightScope) -> None:
        size = config.hidden_size
        self._words = Embedding(weights.at("word_embeddings"), config.vocab_size, size)
        self._positions = Embedding(weights.at("position_embeddings"), config.num_positions, size)
        self._types: Embedding | None = None
        if config.type_vocab_size:
            self._types = Embedding(weights.at("token_type_embeddings"), config.type_vocab_size, size)
        self._norm = LayerNorm(weights.at("LayerNorm"), size, config.norm_eps)
        self._first_position = config.first_position
        self._num_types = config.type_vocab_size

    def __call__(self, batch: EncoderBatch) -> Tensor:
        positions = batch.positions + self._first_position if self._first_position else batch.positions
        x = self._words(batch.input_ids).add_(self._positions(positions))
        if self._types is not None:
            type_ids = batch.type_ids if self._num_types > 1 else None
            x.add_(self._types(batch.input_ids.new_zeros(1) if type_ids is None else type_ids))
        return self._norm(x)


def make_bert_layer(
    config: EncoderConfig,
    weights: WeightScope,
    *,
    qkv: Sequence[str] = ("self.query", "self.key", "self.value"),
    out: str = "output.dense",
    norm: str = "output.LayerNorm",
) -> PostNormLayer:
    """Return a layer under BERT's names. ``qkv``, ``out``, ``norm``: those of its attention, below "attention"."""
    size, eps, attention = config.hidden_size, config.norm_eps, weights.at("attention")
    return PostNormLayer(
        num_heads=config.num_heads,
        activation=config.activation,
        qkv=Linear(attention, size, dict.fromkeys(qkv, size), bias=True),
        attention_out=Linear(attention, size, {out: size}, bias=True),
        attention_norm=LayerNorm(attention.at(norm), size, eps),
        up=Linear(weights.at("intermediate"), size, {"dense": config.intermediate_size}, bias=True),
        down=Linear(weights.at("output"), config.intermediate_size, {"dense": size}, bias=True),
        norm=LayerNorm(weights.at("output.LayerNorm"), size, eps),
    )


_GGUF = GgufNames(
    top={
        "token_embd": "bert.embeddings.word_embeddings",
        "position_embd": "bert.embeddings.position_embeddings",
        "token_types": "bert.embeddings.token_type_embeddings",
        "token_embd_norm": "bert.embeddings.LayerNorm",
    },
    layer={
        "attn_q": "attention.self.query",
        "attn_k": "attention.self.key",
        "attn_v": "attention.self.value",
        "attn_output": "attention.output.dense",
        "attn_output_norm": "attention.output.LayerNorm",
        "ffn_up": "intermediate.dense",
        "ffn_down": "output.dense",
        "layer_output_norm": "output.LayerNorm",
    },
    layers="bert.encoder.layer",
)
"""Also of RoBERTa and XLM-RoBERTa: llama.cpp's converter cuts off the positions before a text's first."""


class Bert(Encoder[Config]):
    """BERT; families that extend it have other names, tables or heads."""

    config_class: ClassVar[type[EncoderConfig]] = BertConfig
    base = "bert"
    layers_at = "encoder.layer"
    gguf: ClassVar[GgufNames | None] = _GGUF

    def __init__(self, config: Config, weights: WeightScope) -> None:
        super().__init__(config, weights)
        base = weights.at(self.base)
        self.embeddings = BertEmbeddings(config, base.at("embeddings"))
        self.layers = [self.make_layer(base.at(f"{self.layers_at}.{i}")) for i in range(config.num_layers)]
        if config.labels:
            self.head = self.make_head(config.hidden_size, len(config.labels))

    def make_layer(self, weights: WeightScope) -> PostNormLayer:
        return make_bert_layer(self.config, weights)

    def make_head(self, size: int, num_labels: int) -> ClassificationHead:
        """Make the head over a text's first token."""
        pooler = Linear(self.weights.at(f"{self.base}.pooler"), size, {"dense": size}, bias=True)
        return ClassificationHead(pooler, Linear(self.weights, size, {"classifier": num_labels}, bias=True))

    def biases(self, batch: EncoderBatch) -> Sequence[Tensor] | None:
        """Return what is added to the scores of each of the batch's groups; None: nothing."""
        return None

    def embed(self, batch: EncoderBatch) -> Tensor:
        return self.embeddings(batch)

    def run_layers(self, x: Tensor, batch: EncoderBatch) -> Tensor:
        biases = self.biases(batch)
        for layer in self.layers:
            x = layer(x, batch, biases)
        return x

    def classify(self, hidden: Tensor, batch: EncoderBatch) -> Tensor:
        return self.head(batch.first(hidden))
