"""What encoders have in common: their config, a model with perhaps a head that classifies texts, rotary positions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Self, TypeVar

import torch
from torch import Tensor

from ....checkpoint.pooling import labels_of
from ....errors import ModelLoadError
from ....kernels.rotary import rotary_rows
from ...layers.encoder import ACTIVATIONS
from ...layers.linear import Linear
from ...model_config import ConfigReader
from ...pooling.batch import EncoderBatch
from ...rope import RopeConfig
from ...weights.gguf_names import GgufNames
from ...weights.scope import WeightScope


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConfig:
    """Settings of an encoder that all families have. Sizes are in elements."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    norm_eps: float
    activation: str
    max_position_embeddings: int  # tokens of the longest text
    checkpoint_dtype: str  # "float32", "bfloat16", "float16", or "" when the checkpoint does not say
    labels: tuple[str, ...]  # labels of the classification head; (): the model has none

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        """Read the content of a config.json by the family's rules. Raises ModelLoadError naming the key at fault."""
        raise NotImplementedError(f"{cls.__name__} is no family's config")

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    def rope_of(self, theta: float) -> RopeConfig:
        """Return the usual rotary positions, of a base."""
        return RopeConfig("default", theta, {}, self.head_dim, self.max_position_embeddings)

    @staticmethod
    def common(hf: Mapping[str, Any], *, first_position: int = 0) -> dict[str, Any]:
        """Return the fields that all families spell alike. ``first_position``: of the table, where a text begins."""
        keys = ConfigReader(hf)
        key = "hidden_act" if keys.text("hidden_act") else "hidden_activation"
        activation = keys.text(key) or "gelu"
        if activation not in ACTIVATIONS:
            known = ", ".join(ACTIVATIONS)
            raise ModelLoadError(f"config.json: {key}={activation!r:.80} is not supported; these are: {known}")
        if keys.text("position_embedding_type", "absolute") != "absolute":
            raise keys.error("position_embedding_type", "is not supported; 'absolute' is")
        hidden, heads = keys.integer("hidden_size"), keys.integer("num_attention_heads")
        if hidden % heads:
            raise ModelLoadError(f"config.json: hidden_size={hidden} is not a multiple of {heads} attention heads")
        return {
            "model_type": keys.text("model_type"),
            "vocab_size": keys.integer("vocab_size"),
            "hidden_size": hidden,
            "intermediate_size": keys.integer("intermediate_size"),
            "num_layers": keys.integer("num_hidden_layers"),
            "num_heads": heads,
            "norm_eps": keys.number("layer_norm_eps", keys.number("norm_eps", 1e-12, least=0), least=0),
            "activation": activation,
            "max_position_embeddings": _positions(keys, first_position),
            "checkpoint_dtype": keys.dtype(),
            "labels": labels_of(hf),
        }


def _positions(keys: ConfigReader, first_position: int) -> int:
    """Return the length of the longest text in tokens: the rows of the table of positions from the first position
    on."""
    rows = keys.integer("max_position_embeddings")
    if rows <= first_position:
        raise keys.error(
            "max_position_embeddings", f"must be more than {first_position}: a text's positions begin there"
        )
    return rows - first_position


Config = TypeVar("Config", bound=EncoderConfig)


class Encoder(ABC, Generic[Config]):
    """An encoder. It is complete when all ``weights.places`` are filled."""

    config_class: ClassVar[type[EncoderConfig]]
    base: ClassVar[str]
    """Below which name a checkpoint with a head has the tensors of the model without it."""
    gguf: ClassVar[GgufNames | None] = None
    """None: files of this family are not read."""

    def __init__(self, config: Config, weights: WeightScope) -> None:
        self.config = config
        self.weights = weights

    def forward(self, batch: EncoderBatch) -> Tensor:
        """Return [num_tokens, hidden_size]: the hidden states of all texts."""
        return self.run_layers(self.embed(batch), batch)

    @abstractmethod
    def embed(self, batch: EncoderBatch) -> Tensor:
        """Return [num_tokens, hidden_size], a new tensor: what the layers begin with."""

    @abstractmethod
    def run_layers(self, x: Tensor, batch: EncoderBatch) -> Tensor:
        """Return [num_tokens, hidden_size] for x, which is used up."""

    @abstractmethod
    def classify(self, hidden: Tensor, batch: EncoderBatch) -> Tensor:
        """Return [num_texts, num_labels]: logits of the head, for what `forward` returns."""


class ClassificationHead:
    """A layer and a matrix over a vector of each text: [n, num_labels] for [n, hidden_size]."""

    def __init__(self, inner: Linear, out: Linear, activation: Callable[[Tensor], Tensor] = torch.tanh) -> None:
        self._inner = inner
        self._out = out
        self._activation = activation

    def __call__(self, pooled: Tensor) -> Tensor:
        return self._out.multiply(self._activation(self._inner.multiply(pooled)))


class EncoderRopes:
    """Rotary positions of a batch's tokens, for each type of layers."""

    def __init__(self, ropes: Mapping[str, RopeConfig]) -> None:
        self._freqs = {kind: rope.inv_freq() for kind, rope in ropes.items()}

    def at(self, positions: Tensor, dtype: torch.dtype) -> dict[str, tuple[Tensor, Tensor]]:
        """Return cos and sin by layer type, for `apply_rotary`."""
        device = positions.device
        if next(iter(self._freqs.values()))[0].device != device:  # once: the host waits for a copy from unpinned memory
            self._freqs = {kind: (inv_freq.to(device), factor) for kind, (inv_freq, factor) in self._freqs.items()}
        rows = {kind: rotary_rows(positions, inv_freq, factor) for kind, (inv_freq, factor) in self._freqs.items()}
        return {kind: (cos.to(dtype), sin.to(dtype)) for kind, (cos, sin) in rows.items()}
