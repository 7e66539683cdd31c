"""Llama 2 and 3 (Touvron et al. 2023, arXiv:2307.09288), SmolLM2, and others of this shape: `Decoder` as it is. Biases
are optional."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from ..layers.decoder import Decoder
from ..model_config import ConfigReader, ModelConfig
from ..weights.gguf_names import GgufNames


class LlamaConfig(ModelConfig):
    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        keys = ConfigReader(hf)
        # llama.cpp converts Mistral's models as Llama's, with the window beside. In a config.json it means nothing.
        window = keys.window(is_on=keys.is_gguf)
        return cls(
            **keys.decoder(),
            attention_bias=keys.flag("attention_bias"),
            mlp_bias=keys.flag("mlp_bias"),
            sliding_windows=keys.windows(window),
        )


class Llama(Decoder[LlamaConfig]):
    config_class = LlamaConfig
    gguf = GgufNames(interleaved=("q_proj", "k_proj"))
